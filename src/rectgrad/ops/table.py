"""Op families and their aliases: the kind of op that each torch function is. Data, and its lookup.

A rule is written for a family. Every spelling of an op (`torch.relu`, `Tensor.relu_`, `F.relu`, `aten::relu`,
...) is found by its name in torch's own namespaces, so an alias is written here once. A function belongs to a
family because it is torch's own, never because of its name alone: `mylib::mul` and a user's `def linear` are
unknown.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F

# Rectifier-like activations: close to zero for negative inputs, increasing for positive ones.
RECTIFIERS = frozenset(
    "relu relu6 leaky_relu rrelu prelu elu celu selu silu gelu mish hardswish softplus".split()
)
# Rectifiers whose output is positive exactly where their input is.
SIGN_KEEPING = RECTIFIERS - {"prelu", "softplus"}
# Functions of one data tensor. With two of them, as in x ** y, they have no family.
OF_ONE = RECTIFIERS | {"clamp", "squash", "unary"}
OF_INPUT = RECTIFIERS | {"clamp", "norm"}  # of a constant and, for example, a weight that is data: no family

FAMILIES: dict[str, str] = {
    **{name: name for name in RECTIFIERS},
    # Their family depends on their bounds: see `refine`.
    "clamp": "clamp clip clamp_min hardtanh threshold",
    "squash": "sigmoid expit tanh hardsigmoid softsign logsigmoid log_sigmoid tanhshrink",
    "unary": "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal abs absolute erf erfc sin cos "
    "tan atan arctan sinh cosh asinh pow rpow rdiv float_power clamp_max softshrink hardshrink "
    "sign sgn floor ceil round trunc fix",
    "conv": "conv1d conv2d conv3d convolution _convolution",
    "conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "linear": "linear",
    "matmul": "matmul rmatmul mm bmm mv dot vdot inner outer ger addmm addbmm baddbmm addmv einsum tensordot "
    "bilinear chain_matmul",
    "batch_norm": "batch_norm native_batch_norm _native_batch_norm_legit_no_training",
    "norm": "layer_norm native_layer_norm group_norm instance_norm rms_norm",
    "max_pool": "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
    "avg_pool": "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    "sum": "sum mean",
    "add": "add sub subtract rsub",
    "mul": "mul multiply",
    "div": "div divide true_divide",
    "max": "max amax maximum fmax",
    "min": "min amin minimum fmin",
    "softmax": "softmax _softmax",
    "log_softmax": "log_softmax _log_softmax",
    "vector_norm": "vector_norm linalg_vector_norm norm linalg_norm",
    "attention": "scaled_dot_product_attention",
    "glu": "glu",
    "pad": "pad constant_pad_nd",
    "cat": "cat concat concatenate",
}

# Linear in the input and without a shift: the plain gradient is exact for every method.
ROUTING = frozenset(
    "view view_as reshape reshape_as flatten unflatten permute transpose t swapaxes swapdims movedim "
    "moveaxis squeeze unsqueeze expand expand_as broadcast_to repeat tile repeat_interleave cat concat "
    "concatenate stack hstack vstack dstack split split_with_sizes tensor_split chunk unbind select narrow "
    "index_select gather take take_along_dim masked_select roll flip fliplr flipud rot90 contiguous clone to "
    "type type_as float double half bfloat16 cpu cuda neg negative upsample interpolate pixel_shuffle "
    "pixel_unshuffle channel_shuffle unfold fold im2col col2im diagonal diag tril triu cumsum scatter "
    "index_add dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout "
    "real __getitem__ __setitem__ copy alias lift_fresh detach requires_grad_ numpy_T mT adjoint "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
    "upsample_linear1d upsample_trilinear3d native_dropout _unsafe_view _to_copy __copy__ data".split()
)

# Calls that a custom autograd.Function, such as gradient reversal, may make without hiding an activation.
_LINEAR = "conv conv_transpose linear matmul avg_pool sum add mul div pad".split()
LINEAR_CALLS = ROUTING.union(*(FAMILIES[family].split() for family in _LINEAR))

# Parts of hand-written activations, named in the error if a network has nothing to rectify.
BY_HAND = frozenset(
    "gt ge lt le __gt__ __ge__ __lt__ __le__ greater greater_equal less less_equal where sign heaviside abs "
    "maximum max clamp clip clamp_min clamp_max sigmoid tanh threshold hardtanh masked_fill fmax erf".split()
)

# Queries about a tensor, which the engine ignores.
QUESTIONS = frozenset(
    "dim size stride numel nelement ndimension element_size storage_offset data_ptr is_contiguous "
    "is_floating_point is_complex is_inference is_tensor is_same_size get_device __len__".split()
)

# Attributes that have the same value for recorded tensors as for others.
PLAIN_ATTRIBUTES = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_meta is_quantized is_sparse is_nested is_mkldnn "
    "is_xpu is_sparse_csr itemsize nbytes requires_grad names".split()
)
# Calls that the recorder does not link: they have side effects, or hide what they compute.
UNLINKABLE = frozenset(
    "__setitem__ copy alias lift_fresh detach requires_grad_ requires_grad data __copy__ __deepcopy__ "
    "numpy_T register_hook register_post_accumulate_grad_hook retain_grad set numpy __array__ storage "
    "untyped_storage share_memory apply map resize as_strided lstm gru rnn_tanh rnn_relu lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell bernoulli dequantize quantize_per_tensor quantize_per_channel "
    "fake_quantize_per_tensor_affine to_sparse to_dense to_mkldnn refine_names rename align_to".split()
)
# Calls whose family does not depend on their arguments, except for batch norm in training mode.
SIMPLE = frozenset(
    "conv1d conv2d conv3d linear batch_norm relu add max_pool2d avg_pool2d adaptive_avg_pool2d".split()
)
# New tensors made from the shape and dtype of another, and constants converted to these.
NEW_TENSORS = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_tensor to type_as view_as reshape_as expand_as".split()
)
# Changes of shape. Here and in the next two, also the names of autograd nodes.
CHANGES_SHAPE = frozenset(
    "view unsafeview reshapealias transpose permute unsqueeze squeeze t alias reshape flatten unflatten "
    "swapaxes swapdims movedim moveaxis contiguous".split()
)
# The position of the channels, by the call that made a tensor.
CHANNELS_LAST = frozenset("addmm mm bmm nativelayernorm unsafeview linear matmul layer_norm rms_norm".split())
CHANNELS_SECOND = frozenset(
    "convolution nativebatchnorm nativegroupnorm conv conv_transpose batch_norm".split()
)

# The ops of operators: `__iadd__` is add_, `__rsub__` is rsub, `__rtruediv__` is rdiv.
_DUNDERS = {
    f"__{prefix}{name}__": {"radd": "add", "rmul": "mul"}.get(op, op).replace("truediv", "div")
    for name in "add sub mul div truediv matmul pow neg abs".split()
    for prefix, op in (("", name), ("r", f"r{name}"), ("i", f"{name}_"))
}

TRANSPOSES = ("T", "mT", "H", "mH", "real", "imag")  # attributes that return a new tensor
_ATTRIBUTES = ("__get__", "__set__", "__delete__")
_SILENT = QUESTIONS | {"__get__", "__set__", "_set_grad_enabled"}


@dataclass(frozen=True, eq=False)
class Spec:
    """The entry of one torch function."""

    name: str  # of the op
    family: str | None  # None: no family, always the ordinary gradient
    func: Callable[..., Any]  # the out-of-place version of the op
    spelling: Callable[..., Any]  # the function itself
    writes: bool  # modifies its first argument
    own: bool = True  # a function of torch, not of another library

    @functools.cached_property
    def at(self) -> dict[str, int]:
        """The position of each parameter, if known."""
        return {name: i for i, name in enumerate(_parameters(self.spelling, self.name))}

    @functools.cached_property
    def has_flag(self) -> bool:
        """Whether a call may have the argument `inplace`."""
        return "inplace" in self.at or not self.own

    @functools.cached_property
    def silent(self) -> bool:
        """Whether this is a query about a tensor, or an attribute that is no tensor: nothing to record."""
        return self.name in _SILENT and self.attribute not in TRANSPOSES

    @functools.cached_property
    def attribute(self) -> str | None:
        """The name of the attribute, if the call reads or writes one."""
        owner = getattr(self.spelling, "__self__", None) if self.name in _ATTRIBUTES else None
        return getattr(owner, "__name__", None)

    def arguments(self, names: Iterable[str], args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Arguments by name, however they were passed; None for those that were not."""
        at, n = self.at, len(args)
        return [kwargs[k] if k in kwargs else args[i] if (i := at.get(k, n)) < n else None for k in names]

    def argument(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.arguments((name,), args, kwargs)[0]


_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names.split()}


def plain_name(name: str) -> tuple[str, bool]:
    """The name of an op and whether this spelling is the in-place version."""
    name = _DUNDERS.get(name, name).removeprefix("special_")
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, name == "__setitem__"


def _parameters(func: Any, name: str) -> Iterable[str]:
    """The parameters of a function: of its Python signature, or of the op's overload that has the most."""
    if inspect.isfunction(func):
        names = tuple(inspect.signature(func, follow_wrapped=False).parameters)
        if names != ("args", "kwargs"):  # the signature of a wrapper
            return names
    packets: Any = (getattr(torch.ops.aten, each, None) for each in (f"linalg_{name}", name))
    found = (getattr(p, each) for p in packets if hasattr(p, "overloads") for each in p.overloads())
    schemas = (each._schema.arguments for each in ((func,) if hasattr(func, "_schema") else found))
    longest = max(([a.name for a in schema if not a.is_out] for schema in schemas), key=len, default=[])
    # F.max_pool2d and similar wrappers have one parameter more than the op.
    return ({"self": "input", "p": "ord"}.get(each, each) for each in (*longest, "return_indices"))


class Table:
    """The functions of torch's namespaces, and the aten overloads, by identity."""

    def __init__(self, namespaces: Iterable[Any], overloads: tuple[type, ...]) -> None:
        self._overloads = overloads
        self._specs: dict[Any, Spec] = {}
        for namespace in namespaces:
            for attribute in dir(namespace):
                func = getattr(namespace, attribute, None)
                if callable(func) and not isinstance(func, type):
                    self._register(func, attribute, namespace)

    def _register(self, func: Any, attribute: str, namespace: Any) -> None:
        name, writes = plain_name(attribute)
        # torch.norm is a composite of vector_norm; torch.linalg.norm is an op.
        family = None if name == "norm" and inspect.isfunction(func) else _FAMILY_OF.get(name)
        with contextlib.suppress(TypeError):  # not hashable, so never called as a torch function
            known = self._specs.get(func)
            if known is None or (known.family is None and family is not None):
                places = (namespace, torch, F) if writes else ()
                out_of_place = next(filter(None, (getattr(place, name, None) for place in places)), func)
                self._specs[func] = Spec(name, family, out_of_place, func, writes)

    def lookup(self, func: Any) -> Spec:
        """The entry of a function; `own=False` if it is not a function of torch."""
        spec = self._specs.get(func)
        if spec is None:
            overload = isinstance(func, self._overloads)
            name = str(func) if overload else getattr(func, "__name__", str(func))
            if overload and name.startswith("aten."):
                spec = _overload(func)
            else:
                spec = Spec(name, None, func, func, False, own=name in (*_ATTRIBUTES, "_set_grad_enabled"))
            if spec.own:
                self._specs[func] = spec
        return spec


def _overload(func: Any) -> Spec:
    """An op called by its dispatcher name, as exported programs do."""
    name, writes = plain_name(str(func).split(".")[1])
    out_of_place = getattr(torch.ops.aten, name, func) if writes else func
    return Spec(name, _FAMILY_OF.get(name), out_of_place, func, writes)


REFINED = frozenset({"conv", "clamp", "norm", "vector_norm"})


def refine(family: str, name: str, argument: Callable[..., Any]) -> str:
    """The family of a call, given its arguments.

    A clamp at zero is a ReLU, with an upper bound above one a ReLU6, however it is written. A clamp to [0, 1]
    squashes. Any other clamp is a unary function.
    """
    if family == "conv" and argument("transposed", False):
        return "conv_transpose"
    if family == "vector_norm" and name in ("norm", "linalg_norm"):
        order = argument("ord")
        flat = order in (None, "fro") or (not isinstance(order, str) and type(argument("dim")) is int)
        return "vector_norm" if flat else ""  # a matrix norm
    if name == "instance_norm" and not argument("use_input_stats", True):
        return "batch_norm"
    if family != "clamp":
        return family
    if name == "threshold":
        return "relu" if argument("threshold") == 0 and argument("value") == 0 else "unary"
    squashes = name == "hardtanh"
    bounds = (("min_val", -1.0), ("max_val", 1.0)) if squashes else (("min", None), ("max", None))
    low, high = (x.item() if torch.is_tensor(x) and x.numel() == 1 else x for x in starmap(argument, bounds))
    if torch.is_tensor(low) or torch.is_tensor(high) or low != 0:
        return "squash" if squashes else "unary"
    if high is None or high == float("inf"):
        return "relu"
    return "relu6" if high > 1 else "squash"
