"""The methods by name, and their titles in figures and tables."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from rectgrad.checks import unknown
from rectgrad.methods.averages import ExpectedGradients, IntegratedGradients, SmoothGrad
from rectgrad.methods.cam import GradCAM, GuidedGradCAM
from rectgrad.methods.control import RandomMap
from rectgrad.methods.deeplift import DeepLift, DeepLiftShap
from rectgrad.methods.gradients import Deconv, GradientXInput, GuidedBackprop, Saliency
from rectgrad.methods.lrp import LRP, AttnLRP, EpsilonLRP, ExcitationBackprop
from rectgrad.methods.method import Method
from rectgrad.methods.perturbation import RISE, Occlusion
from rectgrad.methods.rectgrad import RectGrad

METHODS: dict[str, Method] = {
    "rectgrad": RectGrad(),
    "rectgrad_prr": RectGrad(prr=True),
    "rectgrad_mod": RectGrad(rule="mod"),
    "rectgrad_gated": RectGrad(gate="class"),
    "saliency": Saliency(),
    "gradient_x_input": GradientXInput(),
    "guided_backprop": GuidedBackprop(),
    "deconv": Deconv(),
    "smoothgrad": SmoothGrad(),
    "integrated_gradients": IntegratedGradients(),
    "epsilon_lrp": EpsilonLRP(),
    "deeplift": DeepLift(),
    "random": RandomMap(),
    "gradcam": GradCAM(),
    "guided_gradcam": GuidedGradCAM(),
    "lrp": LRP(),
    "attn_lrp": AttnLRP(),
    "excitation_backprop": ExcitationBackprop(),
    "expected_gradients": ExpectedGradients(),
    "deeplift_shap": DeepLiftShap(),
    "occlusion": Occlusion(),
    "rise": RISE(),
}


def every_name() -> list[str]:
    """The methods of `all`: those that need no further option, and not thousands of passes like RISE."""
    return [name for name, method in METHODS.items() if method.ready and not isinstance(method, RISE)]


def title_of(name: str) -> str:
    """The title of a listed method in figures and tables."""
    return METHODS[name].title or type(METHODS[name]).__name__


def name_of(method: Method) -> str:
    """The name under which a method or its class is listed; otherwise the class name."""
    exact = [name for name, listed in METHODS.items() if _equal(listed, method)]
    alike = [name for name, listed in METHODS.items() if type(listed) is type(method)]
    return (exact or alike or [type(method).__name__])[0]


def describe(method: Method) -> str:
    """A method's name and the options that differ from the listed ones."""
    name = name_of(method)
    listed = METHODS.get(name, method)
    changed = [f"{k}={_short(v)}" for k, v in vars(method).items() if not _equal(v, getattr(listed, k))]
    return " ".join([name.replace("_", " "), *changed])


def plain_value(value: Any) -> Any:
    """An option as a JSON value."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return describe(value) if isinstance(value, Method) else value


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except RuntimeError:  # tensors are compared elementwise
        return False


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(plain_value(value))


def as_method(method: Any, options: dict[str, Any]) -> Method:
    """A method from its name and options; an instance is returned unchanged."""
    names = f"methods are {', '.join(METHODS)}"
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(unknown("method", method, METHODS))
        return _configured(method, options)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a name or an instance of a method, not {method!r}; {names}")
    if options:
        given = f"options ({', '.join(options)}) go with a method's name"
        raise TypeError(f"{given}; {method!r} has its own: use dataclasses.replace")
    return method


def _configured(name: str, options: dict[str, Any]) -> Method:
    known = [field.name for field in fields(METHODS[name])]
    for option in options:
        if option not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has no options"
            raise TypeError(f"method {name!r} has no option {option!r}; {valid}")
    if isinstance(options.get("over"), str):
        options = {**options, "over": as_method(options["over"], {})}
    return replace(METHODS[name], **options)
