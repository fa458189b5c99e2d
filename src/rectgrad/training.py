"""The training loop: Adam over batches in file order; deterministic for a given seed, and resumable.

The paper's setting (section 4): 20 epochs, batches of 100, learning rate 0.001, no augmentation.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectgrad.data import Images, digest_of, scaled
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.models.cifar import CifarCNN
from rectgrad.photos import files


@dataclass(frozen=True)
class Plan:
    """The hyperparameters of a training run, without the data."""

    epochs: int = 20
    batch: int = 100
    rate: float = 1e-3
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be positive, not {self.rate}")


@dataclass
class Run:
    """The state of a training run: the network, its optimiser and the losses so far."""

    module: nn.Module
    optimiser: torch.optim.Adam
    losses: list[float] = field(default_factory=list)  # mean of each finished epoch

    @property
    def epoch(self) -> int:
        return len(self.losses)


def fresh(plan: Plan, classes: int = 10) -> Run:
    """A network with initial weights from the seed, which are the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        module = CifarCNN(classes)
    module = module.to(plan.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Run(module, torch.optim.Adam(module.parameters(), lr=plan.rate))


def train(
    images: Images,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    *,
    checkpoint: Path | None = None,
    classes: int = 10,
    progress: Progress = no_progress,
) -> Run:
    """Trains the paper's CNN. A `checkpoint` is written after each epoch; training resumes from it if it has
    the same plan and data."""
    data = digest_of(images)
    run = (load_checkpoint(checkpoint, plan, data, classes) if checkpoint else None) or fresh(plan, classes)
    x, y = scaled(images.pixels).to(plan.device), torch.from_numpy(images.labels).to(plan.device)
    with deterministic(), progress(plan.epochs - run.epoch, f"training, seed {plan.seed}") as advance:
        while run.epoch < plan.epochs:
            run.losses.append(one_epoch(run, x, y, plan))
            if checkpoint is not None:
                save(run, plan, data, checkpoint)
            advance()
    run.module.eval()
    return run


def deterministic() -> AbstractContextManager[None]:
    """Makes cuDNN deterministic, in full float32, within the context. Has no effect on other devices."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def one_epoch(run: Run, x: Tensor, y: Tensor, plan: Plan) -> float:
    """Trains one epoch in the order of the data and returns the mean loss."""
    run.module.train()
    total = torch.zeros((), device=plan.device)
    for start in range(0, len(x), plan.batch):
        rows = slice(start, start + plan.batch)
        inputs = x[rows].to(memory_format=torch.channels_last)
        loss = F.cross_entropy(run.module(inputs), y[rows])
        run.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        run.optimiser.step()
        total += loss.detach() * len(inputs)
    return float(total) / len(x)


@torch.no_grad()
def logits(module: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """The logits of scaled images, on the CPU."""
    device = next(module.parameters()).device
    return torch.cat([module(part.to(device)).cpu() for part in x.split(batch)])


def accuracy(module: nn.Module, images: Images) -> float:
    """The share of correctly classified images."""
    predicted = logits(module, scaled(images.pixels)).argmax(1)
    return float((predicted == torch.from_numpy(images.labels)).float().mean())


# --- checkpoints -------------------------------------------------------------------------------------------


def save(run: Run, plan: Plan, data: str, path: Path) -> None:
    """Saves network and optimiser as safetensors, with plan and losses as metadata."""
    tensors = {f"module.{name}": value for name, value in run.module.state_dict().items()}
    for name, value in run.module.named_parameters():
        state = run.optimiser.state[value]
        tensors |= {f"{key}.{name}": torch.as_tensor(state[key]) for key in _ADAM}
    metadata = {"plan": json.dumps(asdict(plan)), "data": data, "losses": json.dumps(run.losses)}
    with files.atomic(path) as part:
        safetensors.torch.save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, part, metadata)


_ADAM = ("step", "exp_avg", "exp_avg_sq")


def load_checkpoint(path: Path, plan: Plan, data: str, classes: int = 10) -> Run | None:
    """The run saved in a checkpoint; None if it is missing, unreadable, or has another plan or other data."""
    try:
        with safetensors.safe_open(path, "pt") as content:
            metadata: dict[str, str] = content.metadata() or {}
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 - no dict
        same = _resumable_settings(json.loads(metadata["plan"])) == _resumable_settings(asdict(plan))
        if not same or metadata["data"] != data:
            return None
        losses = json.loads(metadata["losses"])
    except (OSError, ValueError, KeyError, safetensors.SafetensorError):
        return None
    if len(losses) > plan.epochs:
        return None
    run = fresh(plan, classes)
    run.losses = losses
    run.module.load_state_dict({k[7:]: v for k, v in tensors.items() if k.startswith("module.")})
    for name, value in run.module.named_parameters():
        run.optimiser.state[value] = {key: _like(tensors[f"{key}.{name}"], value, key) for key in _ADAM}
    return run


def _like(saved: Tensor, parameter: Tensor, key: str) -> Tensor:
    """Moves Adam state to the device of its parameter; the step count stays on the CPU."""
    return saved if key == "step" else torch.empty_like(parameter).copy_(saved)


def _resumable_settings(plan: dict[str, Any]) -> dict[str, Any]:
    """The settings that must match to resume: the number of epochs and the device may change."""
    return {key: value for key, value in plan.items() if key not in ("epochs", "device")}
