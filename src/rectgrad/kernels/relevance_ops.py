"""How a layer shares relevance among its inputs: the rules of LRP as arithmetic on tensors.

After Montavon et al. 2019, table 1, for inputs of either sign. R_j is the relevance of an output
z_j = sum_i x_i w_ij + b_j, R_i that of an input; + and - are positive and negative parts; every denominator
gets epsilon * sign.

    epsilon     R_i = sum_j x_i w_ij R_j / z_j
    alpha-beta  R_i = sum_j (alpha (x_i w_ij)+ / z+_j - beta (x_i w_ij)- / z-_j) R_j
                z+ = sum_i (x_i w_ij)+ + b+_j, z- likewise; the z+ rule has alpha = 1, beta = 0
    gamma       R_i = sum_j (x_i w_ij + gamma (x_i w_ij)*) R_j / (z_j + gamma z*_j)
                * is the part of z_j's sign, which for x >= 0 and z_j > 0 is the original rule
    flat        R_i = sum_j R_j / number of j's inputs
    w-square    R_i = sum_j w_ij^2 R_j / sum_i w_ij^2
    z-box       R_i = sum_j (x_i w_ij - l_i w+_ij - h_i w-_ij) R_j / (the same, summed over i), l <= x <= h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rectgrad import kernels
from rectgrad.kernels import native
from rectgrad.kernels.reference import wide

# The rules of the first layer, of convolutions and of dense layers.
COMPOSITES = {
    "epsilon": ("epsilon", "epsilon", "epsilon"),
    "epsilon_plus_flat": ("flat", "zplus", "epsilon"),
    "epsilon_alpha2_beta1_flat": ("flat", "alpha2_beta1", "epsilon"),
    "epsilon_gamma_box": ("box", "gamma", "epsilon"),
    "zplus": ("zplus", "zplus", "zplus"),
    "gamma": ("gamma", "gamma", "gamma"),
    "deep_taylor": ("wsquare", "zplus", "zplus"),
}
ALPHA_BETA = {"zplus": (1, 0), "alpha2_beta1": (2, 1), "excitation": (1, 0), "contrast": (1, 1)}
SMALLEST = 1e-30  # size of a batch norm's scale: outputs can be divided by it
AT_THE_INPUT = ("flat", "wsquare", "box")
BOXED = ("epsilon_gamma_box", "deep_taylor")  # composites that use bounds


class LinearMap(Protocol):
    """A step that is linear in its input, and its gradient."""

    linear: Any

    def call(self, *inputs: Tensor) -> Any: ...

    def vjp(self, R: Tensor) -> tuple[Any, ...]: ...


class Place(Protocol):
    """What is known about a layer in its network: see engine/facts.py."""

    weight: Any
    convolves: bool
    before: Any
    after: Any
    first: bool
    top: bool
    positive: bool
    rectified: bool


class Composite(NamedTuple):
    """Which rule each kind of layer gets, and their parameters."""

    first: str
    convolution: str
    dense: str
    epsilon: float
    gamma: float = 0
    low: Any = None
    high: Any = None
    top: str = ""  # of the last layer, if it differs

    @classmethod
    def named(
        cls, name: str, epsilon: float, gamma: float = 0.25, low: Any = None, high: Any = None
    ) -> Composite:
        first, convolution, dense = COMPOSITES[name]
        unbounded = low is None or high is None
        if first == "box" and unbounded:
            missing = "low" if low is None else "high"
            wanted = "a number, or one for each channel"
            raise ValueError(f"LRP: {missing} must be given for the composite {name!r}: {wanted}")
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
            raise ValueError(f"LRP: low must not be larger than high, and {low:g} is larger than {high:g}")
        first = first if unbounded or name not in BOXED else "box"
        return cls(first, convolution, dense, epsilon, gamma, low, high)

    @property
    def at_the_input(self) -> bool:
        """Whether inputs that are 0 may get relevance too."""
        return self.first in AT_THE_INPUT

    def rule(self, place: Place) -> str:
        if place.weight is None:
            return "epsilon"
        if place.top and self.top:
            return self.top
        return self.first if place.first else self.convolution if place.convolves else self.dense


Absorbed = list[tuple[float, float]]  # relevance that biases and stabilisers absorb, one sum for each step


class Account(NamedTuple):
    """One number for each sample: score = at_input + biases + stabilisers, to rounding."""

    score: Tensor
    at_input: Tensor
    biases: Tensor
    stabilisers: Tensor


class Conservation:
    """Where the relevance of each sample went: `score`, `at_input`, and what `biases` and `stabilisers`
    absorbed; `error` is what is missing. Computed when it is first asked for."""

    def __init__(self, measure: Callable[[], Account]) -> None:
        self._measure = measure

    @cached_property
    def account(self) -> Account:
        return self._measure()

    def __getattr__(self, name: str) -> Tensor:
        if name not in Account._fields:
            raise AttributeError(name)
        return getattr(self.account, name)

    @property
    def error(self) -> Tensor:
        score, at_input, biases, stabilisers = self.account
        return score - at_input - biases - stabilisers

    def __repr__(self) -> str:
        return f"Conservation({self.account})"

    @classmethod
    def joined(cls, parts: Sequence[Conservation | None]) -> Conservation | None:
        """Joins the accounts of parts of the samples."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len(parts) == 1:
            return known[0] if known else None
        return cls(lambda: Account(*map(torch.cat, zip(*(part.account for part in known), strict=True))))


Change = Callable[[Tensor], Tensor]  # of a weight, which is not overwritten
Start = Callable[[tuple[int, ...]], Tensor]  # from the shape of the network's input to a value of it
_threshold_backward = torch.ops.aten.threshold_backward.default  # R where z > 0


@dataclass
class Layer:
    """A layer with weights in a backward pass, one linear map with what scales and shifts before it and the
    biases and the batch norm after it.

    The shares of a sum do not depend on its scale. So on a CPU, where a pass over weights takes long, they
    get only the signs of the batch norm's scales: what the rules compute with are outputs, biases and
    epsilon / the size of the scale. Most scales are positive, and then the weights are used as they are. On
    a GPU, where the number of calls counts, the weights are scaled.
    """

    y: Tensor  # its input
    z: Tensor  # its own output
    bias: Tensor | None  # its own
    family: str
    groups: int
    made: Callable[[Tensor, Tensor], LinearMap]  # the layer without bias, from an input and a weight
    itself: LinearMap
    place: Place
    absorbed: Absorbed | None  # to note what does not reach the input
    at: Callable[[Start], Tensor]  # y, if the network's input were another
    c: Tensor  # relevance / the output of the whole
    composite: Composite

    def shared(self) -> Tensor:
        """What arrives at y."""
        rule = self.composite.rule(self.place)
        if rule == "gamma":
            grad = self._gamma(self.composite.gamma)
        elif rule in ALPHA_BETA:
            grad = self._alpha_beta(*ALPHA_BETA[rule], biased=rule not in ("excitation", "contrast"))
        else:
            at_input = self._box() if rule == "box" else self._counted(rule == "flat")
            return at_input / wide(safe(self.y))
        return self.x * grad / wide(safe(self.y)) if self.place.before else grad

    @cached_property
    def relevance(self) -> Tensor:
        return wide(self.c) * safe(self.total)

    @cached_property
    def epsilon(self) -> Any:
        return self._by_size(self.composite.epsilon)

    @cached_property
    def shift(self) -> Tensor | None:
        """The result of the steps before for an input of 0."""
        steps = self.place.before[::-1]
        return _through(steps, torch.zeros_like(self.y)) if steps else None

    @cached_property
    def x(self) -> Tensor:
        return wide(self.y) if self.shift is None else wide(self.y) - wide(self.shift)

    @cached_property
    def total(self) -> Tensor:
        """The output of the whole; what was kept of the steps after may be gone."""
        if self.scale is None or self.bias is not None or self.shift is not None:
            return wide(_through(self.place.after, self.z))
        # A batch norm's kernel takes several times as long.
        return torch.addcmul(self.offset, wide(self.z), self._by_channel(self.scale))

    @cached_property
    def offset(self) -> Tensor:
        """The result of the whole for an input of 0, in a shape that broadcasts."""
        if self.shift is not None or (self.family == "matmul" and self.bias is not None):
            own = _first(self.itself.call(torch.zeros_like(self.y) if self.shift is None else self.shift))
        else:
            own = self._by_channel(0 if self.bias is None else self.bias.detach().to(self.y))
        return wide(_through(self.place.after, own))

    @cached_property
    def constant(self) -> Tensor:
        return self._by_size(self.offset)

    @cached_property
    def scale(self) -> Tensor | None:
        """Of each output channel, by the batch norm."""
        norm = self.place.after[-1].linear if self.place.after else None
        return None if norm is None else wide(norm.scale())

    @cached_property
    def size(self) -> Tensor | None:
        """Of the scale, in a shape that broadcasts to the output; None if the weights have it."""
        if self.scale is None or scales_weights(self.scale):
            return None
        return self._by_channel(self.scale.abs().clamp(min=SMALLEST))

    def _by_size(self, value: Any) -> Any:
        return value if self.size is None else value / self.size

    @cached_property
    def channels(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Scale, shift and offset of each channel for the native kernel; None where it does not apply."""
        plain = self.place.convolves and self.shift is None and self.absorbed is None
        if not plain or not _for_native(self.c, self.z) or self.offset.numel() != self.z.shape[1]:
            return None
        shift = self.offset if self.bias is None else _through(self.place.after, self._by_channel(0))
        return torch.ones_like(shift) if self.scale is None else self.scale, shift, self.offset

    def _fused(self, channels: tuple[Tensor, ...], part: Tensor, **how: Any) -> tuple[Tensor, Any]:
        return native.share((self.c, self.z, part, *channels), self.composite.epsilon, **how)

    def _by_channel(self, value: Any) -> Tensor:
        """A number, or one for each output channel, in a shape that broadcasts to the output."""
        channel = 1 if self.place.convolves else -1
        given = value if isinstance(value, Tensor) else self.y.new_full((), value)
        numbers = given.expand(self.z.shape[channel])
        return numbers.reshape(1, -1, *(1,) * (self.z.dim() - 2 if channel == 1 else 0))

    @cached_property
    def weight(self) -> Tensor:
        """The weight times the scales, or their signs."""
        w, scale = self.place.weight.detach().to(self.x.dtype), self.scale
        if scale is None or (not scales_weights(scale) and float(scale.min()) >= 0):
            return w
        return scaled(w, scale if scales_weights(scale) else scale.sign(), self.family, self.groups)

    def weights(self, change: Change) -> LinearMap:
        """The linear map with other weights."""
        return self.made(self.x, change(self.weight))

    @cached_property
    def unchanged(self) -> LinearMap:
        return self.weights(lambda w: w)

    @cached_property
    def plus(self) -> LinearMap:
        return self.weights(torch.relu)

    @cached_property
    def minus(self) -> LinearMap:
        return self.weights(lambda w: w.clamp(max=0))

    def _alpha_beta(self, alpha: float, beta: float, biased: bool) -> Tensor:
        """R_i / x_i."""
        p = self._part(True, alpha, biased)
        if not beta:
            return self._both(lambda above: _back(self.plus if above else self.minus, p))
        n = self._part(False, -beta, biased)

        def back(above: bool) -> Tensor:
            own, other = (self.plus, self.minus) if above else (self.minus, self.plus)
            return _back(own, p) - _back(other, n)  # may be a view of fewer numbers, as that of a sum

        return self._both(back)

    def _part(self, positive: bool, factor: float, biased: bool) -> Tensor:
        """factor * R / the size of the sum of the positive or the negative summands, per unit."""
        sign, z = 1 if positive else -1, self._sum(positive)
        if self.channels is not None:
            return self._fused(self.channels, z, factor=factor, sign=sign, biased=biased)[0]
        bias = (self.constant * sign).clamp(min=0) if biased else self.c.new_zeros(())
        R = self.relevance if factor == 1 else factor * self.relevance
        return self._share(R, torch.add(bias, z, alpha=sign, out=z), bias, self.epsilon)

    def _gamma(self, gamma: float) -> Tensor:
        """R_i / x_i. With p what units with a positive output share and n what the others do, and x >= 0:
        (w + gamma w+) p + (w + gamma w-) n = w (p + n + gamma n) + gamma w+ (p - n). With x < 0 the two parts
        of w are exchanged, which exchanges p and n."""
        above, below, favoured = self._gamma_shares(gamma)
        if favoured is None:
            return _back(self.weights(lambda w: w.relu().mul_(gamma).add_(w)), above)
        extra = _back(self.plus, favoured)
        return self._both(
            lambda up: _back(self.unchanged, above if up else below) + (extra if up else -extra)
        )

    def _gamma_shares(self, gamma: float) -> tuple[Tensor, Any, Tensor | None]:
        """What the weights get with x >= 0 and x < 0, and what their positive parts get in addition. None: no
        unit has a negative output and R, and no x is negative."""
        only_positive, positive, grown = self.place.rectified, self.place.positive, self._sum(True)
        if self.channels is not None and positive:
            above, favoured = self._fused(self.channels, grown, gamma=gamma, mixed=not only_positive)
            return above, None, favoured
        bias, own = self.constant, self.constant.clamp(min=0)
        z, grown = self._by_size(self.total), grown.add_(own)
        if not only_positive:
            own = torch.where(z > 0, own, bias.clamp(max=0))
            grown = torch.where(z > 0, grown, z - grown)
        shared = self._share(
            self.relevance, grown.mul_(gamma).add_(z), bias + gamma * own, self.epsilon, not only_positive
        )
        if only_positive:
            return shared, None if positive else shared * (1 + gamma), None if positive else shared * gamma
        p = _threshold_backward(shared, z, 0)
        n = shared - p
        return shared + gamma * n, None if positive else shared + gamma * p, gamma * (p - n)

    def _counted(self, flat: bool) -> Tensor:
        """R_i of the flat and the w-square rule. Padding is no input of the network and gets none."""
        slope = wide(self.at(self.y.new_ones)) - wide(self.at(self.y.new_zeros))
        weights = self.weights(torch.ones_like if flat else torch.square)
        counts = slope.ne(0).to(slope.dtype) if flat else slope.square()
        epsilon = self.composite.epsilon if flat else self._by_size(self.epsilon)
        return counts * _back(
            weights, self._share(self.relevance, _first(weights.call(counts)), None, epsilon)
        )

    def _box(self) -> Tensor:
        """R_i of the z-box rule, (x - l) w+ + (x - h) w-: each summand is at least 0."""
        bounds = self.composite.low, self.composite.high
        low, high = (wide(self.at(lambda shape, b=b: bound(b, shape, self.y))) for b in bounds)  # type: ignore[misc]
        above, below = wide(self.y) - torch.minimum(low, high), wide(self.y) - torch.maximum(low, high)
        z = _first(self.plus.call(above)).add_(_first(self.minus.call(below)))
        shared = self._share(self.relevance, z, None, self.epsilon)
        return above * _back(self.plus, shared) + below * _back(self.minus, shared)

    def _sum(self, positive: bool) -> Tensor:
        """Of the positive x w, or of the negative ones."""
        if self.place.positive:
            return _first((self.plus if positive else self.minus).call(self.x))
        above, below = (self.plus, self.minus) if positive else (self.minus, self.plus)
        return _first(above.call(self.x.clamp(min=0))).add_(_first(below.call(self.x.clamp(max=0))))

    def _both(self, back: Callable[[bool], Tensor]) -> Tensor:
        """back(True) where x is positive, back(False) elsewhere."""
        above = back(True)
        return above if self.place.positive else torch.where(self.x > 0, above, back(False))

    def _share(self, R: Tensor, z: Tensor, bias: Tensor | None, epsilon: Any, mixed: bool = False) -> Tensor:
        """What each summand of z gets of R, per unit. bias: the part of z that is no input's. mixed: z may be
        negative; else it is not, where R is not 0."""
        lost = 0 if self.absorbed is None else withheld(R, z, epsilon)
        shared = per_unit(R, z, epsilon) if mixed else _threshold_backward(R / (z + epsilon), z, 0)
        absorb(self.absorbed, lambda: (0 if bias is None else bias * shared, lost))
        return shared


def scales_weights(scale: Tensor) -> bool:
    """Whether weights are multiplied by the scales of a batch norm; if not, by their signs alone."""
    return not scale.is_cpu


def _for_native(*tensors: Tensor) -> bool:
    return all(kernels.is_native(x) and x.is_contiguous() and not x.is_neg() for x in tensors)


def _through(steps: Iterable[LinearMap], value: Tensor) -> Tensor:
    """Applies the steps to a value, one after the other."""
    for step in steps:
        value = _first(step.call(value))
    return value


def _back(step: LinearMap, R: Tensor) -> Tensor:
    return step.vjp(R)[0]


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def safe(x: Tensor) -> Tensor:
    """x, a very small number farther from 0. Relevance / safe(x) is finite, and times safe(x) it is the
    relevance again, also where x is 0."""
    smallest = x.new_full((), torch.finfo(x.dtype).tiny ** 0.5)
    return torch.copysign(smallest, x).add_(x)


def per_unit(R: Tensor, z: Tensor, epsilon: Any) -> Tensor:
    """R / (z + epsilon * sign(z)); 0 where z is 0 and has nothing to share R among."""
    return torch.where(z == 0, 0, R / (z + z.sign().mul_(epsilon)))


def withheld(R: Tensor, z: Tensor, epsilon: Any) -> Tensor:
    """The part of R that the stabiliser absorbs: R * epsilon / (|z| + epsilon); all of it where z is 0."""
    return torch.where(z == 0, R, R * epsilon / (z.abs() + epsilon))


def stabilised(
    c: Tensor, z: Tensor, epsilon: float, absorbed: Absorbed | None, constant: Callable[[], Tensor]
) -> Tensor:
    """c * z / (z + epsilon * sign(z)); 0 where z is 0, whose relevance is 0 too. constant: of z, its bias."""
    if epsilon and _for_native(c, z):
        shared = native.stabilised(c, z, epsilon)
    elif epsilon:
        size = wide(z).abs()
        shared = size.div_(size + epsilon).mul_(c).to(c.dtype)
    else:
        shared = c.masked_fill(z == 0, 0)
    absorb(absorbed, lambda: (product(shared, constant()), withheld(product(c, z), z, epsilon)))
    return shared


def softmax_bias(s: Tensor, x: Tensor, dim: int) -> Tensor:
    """The bias of a softmax s = J x + bias around x, with J its derivative; masked scores are -inf."""
    x = x.masked_fill(s == 0, 0)
    return s - s * (x - (s * x).sum(dim, keepdim=True))


def absorb(absorbed: Absorbed | None, parts: Callable[[], tuple[Any, Any]]) -> None:
    """Records what biases and stabilisers absorb, if requested."""
    if absorbed is not None:
        by_bias, by_stabiliser = (float(torch.as_tensor(part).double().sum()) for part in parts())
        absorbed.append((by_bias, by_stabiliser))


def product(c: Tensor, value: Tensor) -> Tensor:
    """c * value; 0 where c is 0, although the value may be infinite there."""
    return torch.where(c == 0, 0, c * value)


def positive_summands(inputs: tuple[Tensor, ...], name: str) -> list[Tensor]:
    """Of a sum or a difference, 0 for those that are not positive."""
    signs = {"sub": (1, -1), "subtract": (1, -1), "rsub": (-1, 1)}.get(name, (1,) * len(inputs))
    return [x.clamp(min=0) if sign > 0 else x.clamp(max=0) for x, sign in zip(inputs, signs, strict=True)]


def scaled(w: Tensor, scale: Tensor, family: str, groups: int) -> Tensor:
    """A layer's weights that make each output channel so many times larger."""
    if family == "matmul":
        return w * scale
    if family != "conv_transpose":
        return w * scale.reshape(-1, *(1,) * (w.dim() - 1))
    by_group = w.unflatten(0, (groups, -1)) * scale.reshape(groups, 1, -1, *(1,) * (w.dim() - 2))
    return by_group.flatten(0, 1)


def bound(value: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A number, one for each channel, or a tensor, for inputs of this shape."""
    try:
        if isinstance(value, (tuple, list)):  # one number at a time: a capture must not copy from the CPU
            given = torch.stack([like.new_full((), each) for each in value]).reshape(
                -1, *(1,) * (len(shape) - 2)
            )
        else:
            given = value.to(like) if isinstance(value, Tensor) else like.new_full((), value)
        return given.expand(1, *shape[1:]).expand(shape)
    except (RuntimeError, TypeError, ValueError):
        wanted = f"a number, one for each channel, or a tensor for one sample, {tuple(shape[1:])}"
        raise ValueError(f"low and high must be {wanted}, not {value!r:.60}") from None
