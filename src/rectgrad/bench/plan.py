"""The plan of a benchmark: what to measure, and how."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rectgrad.bench import networks
from rectgrad.methods.catalog import METHODS, as_method, every_name

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")}


@dataclass(frozen=True)
class Plan:
    """models: names in networks.NETWORKS. pixels: height and width of the images; None: the network's
    default. methods: names in METHODS; empty: all, but those with many passes only with `averages`. captum,
    naive: include Captum's counterparts (None: if installed) and straightforward implementations. tf32,
    threads: None keeps torch's setting. selection, scaling: additional measurements.
    """

    models: tuple[str, ...] = ("efficientnet_lite0",)
    device: str = "cpu"
    batch: int = 1
    pixels: int | None = None
    methods: tuple[str, ...] = ()
    rounds: int = 5
    channels_last: bool = False
    tf32: bool | None = None
    dtype: str = "float32"
    threads: int | None = None
    averages: bool = False
    captum: bool | None = None
    naive: bool = True
    selection: bool = False
    scaling: bool = False

    def __post_init__(self) -> None:
        for name in self.models:
            networks.check(name, self.pixels)
        for name in self.methods:
            as_method(name, {})
        for field in ("batch", "rounds", "threads"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, not {value}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; dtypes are {', '.join(DTYPES)}")
        if self.captum and not captum_installed():
            raise ValueError("captum is not installed: pip install captum, or use --no-captum")

    @property
    def chosen(self) -> list[str]:
        """The methods to run."""
        fast = [name for name, each in METHODS.items() if each.one_backward or not each.runs_model]
        return list(self.methods) or (every_name() if self.averages else fast)

    @property
    def with_captum(self) -> bool:
        return captum_installed() if self.captum is None else self.captum


def captum_installed() -> bool:
    return importlib.util.find_spec("captum") is not None


@contextlib.contextmanager
def applied(plan: Plan) -> Iterator[None]:
    """Applies the plan's threads and precision to torch, and restores the previous settings on exit."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32
    try:
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        if plan.tf32 is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = plan.tf32
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
