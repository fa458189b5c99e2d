"""A table, a network with small layers, and the warning that small layers cause.

Whether a loan is granted depends on two of eight columns: income and debt. At the default q = 98 a layer of
16 units passes nothing, and the map is zero. A warning names the largest q that passes one unit; with that q,
the maps mark the two columns.

    python examples/tabular.py
"""

import re
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

COLUMNS = ("age", "income", "rooms", "height", "debt", "shoe size", "hour", "distance")
DECISIVE = [COLUMNS.index("income"), COLUMNS.index("debt")]


def applicants(n: int) -> tuple[Tensor, Tensor]:
    """Rows of standardised values, and whether the loan is granted."""
    x = torch.randn(n, len(COLUMNS))
    return x, (x[:, DECISIVE[0]] > x[:, DECISIVE[1]]).long()


def trained() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(len(COLUMNS), 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        x, granted = applicants(128)
        optimiser.zero_grad()
        F.cross_entropy(model(x), granted).backward()
        optimiser.step()
    return model.eval()


def explained(model: nn.Module, x: Tensor, q: float) -> tuple[Tensor, str | None]:
    """The maps, and the library's warning where a map is zero."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        maps = rectgrad.attribute(model, x, "rectgrad", q=q)
    return maps, str(caught[0].message) if caught else None


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, granted = applicants(200)
    print(f"accuracy: {float((model(x).argmax(1) == granted).float().mean()):.2f}")

    q = 98.0
    maps, warning = explained(model, x, q)
    while warning:
        print(f"q={q:g}: {int((maps == 0).all(1).sum())} of {len(x)} maps are zero\n  warning: {warning}")
        q = float(re.search(r"passes one unit is ([\d.]+)", warning)[1])
        maps, warning = explained(model, x, q)
    print(f"q={q:g}: {int((maps == 0).all(1).sum())} of {len(x)} maps are zero")

    shares = maps.sum(0) / maps.sum()
    for name, part in sorted(zip(COLUMNS, shares.tolist(), strict=True), key=lambda pair: -pair[1]):
        print(f"{name:>10} {part:5.2f} {'#' * round(40 * part)}")
    print(f"share of income and debt: {float(shares[DECISIVE].sum()):.2f}")


if __name__ == "__main__":
    main()
