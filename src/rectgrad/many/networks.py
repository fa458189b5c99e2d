"""Trains many copies of the paper's CNN at once, each with its own initial weights and its own images.

Up to rounding, every network is trained as it would be alone; the networks only share kernel launches.
Tensors are bfloat16 with float32 weights, sums and Adam state; or float32 or float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from rectgrad.many import triton_cnn as kernels
from rectgrad.many.occlusion import Occluded
from rectgrad.models.cifar import CifarCNN

# name: (image size, channels in, channels out); the input of conv1 is 9 taps x 3 channels, padded to 32
CONVOLUTIONS = {"conv1": (32, 32, 32), "conv2": (32, 32, 32), "conv3": (16, 32, 64), "conv4": (16, 64, 64)}
# Number of parts that the weight gradient is split into: enough programs to fill a GPU.
PARTS = {"conv1": 32, "conv2": 32, "conv3": 16, "conv4": 8}
BLOCKS = {"conv1": 128, "conv2": 128, "conv3": 64, "conv4": 64}  # positions per block of the weight gradient
BLOCK = 128  # positions per block of a convolution
SIDE = 32
ADAM_BLOCK = 1024


class Networks:
    """N networks in training. `parameters` maps names to (N, ...) tensors in the layout of the kernels."""

    def __init__(self, modules: Sequence[CifarCNN], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.n, self.device, self.dtype, self.steps = len(modules), device, dtype, 0
        stacked = [packed(module) for module in modules]
        self.wide = (
            torch.float64 if dtype == torch.float64 else torch.float32
        )  # dtype of weights, sums and Adam state
        self.parameters = {
            k: torch.stack([each[k] for each in stacked]).to(device, self.wide) for k in stacked[0]
        }
        self.moments = {
            k: (torch.zeros_like(value), torch.zeros_like(value)) for k, value in self.parameters.items()
        }
        self.seen = {
            k: value.to(dtype, copy=True) for k, value in self.parameters.items()
        }  # read by the kernels
        for name in self.parameters:
            if name.endswith("bias"):
                self.seen[name] = self.parameters[name].clone()  # biases are added to sums
        self.sums = tl.float64 if dtype == torch.float64 else tl.float32
        self.precision = "tf32" if dtype == torch.bfloat16 else "ieee"
        self._space: dict[Any, Tensor] = {}

    def learn(self, data: Occluded, first: int, count: int, rate: float = 1e-3) -> Tensor:
        """One training step of all networks on `count` images, starting at `first`. Returns the losses,
        (N,)."""
        kept = self._forward(data, first, count)
        losses, R = _loss(kept["logits"].to(self.wide), data.labels[first : first + count])
        self._update(self._backward(kept, R, count), rate)
        return losses

    def logits(self, data: Occluded, first: int, count: int) -> Tensor:
        """The logits of all networks, (N, count, classes)."""
        return self._forward(data, first, count)["logits"].to(self.wide)

    def states(self) -> list[tuple[dict[str, Tensor], ...]]:
        """Of each network, by name: its weights, and the first and second moments of Adam."""
        all_three = (
            self.parameters,
            {k: first for k, (first, _) in self.moments.items()},
            {k: second for k, (_, second) in self.moments.items()},
        )
        return [
            tuple(unpacked({k: v[i].cpu() for k, v in each.items()}) for each in all_three)
            for i in range(self.n)
        ]

    # --- one step ---------------------------------------------------------------------------------------

    def _forward(self, data: Occluded, first: int, count: int) -> dict[str, Tensor]:
        kept = {"x": data.pixels(first, count, self._buffer("x", count * SIDE * SIDE, 32))}
        kept["y1"] = self._convolved("conv1", kept["x"], count)
        kept["y2"] = self._convolved("conv2", kept["y1"], count)
        kept["p1"] = self._pooled("p1", kept["y2"], 32, 32, count)
        kept["y3"] = self._convolved("conv3", kept["p1"], count)
        kept["y4"] = self._convolved("conv4", kept["y3"], count)
        kept["p2"] = self._pooled("p2", kept["y4"], 16, 64, count)
        flat = kept["p2"].view(self.n, count, -1)
        kept["hidden"] = self._dense("dense1", flat).relu_()
        kept["logits"] = self._dense("dense2", kept["hidden"])
        return kept

    def _backward(self, kept: dict[str, Tensor], R: Tensor, count: int) -> dict[str, Tensor]:
        """The gradients of the parameters by name, (N, ...) or (N, parts, ...)."""
        found: dict[str, Tensor] = {}
        R = R.to(self.dtype)
        found["dense2.weight"] = kept["hidden"].transpose(1, 2) @ R
        found["dense2.bias"] = R.to(self.wide).sum(1)
        R = (R @ self.seen["dense2.weight"].transpose(1, 2)).masked_fill_(kept["hidden"] <= 0, 0)
        flat = kept["p2"].view(self.n, count, -1)
        found["dense1.weight"] = flat.transpose(1, 2) @ R
        found["dense1.bias"] = R.to(self.wide).sum(1)
        R = R @ self.seen["dense1.weight"].transpose(1, 2)
        R = self._unpooled("g4", R, kept["y4"], kept["p2"], 16, 64, count)
        self._weighed("conv4", kept["y3"], R, found, count)
        R = self._back("conv4", R, kept["y3"], count)
        self._weighed("conv3", kept["p1"], R, found, count)
        R = self._back("conv3", R, kept["p1"], count)
        R = self._unpooled("g2", R, kept["y2"], kept["p1"], 32, 32, count)
        self._weighed("conv2", kept["y1"], R, found, count)
        R = self._back("conv2", R, kept["y1"], count)
        self._weighed("conv1", kept["x"], R, found, count)
        return found

    def _update(self, gradients: dict[str, Tensor], rate: float) -> None:
        self.steps += 1
        corrections = 1 - 0.9**self.steps, (1 - 0.999**self.steps) ** 0.5
        for name, p in self.parameters.items():
            size = p[0].numel()
            m, v = self.moments[name]
            g = gradients[name]
            parts = g.numel() // p.numel()
            grid = (-(-size // ADAM_BLOCK), self.n)
            kernels.adam[grid](
                p, m, v, self.seen[name], g, size, rate, *corrections, PARTS=parts, BLOCK=ADAM_BLOCK
            )

    # --- layers -----------------------------------------------------------------------------------------

    def _convolved(self, name: str, x: Tensor, count: int) -> Tensor:
        side, _, cout = CONVOLUTIONS[name]
        positions = count * side * side
        y = self._buffer(name, positions, cout)
        w, b = self.seen[f"{name}.weight"], self.seen[f"{name}.bias"]
        self._launch(positions, x, w, b, y, y, name, False)
        return y

    def _back(self, name: str, R: Tensor, gate: Tensor, count: int) -> Tensor:
        """The gradient at the input of a convolution; zero where the layer below was inactive."""
        side, cin, _ = CONVOLUTIONS[name]
        positions = count * side * side
        g = self._buffer(f"{name} back", positions, cin)
        w = self.seen[f"{name}.weight"]
        self._launch(positions, R, w, w, gate, g, name, True)
        return g

    def _launch(
        self, positions: int, x: Tensor, w: Tensor, b: Tensor, gate: Tensor, y: Tensor,
        name: str, backward: bool,
    ) -> None:  # fmt: skip
        side, cin, cout = CONVOLUTIONS[name]
        cin, cout = (cout, cin) if backward else (cin, cout)
        kernels.convolve[(-(-positions // BLOCK), self.n)](
            x, w, b, gate, y, positions,
            SIDE=side, TAPS=1 if name == "conv1" else 9, CIN=cin, COUT=cout,
            BACKWARD=backward, PRECISION=self.precision, SUMS=self.sums, BLOCK=BLOCK,
        )  # fmt: skip

    def _weighed(self, name: str, x: Tensor, R: Tensor, found: dict[str, Tensor], count: int) -> None:
        side, cin, cout = CONVOLUTIONS[name]
        taps, positions = (1 if name == "conv1" else 9), count * side * side
        parts = PARTS[name]
        dw = self._buffer(f"{name} dw", parts * taps * cin, cout, self.wide)
        db = self._buffer(f"{name} db", parts, cout, self.wide)
        part = -(-positions // parts)
        block = BLOCKS[name] // (2 if self.dtype == torch.float64 else 1)  # fits into shared memory
        kernels.weigh[(parts, 1 if taps == 1 else 3, self.n)](
            x, R, dw, db, positions, part,
            SIDE=side, TAPS=taps, CIN=cin, COUT=cout, PRECISION=self.precision,
            SUMS=self.sums, BLOCK=block,
        )  # fmt: skip
        found[f"{name}.weight"], found[f"{name}.bias"] = dw, db

    def _pooled(self, name: str, y: Tensor, side: int, channels: int, count: int) -> Tensor:
        p = self._buffer(name, count * side * side // 4, channels)
        kernels.pool[(-(-p.numel() // 1024),)](y, p, p.numel(), SIDE=side, C=channels, BLOCK=1024)
        return p

    def _unpooled(
        self, name: str, R: Tensor, y: Tensor, p: Tensor, side: int, channels: int, count: int
    ) -> Tensor:
        g = self._buffer(name, count * side * side, channels)
        grid = (-(-p.numel() // 1024),)
        kernels.unpool[grid](R.contiguous(), y, p, g, p.numel(), SIDE=side, C=channels, BLOCK=1024)
        return g

    def _dense(self, name: str, x: Tensor) -> Tensor:
        bias = self.seen[f"{name}.bias"].unsqueeze(1).to(self.dtype)
        return torch.baddbmm(bias, x, self.seen[f"{name}.weight"])

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer for a tensor of each network, reused in every step."""
        shape = (self.n, rows, columns)
        if (name, rows) not in self._space:
            self._space[name, rows] = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return self._space[name, rows]


def _loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each network, and its gradient at the logits."""
    logs = logits.log_softmax(2)
    index = labels.expand(len(logits), -1).unsqueeze(2)
    losses = -logs.gather(2, index).squeeze(2).mean(1)
    one = torch.ones_like(index, dtype=logs.dtype)
    return losses, logs.exp().scatter_add(2, index, -one) / len(labels)


# --- conversion between torch's layout of weights and that of the kernels ----------------------------------


def packed(module: CifarCNN) -> dict[str, Tensor]:
    """Convolutions as (taps, in, out), with the 27 rows of conv1 padded to 32; dense layers as (in, out)."""
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    found = dict(state)
    for name in CONVOLUTIONS:
        weight = state[f"{name}.weight"].permute(2, 3, 1, 0).reshape(9, -1, state[f"{name}.weight"].shape[0])
        if name == "conv1":
            weight = torch.cat([weight.reshape(27, -1), torch.zeros(5, weight.shape[2])]).unsqueeze(0)
        found[f"{name}.weight"] = weight.contiguous()
    dense = state["dense1.weight"].reshape(256, 64, 8, 8).permute(2, 3, 1, 0)
    found["dense1.weight"] = dense.reshape(4096, 256).contiguous()
    found["dense2.weight"] = state["dense2.weight"].T.contiguous()
    return found


def unpacked(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `packed`: the state of a module, from tensors in the layout of the kernels."""
    state = dict(parameters)
    for name in CONVOLUTIONS:
        weight = parameters[f"{name}.weight"]
        weight = weight[0, :27].reshape(9, 3, -1) if name == "conv1" else weight
        state[f"{name}.weight"] = weight.reshape(3, 3, weight.shape[1], -1).permute(3, 2, 0, 1).contiguous()
    dense = parameters["dense1.weight"].reshape(8, 8, 64, 256).permute(3, 2, 0, 1)
    state["dense1.weight"] = dense.reshape(256, 4096).contiguous()
    state["dense2.weight"] = parameters["dense2.weight"].T.contiguous()
    return state
