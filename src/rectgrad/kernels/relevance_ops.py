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
import torch.nn.functional as F
from torch import Tensor

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
AT_THE_INPUT = ("flat", "wsquare", "box")
BOXED = ("epsilon_gamma_box", "deep_taylor")  # composites that have a use for bounds


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
        """That of all samples, from those of some each."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len(parts) == 1:
            return known[0] if known else None
        return cls(lambda: Account(*map(torch.cat, zip(*(part.account for part in known), strict=True))))


Made = Callable[[], LinearMap]  # weights are changed when they are needed
Change = Callable[[Tensor, bool], Tensor]  # of a weight; True: it may be overwritten
Start = Callable[[tuple[int, ...]], Tensor]  # from the shape of the network's input to a value of it


def _positive(w: Tensor, own: bool) -> Tensor:
    return w.relu_() if own else w.relu()


def _negative(w: Tensor, own: bool) -> Tensor:
    return w.clamp_(max=0) if own else w.clamp(max=0)


def _leaky(w: Tensor, own: bool, slope: float) -> Tensor:
    return F.leaky_relu(w, slope, inplace=own)


_threshold_backward = torch.ops.aten.threshold_backward.default  # R where z > 0


@dataclass
class Layer:
    """A layer with weights in a backward pass, one linear map with what scales and shifts before it and the
    biases and the batch norm after it."""

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

    def shared(self, c: Tensor, rule: str, composite: Composite) -> Tensor:
        """What arrives at y. c: relevance / z; with steps after it, the relevance itself."""
        excites, epsilon = rule in ("excitation", "contrast"), composite.epsilon
        R = wide(c) if self.place.after else wide(c) * wide(self.z)
        if excites and self.place.top:  # a probability, whatever the score
            R = R / safe(self.total) if self.place.after else wide(c)
        if rule == "gamma":
            grad = self._gamma(R, composite.gamma, epsilon)
        elif rule in ALPHA_BETA:
            grad = self._alpha_beta(R, *ALPHA_BETA[rule], epsilon, biased=not excites)
        else:
            at_input = self._box(R, composite) if rule == "box" else self._counted(R, rule, epsilon)
            return at_input / wide(safe(self.y))
        return self.x * grad / wide(safe(self.y)) if self.place.before else grad

    @cached_property
    def shift(self) -> Tensor | None:
        """What the steps before make of 0."""
        steps = self.place.before[::-1]
        return _through(steps, torch.zeros_like(self.y)) if steps else None

    @cached_property
    def x(self) -> Tensor:
        return wide(self.y) if self.shift is None else wide(self.y) - wide(self.shift)

    @cached_property
    def total(self) -> Tensor:
        """The output of the whole; what was kept of the steps after may be gone."""
        return wide(_through(self.place.after, self.z))

    @cached_property
    def constant(self) -> Tensor:
        """What the whole makes of 0, in a shape that broadcasts."""
        if self.shift is not None or self.family == "matmul":
            own = _first(self.itself.call(torch.zeros_like(self.y) if self.shift is None else self.shift))
        else:
            own = self._by_channel(0 if self.bias is None else self.bias.detach())
        return wide(_through(self.place.after, own))

    @cached_property
    def scale(self) -> Tensor | None:
        """Of each output channel, by the batch norm."""
        norm = self.place.after[-1].linear if self.place.after else None
        return None if norm is None else wide(norm.scale())

    def _by_channel(self, value: Any) -> Tensor:
        """A number, or one for each output channel, in a shape that broadcasts to the output."""
        channel = 1 if self.place.convolves else -1
        given = value.to(self.y) if isinstance(value, Tensor) else self.y.new_full((), value)
        numbers = given.expand(self.z.shape[channel])
        return numbers.reshape(1, -1, *(1,) * (self.z.dim() - 2 if channel == 1 else 0))

    def weights(self, change: Change) -> LinearMap:
        """The linear map with other weights."""
        w = self.place.weight.detach().to(self.x.dtype)
        if self.scale is None:
            return self.made(self.x, change(w, False))
        return self.made(self.x, change(scaled(w, self.scale, self.family, self.groups), True))

    @cached_property
    def plus(self) -> LinearMap:
        return self.weights(_positive)

    @cached_property
    def minus(self) -> LinearMap:
        return self.weights(_negative)

    def _alpha_beta(self, R: Tensor, alpha: float, beta: float, epsilon: float, biased: bool) -> Tensor:
        """R_i / x_i."""
        bias = self.constant if biased else R.new_zeros(())
        plus, minus = lambda: self.plus, lambda: self.minus
        p = self._share(R, alpha, self._parts(plus, minus), bias.clamp(min=0), epsilon)
        if not beta:
            return self._gradient(plus, minus, p)
        n = self._share(R, -beta, self._parts(minus, plus), bias.clamp(max=0), epsilon)
        return self._gradient(plus, minus, p, n)

    def _gamma(self, R: Tensor, gamma: float, epsilon: float) -> Tensor:
        """R_i / x_i. With positive outputs alone, all summands of z's sign are the positive ones."""
        z, bias, only_positive = self.total, self.constant, self.place.rectified
        grown = self._parts(lambda: self.plus, lambda: self.minus).add_(bias.clamp(min=0))
        own = bias.clamp(min=0) if only_positive else torch.where(z > 0, bias.clamp(min=0), bias.clamp(max=0))
        grown = grown if only_positive else torch.where(z > 0, grown, z - grown)
        shared = self._share(R, 1, grown.mul_(gamma).add_(z), bias + gamma * own, epsilon, included=True)
        # w + gamma w+ and w + gamma w-
        plus = self.weights(lambda w, own: _leaky(w, own, 1 / (1 + gamma)).mul_(1 + gamma))
        if only_positive and self.place.positive:
            return _back(plus, shared)
        minus = self.weights(lambda w, own: _leaky(w, own, 1 + gamma))
        p = _threshold_backward(shared, z, 0)
        return self._gradient(lambda: plus, lambda: minus, p, shared.sub_(p))

    def _counted(self, R: Tensor, rule: str, epsilon: float) -> Tensor:
        """R_i of the flat and the w-square rule; what is no input of the network, as padding, gets none."""
        flat, slope = rule == "flat", wide(self.at(self.y.new_ones)) - wide(self.at(self.y.new_zeros))
        weights = self.weights(lambda w, own: torch.ones_like(w) if flat else w.square())
        counts = slope.ne(0).to(slope.dtype) if flat else slope.square()
        return counts * _back(weights, self._share(R, 1, _first(weights.call(counts)), None, epsilon))

    def _box(self, R: Tensor, composite: Composite) -> Tensor:
        """R_i of the z-box rule, (x - l) w+ + (x - h) w-: each summand is at least 0."""
        bounds = composite.low, composite.high
        low, high = (wide(self.at(lambda shape, b=b: bound(b, shape, self.y))) for b in bounds)  # type: ignore[misc]
        above, below = wide(self.y) - torch.minimum(low, high), wide(self.y) - torch.maximum(low, high)
        z = _first(self.plus.call(above)).add_(_first(self.minus.call(below)))
        shared = self._share(R, 1, z, None, composite.epsilon)
        return above * _back(self.plus, shared) + below * _back(self.minus, shared)

    def _parts(self, plus: Made, minus: Made) -> Tensor:
        """The sum of the positive x w; with the two exchanged, of the negative ones."""
        if self.place.positive:
            return _first(plus().call(self.x))
        return _first(plus().call(self.x.clamp(min=0))).add_(_first(minus().call(self.x.clamp(max=0))))

    def _gradient(self, plus: Made, minus: Made, p: Tensor, n: Tensor | None = None) -> Tensor:
        """Of the positive x w times p and the negative ones times n."""
        above = _back(plus(), p) if n is None else _back(plus(), p).add_(_back(minus(), n))
        if self.place.positive:
            return above
        below = _back(minus(), p) if n is None else _back(minus(), p).add_(_back(plus(), n))
        return torch.where(self.x > 0, above, below)

    def _share(
        self, R: Tensor, factor: float, z: Tensor, bias: Tensor | None, epsilon: float, included: bool = False
    ) -> Tensor:
        """What each summand gets of factor * R, per unit. z is overwritten; included: it has the bias."""
        z = z if bias is None or included else z.add_(bias)
        lost = 0 if self.absorbed is None else factor * withheld(R, z, epsilon)
        shared = per_unit_(R, z, epsilon)
        shared = shared if factor == 1 else shared.mul_(factor)
        absorb(self.absorbed, lambda: (0 if bias is None else bias * shared, lost))
        return shared


def _through(steps: Iterable[LinearMap], value: Tensor) -> Tensor:
    """What steps one after the other make of a value."""
    for step in steps:
        value = _first(step.call(value))
    return value


def _back(step: LinearMap, R: Tensor) -> Tensor:
    return step.vjp(R)[0]


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def safe(x: Tensor) -> Tensor:
    """x, or a very small number of its sign where x is nearly 0. Relevance / safe(x) is finite, and times
    safe(x) it is the relevance again, also where x is 0."""
    smallest = torch.finfo(x.dtype).tiny ** 0.5
    return torch.where(x.abs() < smallest, torch.full_like(x, smallest).copysign(x), x)


def per_unit_(R: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """R / (z + epsilon * sign(z)), in the memory of z; 0 where z is 0 and has nothing to share R among."""
    zero = z == 0
    return torch.div(R, z.add_(z.sign(), alpha=epsilon), out=z).masked_fill_(zero, 0)


def withheld(R: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """What the stabiliser keeps of R: R * epsilon / (|z| + epsilon); all of it where z is 0."""
    return torch.where(z == 0, R, R * epsilon / (z.abs() + epsilon))


def stabilised(
    c: Tensor, z: Tensor, epsilon: float, absorbed: Absorbed | None, constant: Callable[[], Tensor]
) -> Tensor:
    """c * z / (z + epsilon * sign(z)); 0 where z is 0, whose relevance is 0 too. constant: of z, its bias."""
    if epsilon:
        size = wide(z).abs()
        shared = size.div_(size + epsilon).mul_(c).to(c.dtype)
    else:
        shared = c.masked_fill(z == 0, 0)
    absorb(absorbed, lambda: (product(shared, constant()), withheld(product(c, z), z, epsilon)))
    return shared


def softmax_bias(s: Tensor, x: Tensor, dim: int) -> Tensor:
    """What is left of a softmax s = J x + bias around x, J its derivative; masked scores are -inf."""
    x = x.masked_fill(s == 0, 0)
    return s - s * (x - (s * x).sum(dim, keepdim=True))


def absorb(absorbed: Absorbed | None, parts: Callable[[], tuple[Any, Any]]) -> None:
    """Note what biases and stabilisers absorb, if somebody asks."""
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
        if isinstance(value, tuple):  # one number at a time: a capture must not copy from the CPU
            given = torch.stack([like.new_full((), each) for each in value]).reshape(
                -1, *(1,) * (len(shape) - 2)
            )
        else:
            given = value.to(like) if isinstance(value, Tensor) else like.new_full((), value)
        return given.expand(1, *shape[1:]).expand(shape)
    except (RuntimeError, TypeError, ValueError):
        wanted = f"a number, one for each channel, or a tensor for one sample, {tuple(shape[1:])}"
        raise ValueError(f"low and high must be {wanted}, not {value!r}") from None
