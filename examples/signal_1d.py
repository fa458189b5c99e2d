"""A network for signals, and where in a signal it finds a pattern.

A noisy signal of 128 steps contains one of two patterns of 16 steps, a bump or a ripple, at a random
position. A small 1d network learns to distinguish them; its maps should cover the pattern, wherever it is.

    python examples/signal_1d.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

LENGTH, WIDTH = 128, 16
STEPS = torch.linspace(0, torch.pi, WIDTH)
PATTERNS = torch.stack([2 * STEPS.sin(), 2 * (4 * STEPS).sin()])  # a bump, a ripple


def signals(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Signals (n, 1, LENGTH), the pattern in each, and where it is: true on its steps."""
    labels, starts = torch.randint(0, 2, (n,)), torch.randint(0, LENGTH - WIDTH, (n,))
    steps = starts[:, None] + torch.arange(WIDTH)
    planted = torch.zeros(n, LENGTH).scatter(1, steps, PATTERNS[labels])
    places = torch.zeros(n, LENGTH, dtype=torch.bool).scatter(1, steps, True)
    return (planted + 0.5 * torch.randn(n, LENGTH))[:, None], labels, places[:, None]


def trained() -> nn.Module:
    model = nn.Sequential(
        nn.Conv1d(1, 16, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 7, padding=3), nn.ReLU(),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(100):
        x, labels, _ = signals(64)
        optimiser.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimiser.step()
    return model.eval()


def share(maps: Tensor, places: Tensor) -> float:
    """The mean share of a map on the pattern."""
    size = maps.abs()
    return float(((size * places).sum((1, 2)) / size.sum((1, 2))).mean())


def drawn(values: Tensor) -> str:
    """A curve as a line of text."""
    heights = (values - values.min()) / (values.max() - values.min())
    return "".join("▁▂▃▄▅▆▇█"[int(7 * h)] for h in heights)


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    x, labels, places = signals(100)
    print(f"accuracy: {float((model(x).argmax(1) == labels).float().mean()):.2f}")

    maps = rectgrad.attribute(model, x, "rectgrad", q=95)
    print(f"share of the map on the pattern: {share(maps, places):.2f} (of the signal: {WIDTH / LENGTH:.2f})")
    print(f"the same for the plain gradient: {share(rectgrad.attribute(model, x, 'saliency'), places):.2f}")
    for name, values in ("signal", x), ("pattern", places.float()), ("map", maps):
        print(f"{name:>8} {drawn(values[0, 0])}")


if __name__ == "__main__":
    main()
