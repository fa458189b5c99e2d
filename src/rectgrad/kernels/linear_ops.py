"""Linear ops and their gradient without a graph: convolutions, linear layers, batch norms that use their
running statistics, average pooling. Dense as torch computes it, or from the few units that passed.

Each takes tensors and numbers, which the engine reads from the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad.kernels import native
from rectgrad.kernels.sparse import Sparse, channelwise, dense
from rectgrad.ops.windows import Region, per_dim

Gradient = tuple[Any, str | None]  # a tensor or a Sparse, and how it was computed: sparse or dense


class LinearOp(Protocol):
    """The gradient of R with respect to the op's one data tensor. R counts `within` a region of its maps."""

    def gradient(self, R: Any, within: Region | None = None) -> Gradient: ...


class Weight:
    """A parameter of a call. It must not be modified before its gradient is taken."""

    __slots__ = ("_value", "_version")

    def __init__(self, value: Tensor | None) -> None:
        self._value, self._version = value, _version(value)

    @property
    def value(self) -> Any:
        if _version(self._value) != self._version:
            raise RuntimeError("a weight was modified by an inplace operation")
        return self._value


def _version(value: Tensor | None) -> int:
    try:
        return 0 if value is None else value._version
    except RuntimeError:  # an inference tensor, which cannot be written elsewhere
        return 0


class Geometry(NamedTuple):
    """The windows of a convolution."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@lru_cache(maxsize=4096)
def geometry(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: Any) -> Geometry:
    """From a call's arguments: None, one number for all dimensions, or one for each."""
    dims = len(kernel)
    padding = 0 if padding in (None, "valid") else padding
    stride, dilation, groups = (1 if value is None else value for value in (stride, dilation, groups))
    kernel = tuple(kernel)
    return Geometry(kernel, per_dim(stride, dims), per_dim(padding, dims), per_dim(dilation, dims), groups)


class Conv:
    """y = x * weight; the gradient needs the shape and the layout of x, not its values."""

    __slots__ = ("_strides", "_weight", "geometry", "shape")

    def __init__(self, x: Tensor, weight: Tensor, given: tuple) -> None:
        """given: stride, padding (not "same"), dilation and groups, as in the call."""
        self.shape, self._strides = x.shape, x.stride()
        self._weight = Weight(weight)
        try:
            self.geometry = geometry(weight.shape[2:], *given)
        except TypeError:  # lists
            self.geometry = geometry(weight.shape[2:], *(tuple(v) if type(v) is list else v for v in given))

    def gradient(self, R: Any, within: Region | None = None) -> Gradient:
        if type(R) is Sparse:
            found = self._sparse(R, within)
            if found is not None:
                return found, "sparse"
        return self._dense(outside_zeroed(dense(R), within)), "dense"

    def _dense(self, R: Tensor) -> Tensor:
        kernel, stride, padding, dilation, groups = self.geometry
        weight = self._weight.value
        if groups == 1 and R.is_cuda:  # the same kernels, with less overhead
            left = _left_over(self.shape[2:], R.shape[2:], self.geometry)
            return _TRANSPOSED[len(kernel)](R, weight, None, stride, padding, left, 1, dilation)
        like = R.new_empty_strided((len(R), *self.shape[1:]), self._strides)  # the layout of x, not read
        mask, none = (True, False, False), (0,) * len(kernel)
        grad: Tensor = _convolution_backward(
            R, like, weight, None, stride, padding, dilation, False, none, groups, mask
        )[0]
        return grad

    def _sparse(self, R: Sparse, within: Region | None) -> Tensor | None:
        weight = self._weight.value
        if not _plain(weight) or len(self.shape) > 4:
            return None
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        call = _in_two_dimensions(self.shape, tuple(R.shape[1:]), self.geometry, within)
        return out if native.conv(R, call, weight, out) else None


_convolution_backward = torch.ops.aten.convolution_backward.default
_TRANSPOSED: dict[int, Any] = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}


@lru_cache(maxsize=4096)
def _left_over(inputs: tuple[int, ...], outputs: tuple[int, ...], windows: Geometry) -> tuple[int, ...]:
    """The number of inputs at the end of each dimension that no window reaches."""
    return tuple(
        inputs[d]
        + 2 * windows.padding[d]
        - (outputs[d] - 1) * windows.stride[d]
        - windows.dilation[d] * (windows.kernel[d] - 1)
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

    __slots__ = ("_weight", "shape")

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.shape, self._weight = x.shape, Weight(weight)

    def gradient(self, R: Any, within: Region | None = None) -> Gradient:
        weight = self._weight.value
        if type(R) is Sparse and R.scale is None and _plain(weight) and len(self.shape) > 1:
            out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
            native.linear(R, weight, out)
            return out, "sparse"
        return dense(R) @ weight, "dense"


class Scale:
    """y = x * scale + shift, one of each for a channel: a batch norm that does not use its batch.

    torch's own gradient is not used: on CPUs it is wrong for one sample if R is strided (up to torch 2.13).
    """

    __slots__ = ("_dtype", "_eps", "_variance", "_weight")

    def __init__(self, variance: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> None:
        self._variance, self._weight = Weight(variance), Weight(weight)
        self._eps, self._dtype = eps, dtype

    def gradient(self, R: Any, within: Region | None = None) -> Gradient:
        if type(R) is Sparse:
            return R.scaled(self.scale()), "sparse"
        return self._dense(R), "dense"

    def scale(self) -> Tensor:
        """One number for each channel."""
        variance, weight = self._variance.value, self._weight.value
        if _plain(variance) and (weight is None or _plain(weight)):
            return native.scale(variance, weight, self._eps)
        inverse = self._inverse()
        return inverse if weight is None else (inverse * weight).to(self._dtype)

    def _inverse(self) -> Tensor:
        """1 / the standard deviation, rounded once where there are doubles."""
        variance = self._variance.value
        variance = variance if variance.device.type == "mps" else variance.double()
        return (variance + self._eps).rsqrt().to(self._dtype)

    def _dense(self, R: Tensor) -> Tensor:
        variance, weight = self._variance.value, self._weight.value
        if R.is_cuda:  # the forward kernel, without a shift, is several times faster than the backward one
            mean, cudnn = _zeros_like(variance), torch.backends.cudnn.enabled
            bias = None if weight is None else _zeros_like(weight)
            return torch.batch_norm(R, weight, bias, mean, variance, False, 0.0, self._eps, cudnn)
        # Rounded as torch does it.
        if _plain(R) and _plain(variance) and (weight is None or _plain(weight)) and kernels.is_native(R):
            return native.scaled(R, variance, weight, self._eps)
        grad = R * channelwise(self._inverse(), R)
        return grad if weight is None else grad.mul_(channelwise(weight.to(grad.dtype), R))


class AvgPool:
    """y = the mean of each window; on CPUs, torch's own gradient is slow."""

    __slots__ = ("_padded", "_shape", "_windows")

    def __init__(self, x: Tensor, kernel: Any, stride: Any, padding: Any, padded: bool) -> None:
        kernel = per_dim(kernel, 2)
        stride = per_dim(stride, 2) if stride else kernel
        self._shape, self._padded = x.shape, int(padded)
        self._windows = (*kernel, *stride, *per_dim(padding, 2))

    def gradient(self, R: Any, within: Region | None = None) -> Gradient:
        n, channels, *size = self._shape
        call = native.Pooling(n * channels, *size, *R.shape[2:], *self._windows, self._padded)
        out = torch.empty(self._shape, dtype=torch.float32, device="cpu")
        if not native.avg_pool(call, dense(R), out):
            raise MemoryError("no memory for the gradient of an average pooling")
        return out, None


def _same_real(weight: Tensor, x: Tensor) -> bool:
    """Whether both have one type that is not complex, whose gradient would need a conjugate."""
    return weight.dtype is x.dtype and not x.dtype.is_complex


def conv(x: Tensor, weight: Any, *given: Any) -> Conv | None:
    fits = isinstance(weight, Tensor) and _same_real(weight, x) and given[1] != "same"
    return Conv(x, weight, given) if fits and x.dim() == weight.dim() > 2 else None


def linear(x: Tensor, weight: Any) -> Linear | None:
    fits = isinstance(weight, Tensor) and weight.dim() == 2 and _same_real(weight, x)
    return Linear(x, weight) if fits else None


def batch_norm(
    x: Tensor, variance: Any, weight: Any, eps: float | None, training: Any = False
) -> Scale | None:
    if not isinstance(variance, Tensor) or training or x.dim() < 2:
        return None
    return Scale(variance, weight, 1e-5 if eps is None else eps, x.dtype)


def avg_pool(x: Tensor, kernel: Any, stride: Any, padding: Any, padded: Any, *unusual: Any) -> AvgPool | None:
    """unusual: ceil_mode and divisor_override, for which there is no kernel."""
    if any(unusual) or x.dim() != 4 or not kernels.is_native(x) or not x.is_contiguous():
        return None
    return AvgPool(x, kernel, stride, padding or 0, padded is not False)


_POOL = "kernel_size stride padding count_include_pad ceil_mode divisor_override"
# By a call's name: the arguments that matter, and what makes a linear op of the data and those, if it can.
LINEAR_OPS: dict[str, tuple[tuple[str, ...], Callable[..., LinearOp | None]]] = {
    name: (tuple(arguments.split()), make)
    for names, arguments, make in (
        ("conv1d conv2d conv3d", "weight stride padding dilation groups", conv),
        ("linear", "weight", linear),
        ("batch_norm native_batch_norm", "running_var weight eps training", batch_norm),
        ("_native_batch_norm_legit_no_training", "running_var weight eps", batch_norm),
        ("avg_pool2d", _POOL, avg_pool),
    )
    for name in names.split()
}


# Small tensors that many calls share. A captured graph keeps those it reads.
constants: dict[Any, Tensor] = {}


def _constant(key: Any, make: Callable[[], Tensor]) -> Tensor:
    found = constants.get(key)
    if found is None:
        if len(constants) > 512:
            constants.clear()
        found = constants[key] = make()
    return found


def _zeros_like(x: Tensor) -> Tensor:
    return _constant((x.shape, x.dtype, x.device), lambda: torch.zeros_like(x))


def _plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous() and x.is_cpu and not x.is_neg()


def outside_zeroed(R: Tensor, within: Region | None) -> Tensor:
    """R times 1 inside the region and 0 outside, so that non-finite values outside are still detected."""
    if within is None:
        return R
    size = tuple(R.shape[-len(within) :])
    mask = _constant((size, within, R.dtype, R.device), lambda: _ones_within(size, within, R.dtype, R.device))
    return R * mask


def _ones_within(size: tuple[int, ...], within: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(size, dtype=dtype, device="cpu")
    mask[tuple(slice(first, last) for first, last in within)] = 1
    return mask.to(device)
