"""One network in other forms: wrapped, compiled, traced, exported, scripted.

The map does not depend on the form, as long as the Python code of the model runs. The inside of a scripted
module cannot be seen: RectGrad refuses it with an error that says so.

    python examples/data_parallel.py
"""

import warnings

import torch
from torch import Tensor, nn

import rectgrad


class Network(nn.Module):
    """A small CNN with a functional rectifier and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(16 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(self.stem(x).relu())
        h = torch.relu(h + self.body(h))
        return self.head(h.flatten(1))


def main() -> None:
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 16, 16)
    bare = rectgrad.attribute(model, x, "rectgrad", q=90)
    print(f"bare module: largest value {float(bare.max()):.4f}")

    warnings.filterwarnings("ignore", ".*torch.jit.script.* is deprecated")
    forms = {
        "nn.DataParallel": nn.DataParallel(model),
        "torch.compile": torch.compile(model, backend="eager"),
        "torch.fx.symbolic_trace": torch.fx.symbolic_trace(model),
        "torch.export": torch.export.export(model, (x,)).module(),
        "torch.jit.script": torch.jit.script(model),
    }
    for name, form in forms.items():
        try:
            maps = rectgrad.attribute(form, x, "rectgrad", q=90)
            print(f"{name}: largest difference {float((maps - bare).abs().max()):.1e}")
        except rectgrad.UnsupportedModelError as refusal:
            print(f"{name}: refused\n  {refusal}")


if __name__ == "__main__":
    main()
