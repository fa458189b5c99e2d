"""Linear steps of a network and their plain gradient without a graph: convolutions, linear layers, batch
norms that use their running statistics, average pooling. Dense as torch computes it, or from the few units
that passed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad.kernels import Survivors, native
from rectgrad.kernels.sparse import Carry, channelwise, with_survivors
from rectgrad.ops.windows import Region, per_dim

if TYPE_CHECKING:
    from rectgrad.engine.op import Op


class Geometry(NamedTuple):
    """How a convolution's windows lie."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@lru_cache(maxsize=4096)
def geometry(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: Any) -> Geometry:
    """From a call's arguments: None, or one number for all dimensions, or one for each."""
    dims = len(kernel)
    padding = 0 if padding in (None, "valid") else padding
    stride, dilation, groups = (1 if value is None else value for value in (stride, dilation, groups))
    kernel = tuple(kernel)
    return Geometry(kernel, per_dim(stride, dims), per_dim(padding, dims), per_dim(dilation, dims), groups)


_BOTH = ("dense", "sparse")  # how a gradient may be computed

# A step is made `of` an op about to run, and, where gradients may travel as lists, told what was `made`.


class Conv:
    """y = x * weight; the gradient needs of x its shape alone.

    norm: the batch norm that alone reads y, where its scale goes into the weights instead of the gradient.
    """

    takes_lists, paths = False, _BOTH
    norm: Scale | None = None
    _geometry: Geometry | None = None

    @staticmethod
    def of(op: Op, x: Tensor) -> Conv | None:
        args = op.args
        if len(args) == 7 and not op.kwargs:  # as the modules write it
            weight, lies = args[1], args[3:]
        else:
            weight, *others = (op.argument(name) for name in ("weight", *Geometry._fields[1:]))
            lies = tuple(others)
        if not isinstance(weight, Tensor) or weight.dtype is not x.dtype or lies[1] == "same":
            return None
        return Conv(x, weight, lies) if x.dim() == weight.dim() > 2 else None

    def __init__(self, x: Tensor, weight: Tensor, lies: tuple) -> None:
        self.shape, self._strides = x.shape, x.stride()
        self.weight, self._lies = (weight, weight._version), lies

    def made(self, op: Op, y: Tensor) -> None:
        self.outputs = y.shape[1:]
        dense = y.is_contiguous() and self.weight[0].is_contiguous()
        self.takes_lists = dense and len(self.outputs) < 4

    @property
    def geometry(self) -> Geometry:
        if self._geometry is None:
            given = [tuple(value) if type(value) is list else value for value in self._lies]
            self._geometry = geometry(self.weight[0].shape[2:], *given)
        return self._geometry

    def meet_again(self) -> None:
        """Its weights may have been written since the pass before."""
        self.weight = as_met(self.weight[0])

    def unshare(self, storage: int) -> None:
        self.weight = unshared(self.weight, storage)

    def gradient(self, R: Tensor) -> Tensor:
        kernel, stride, padding, dilation, groups = self.geometry
        weight = unchanged(self.weight) if self.norm is None else self.norm.times(unchanged(self.weight))
        if R.is_cuda and groups == 1:  # the same kernels, sooner
            left = _left_over(tuple(self.shape[2:]), tuple(R.shape[2:]), self.geometry)
            return _TRANSPOSED[len(kernel)](R, weight, None, stride, padding, left, 1, dilation)
        grad: Tensor = _convolution_backward(
            R,
            R.new_empty_strided((len(R), *self.shape[1:]), self._strides),  # how x lay: it is not read
            weight,
            None,  # no gradient of a bias is asked for
            stride,
            padding,
            dilation,
            False,
            (0,) * len(kernel),
            groups,
            (True, False, False),
        )[0]
        return grad

    def from_lists(self, passed: Survivors, R: Tensor, within: Region | None) -> Tensor | None:
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        call = _in_two_dimensions(self.shape, self.outputs, self.geometry, within)
        if not native.conv(passed, call, unchanged(self.weight), out):
            return None
        for row, count in enumerate(passed.lists.counts):
            if count < 0:  # too many for a list: this sample the dense way
                one = slice(row, row + 1)
                out[one] = self.gradient(outside_zeroed(R[one], within))
        return out

    def through(
        self,
        op: Op,
        R: Tensor,
        k: int | None,
        tau: float | None,
        rule: str,
        norm: Scale | None,
        within: Region | None,
    ) -> Tensor | None:
        """The gradient from that at an activation, which passes what exceeds tau, and a batch norm after this
        convolution. None where too much passes for lists."""
        call = _in_two_dimensions(self.shape, self.outputs, self.geometry, within)
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        scale = None if norm is None else (unchanged(norm.variance), unchanged(norm.weight), norm.eps)
        if scale is not None and not (_plain(scale[0]) and (scale[1] is None or _plain(scale[1]))):
            return None
        seen, weight = op.current.sums, unchanged(self.weight)
        passed = native.through(op.output, R, op.batch, k, tau, rule, seen, scale, call, weight, out)
        return out if passed else None


_convolution_backward = torch.ops.aten.convolution_backward.default
_TRANSPOSED: dict[int, Any] = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}


@lru_cache(maxsize=4096)
def _left_over(inputs: tuple[int, ...], outputs: tuple[int, ...], lies: Geometry) -> tuple[int, ...]:
    """Of each dimension the last inputs, which no window reaches."""
    return tuple(
        inputs[d]
        + 2 * lies.padding[d]
        - (outputs[d] - 1) * lies.stride[d]
        - lies.dilation[d] * (lies.kernel[d] - 1)
        - 1
        for d in range(len(inputs))
    )


@lru_cache(maxsize=4096)
def _in_two_dimensions(
    inputs: torch.Size,
    outputs: tuple[int, ...],
    geometry: Geometry,
    within: Region | None,
) -> native.Convolution:
    """A convolution as the kernel takes it; one dimension is a row."""
    kernel, stride, padding, dilation, groups = geometry
    n, channels_in, *size = inputs
    channels_out, *lengths = outputs
    within = within or tuple((0, length) for length in lengths)
    one = (1,) * (2 - len(size))
    none = (0,) * len(one)
    ends = (0, 1) * len(one) + tuple(end for ends in within for end in ends)
    sizes = (n, channels_in, *one, *size, channels_out, *one, *lengths, *one, *kernel)
    steps = (*one, *stride, *none, *padding, *one, *dilation, groups)
    return native.Convolution(*sizes, *steps, *ends)


class Linear:
    """y = x @ weight.T"""

    takes_lists, paths = False, _BOTH

    @staticmethod
    def of(op: Op, x: Tensor) -> Linear | None:
        weight = op.argument("weight")
        fits = isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype is x.dtype
        return Linear(x, weight) if fits else None

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.shape, self.weight = x.shape, as_met(weight)

    def made(self, op: Op, y: Tensor) -> None:
        dense = y.is_contiguous() and self.weight[0].is_contiguous()
        self.takes_lists = len(self.shape) > 1 and dense

    def meet_again(self) -> None:
        """Its weights may have been written since the pass before."""
        self.weight = as_met(self.weight[0])

    def unshare(self, storage: int) -> None:
        self.weight = unshared(self.weight, storage)

    def gradient(self, R: Tensor) -> Tensor:
        return R @ unchanged(self.weight)

    def from_lists(self, passed: Survivors, R: Tensor, within: Region | None) -> Tensor | None:
        if passed.scale is not None or min(passed.lists.counts) < 0:
            return None
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        native.linear(passed, unchanged(self.weight), out)
        return out


class Scale:
    """y = x * scale + shift, one of each a channel: a batch norm that does not look at its batch.

    folded: the convolution before it does its part.
    """

    takes_lists, paths = False, _BOTH
    folded = False

    @staticmethod
    def of(op: Op, x: Tensor) -> Scale | None:
        given, args, named = op.spec.argument, op.args, op.kwargs
        variance, eps = given("running_var", args, named), given("eps", args, named)
        if not isinstance(variance, Tensor) or given("training", args, named):
            return None
        if op.spec.name != "batch_norm" or x.dim() < 2:
            return None
        return Scale(variance, given("weight", args, named), 1e-5 if eps is None else eps, x.dtype)

    def __init__(self, variance: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> None:
        self.variance, self.weight = as_met(variance), as_met(weight)
        self.eps, self.dtype = eps, dtype

    def made(self, op: Op, y: Tensor) -> None:
        self.facts = op.facts
        self.takes_lists = y.is_contiguous()

    def meet_again(self) -> None:
        self.variance, self.weight = as_met(self.variance[0]), as_met(self.weight[0])

    def unshare(self, storage: int) -> None:
        self.variance = unshared(self.variance, storage)
        self.weight = unshared(self.weight, storage)

    @property
    def scale(self) -> Tensor:
        variance, weight = unchanged(self.variance), unchanged(self.weight)
        if _plain(variance) and (weight is None or _plain(weight)):
            return native.scale(variance, weight, self.eps)
        inverse = self._inverse()
        return inverse if weight is None else (inverse * weight).to(self.dtype)

    def _inverse(self) -> Tensor:
        """1 / the standard deviation, rounded once where there are doubles."""
        variance = unchanged(self.variance)
        variance = variance if variance.device.type == "mps" else variance.double()
        return (variance + self.eps).rsqrt().to(self.dtype)

    def times(self, weight: Tensor) -> Tensor:
        """A convolution's weights, each times the scale of the channel that it makes."""
        from rectgrad.kernels import cuda

        return cuda.scaled(weight, unchanged(self.variance), unchanged(self.weight), self.eps)

    def gradient(self, R: Tensor) -> Tensor:
        if self.folded:
            return R
        variance, weight = unchanged(self.variance), unchanged(self.weight)
        if R.is_cuda:  # the forward kernel, without a shift, is several times faster than the backward one
            mean, cudnn = _zeros(len(variance), variance.dtype, R.device), torch.backends.cudnn.enabled
            bias = None if weight is None else _zeros(len(variance), weight.dtype, R.device)
            return torch.batch_norm(R, weight, bias, mean, variance, False, 0.0, self.eps, cudnn)
        # To the last bit as torch computes it.
        if kernels.carries(R) and all(x is None or _plain(x) for x in (R, variance, weight)):
            return native.scaled(R, variance, weight, self.eps)
        grad = R * channelwise(self._inverse(), R)
        return grad if weight is None else grad.mul_(channelwise(weight.to(grad.dtype), R))

    def from_lists(self, passed: Survivors, R: Tensor, within: Region | None) -> Tensor | None:
        scaled = passed.scaled(self.scale)
        carry: Carry | None = self.facts.get("carry")
        if carry is not None and min(passed.lists.counts) >= 0:
            return carry(scaled)
        return with_survivors(self.gradient(kernels.dense(R)), scaled)


class AvgPool:
    """y = the mean of each window: on CPUs, torch takes long for its gradient."""

    takes_lists, paths = False, (None, None)

    @staticmethod
    def of(op: Op, x: Tensor) -> AvgPool | None:
        usual = op.name == "avg_pool2d" and not op.argument("ceil_mode", False)
        overridden = op.argument("divisor_override") is not None
        fits = usual and not overridden and op.current.carries and x.dim() == 4 and x.is_contiguous()
        return AvgPool(x.shape) if fits else None

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def made(self, op: Op, y: Tensor) -> None:
        kernel = per_dim(op.argument("kernel_size"), 2)
        stride = per_dim(op.argument("stride") or kernel, 2)
        padding = per_dim(op.argument("padding", 0), 2)
        n, channels, *size = self.shape
        planes, padded = n * channels, int(op.argument("count_include_pad", True))
        self.call = native.Pooling(planes, *size, *y.shape[2:], *kernel, *stride, *padding, padded)

    def meet_again(self) -> None:
        """It has no weights."""

    def unshare(self, storage: int) -> None:
        """Nothing is kept."""

    def from_lists(self, passed: Survivors, R: Tensor, within: Region | None) -> Tensor | None:
        return None

    def gradient(self, R: Tensor) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        if not native.avg_pool(self.call, R, out):
            raise MemoryError("no memory for the gradient of an average pooling")
        return out


class _Constants(threading.local):
    used: list[Tensor] | None = None


_constants = _Constants()


@contextlib.contextmanager
def constants_used() -> Iterator[list[Tensor]]:
    """The constants below that are used in here: a graph reads them as long as it lives."""
    used: list[Tensor] = []
    _constants.used = used
    try:
        yield used
    finally:
        _constants.used = None


def _noted(constant: Tensor) -> Tensor:
    if _constants.used is not None:
        _constants.used.append(constant)
    return constant


def _zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _noted(_kept_zeros(n, dtype, device))


@lru_cache(maxsize=512)
def _kept_zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(n, dtype=dtype, device=device)


def _plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"


Weight = tuple[
    Any, int
]  # a parameter of a call and its version: it must not change before its gradient is taken


def as_met(value: Tensor | None) -> Weight:
    return value, 0 if value is None else value._version


def unchanged(weight: Weight) -> Any:
    value, version = weight
    if value is not None and value._version != version:
        raise RuntimeError("a weight was modified by an inplace operation")
    return value


def unshared(weight: Weight, storage: int) -> Weight:
    """With a copy of what is about to be written."""
    value = weight[0]
    shares = value is not None and value.untyped_storage()._cdata == storage
    return as_met(value.clone()) if shares else weight


Step = Conv | Linear | Scale | AvgPool


LINEAR_STEPS: dict[str | None, Any] = {
    "conv": Conv,
    "linear": Linear,
    "batch_norm": Scale,
    "avg_pool": AvgPool,
}


def outside_zeroed(R: Tensor, within: Region | None) -> Tensor:
    """R times 1 within the region and 0 outside: what is not finite there stays so, and is noticed."""
    if within is None:
        return R
    return R * _noted(_ones_within(tuple(R.shape[-len(within) :]), within, R.dtype, R.device))


@lru_cache(maxsize=512)
def _ones_within(size: tuple[int, ...], within: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(size, dtype=dtype, device="cpu")
    mask[tuple(slice(first, last) for first, last in within)] = 1
    return mask.to(device)
