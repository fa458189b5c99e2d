"""The training loop; deterministic for a given seed, and resumable.

The paper's setting (section 4) is the default: Adam over batches in file order, 20 epochs, batches of 100,
learning rate 0.001, no augmentation. PLANS also has the settings of a residual network and a transformer.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rectgrad.data import Images, digest_of, scaled
from rectgrad.data.fetch import Progress, no_progress
from rectgrad.models.cifar import CifarCNN
from rectgrad.models.resnet import CifarResNet
from rectgrad.models.vit import CifarViT
from rectgrad.photos import files

# name -> the network for a number of classes
ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "cnn": CifarCNN,
    "resnet": CifarResNet,
    "vit": CifarViT,
}
WARM_UP = 0.2  # share of the steps in which a one-cycle learning rate rises
SHIFT = 4  # pixels, in each direction


@dataclass(frozen=True)
class Plan:
    """The hyperparameters of a training run, without the data."""

    epochs: int = 20
    batch: int = 100
    rate: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    arch: str = "cnn"
    decay: float = 0.0  # weight decay, apart from the gradient (AdamW)
    smoothing: float = 0.0  # of the labels
    erase: int = 0  # side of a square that is erased from each augmented image
    augment: bool = False  # in random order, shifted and mirrored at random
    one_cycle: bool = False  # the learning rate rises from zero to `rate`, then falls to zero
    bfloat16: bool = False  # mixed precision on a GPU

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {self.arch!r}; architectures are {', '.join(ARCHITECTURES)}"
            )
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate must be positive, not {self.rate}")

    @property
    def precision(self) -> torch.autocast:
        """The context of the forward pass."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.bfloat16 and kind == "cuda")


_MODERN: dict[str, Any] = {"smoothing": 0.1, "augment": True, "one_cycle": True, "bfloat16": True}

# architecture -> its usual plan
PLANS: dict[str, Plan] = {
    "cnn": Plan(),
    "resnet": Plan(epochs=40, batch=256, rate=3e-3, arch="resnet", decay=0.2, erase=8, **_MODERN),
    "vit": Plan(epochs=100, batch=512, rate=1e-3, arch="vit", decay=0.1, erase=16, **_MODERN),
}


@dataclass
class Run:
    """The state of a training run: the network, its optimiser and the losses so far."""

    module: nn.Module
    optimiser: torch.optim.AdamW  # without weight decay it is Adam, to the last bit
    losses: list[float] = field(default_factory=list)  # mean of each finished epoch

    @property
    def epoch(self) -> int:
        return len(self.losses)


def fresh(plan: Plan, classes: int = 10) -> Run:
    """A network with initial weights from the seed, which are the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        module = ARCHITECTURES[plan.arch](classes)
    module = module.to(plan.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Run(module, torch.optim.AdamW(module.parameters(), lr=plan.rate, weight_decay=plan.decay))


def train(
    images: Images,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    *,
    checkpoint: Path | None = None,
    classes: int = 10,
    progress: Progress = no_progress,
) -> Run:
    """Trains the plan's network. A `checkpoint` is written after each epoch; training resumes from it if it
    has the same plan and data."""
    data = digest_of(images)
    if checkpoint is not None:
        files.remove_partial_files(checkpoint.parent, f".{glob.escape(checkpoint.name)}.*")
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


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes cuDNN and attention deterministic, cuDNN in full float32, within the context. Has no effect on
    other devices."""
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with flags, sdpa_kernel(SDPBackend.MATH):
        yield


def one_epoch(run: Run, x: Tensor, y: Tensor, plan: Plan) -> float:
    """Trains one epoch and returns the mean loss."""
    run.module.train()
    total, done = torch.zeros((), device=plan.device), 0
    for inputs, labels in batches(x, y, plan, run.epoch):
        if plan.one_cycle:
            share = (run.epoch + (done + len(inputs) / 2) / len(x)) / plan.epochs
            run.optimiser.param_groups[0]["lr"] = plan.rate * one_cycle(share)
        with plan.precision:
            loss = F.cross_entropy(run.module(inputs), labels, label_smoothing=plan.smoothing)
        run.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        run.optimiser.step()
        total += loss.detach() * len(inputs)
        done += len(inputs)
    return float(total) / len(x)


def one_cycle(done: float) -> float:
    """The factor of the learning rate after the share `done` of the training."""
    return min(done / WARM_UP, (1 - done) / (1 - WARM_UP))


def batches(x: Tensor, y: Tensor, plan: Plan, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch: in the order of the data, or augmented. The random numbers depend only on the
    plan's seed and the epoch."""
    if not plan.augment:
        for start in range(0, len(x), plan.batch):
            rows = slice(start, start + plan.batch)
            yield x[rows].to(memory_format=torch.channels_last), y[rows]
        return
    random = torch.Generator().manual_seed(1_000_003 * plan.seed + epoch)
    for order in torch.randperm(len(x), generator=random).split(plan.batch):
        where = order.to(x.device)
        yield augmented(x[where], torch.rand(5, len(order), 1, generator=random), plan.erase), y[where]


def augmented(x: Tensor, random: Tensor, erase: int) -> Tensor:
    """Each image shifted, mirrored or not, and with a square set to zero, in channels-last format. `random`:
    (5, N, 1) numbers in 0..1 for the shifts, the mirroring, and the centre of the square."""
    side, line = x.shape[-1], torch.arange(x.shape[-1], device=x.device)
    random = random.to(x.device)
    down, right = (random[:2] * (2 * SHIFT + 1)).long()
    rows, columns = line + down, torch.where(random[2] < 0.5, line.flip(0), line) + right
    images = torch.arange(len(x), device=x.device)[:, None, None]
    found = F.pad(x, (SHIFT,) * 4)[images, :, rows[:, :, None], columns[:, None]]  # (N, side, side, channels)
    near = (line - random[3:] * side).abs() < erase / 2
    return found.masked_fill((near[0][:, :, None] & near[1][:, None])[..., None], 0).permute(0, 3, 1, 2)


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
    content = safetensors.torch.save({k: v.cpu().contiguous() for k, v in tensors.items()}, metadata)
    with files.atomic(path) as part:
        part.write_bytes(content)  # `save_file` has a temporary file of its own, which a kill would leave


_ADAM = ("step", "exp_avg", "exp_avg_sq")


def load_checkpoint(path: Path, plan: Plan, data: str, classes: int = 10) -> Run | None:
    """The run saved in a checkpoint; None if it is missing, damaged, or has another plan or other data."""
    try:
        return _loaded(path, plan, data, classes)
    except Exception:  # of any kind, as a file can hold anything in place of plan, losses and tensors
        return None


def _loaded(path: Path, plan: Plan, data: str, classes: int) -> Run | None:
    with safetensors.safe_open(path, "pt") as content:
        metadata: dict[str, str] = content.metadata() or {}
        tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118 - no dict
    same = _resumable_settings(json.loads(metadata["plan"])) == _resumable_settings(asdict(plan))
    losses = [float(each) for each in json.loads(metadata["losses"])]
    if not same or metadata["data"] != data or len(losses) > plan.epochs:
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
    """The settings that must match to resume: the device may change, and the number of epochs too unless the
    learning rate depends on it. Settings that a file lacks have their default."""
    plan = asdict(Plan()) | plan
    free = {"device"} if plan["one_cycle"] else {"device", "epochs"}
    return {key: value for key, value in plan.items() if key not in free}
