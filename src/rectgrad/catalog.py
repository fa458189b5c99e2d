"""The methods by name, and what pictures and tables call them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rectgrad.averages import IntegratedGradients, SmoothGrad
from rectgrad.methods import (
    Deconv,
    DeepLift,
    EpsilonLRP,
    GradientXInput,
    GuidedBackprop,
    Method,
    RandomMap,
    RectGrad,
    Saliency,
)

METHODS: dict[str, Method] = {
    "rectgrad": RectGrad(),
    "rectgrad_prr": RectGrad(prr=True),
    "rectgrad_mod": RectGrad(rule="mod"),
    "saliency": Saliency(),
    "gradient_x_input": GradientXInput(),
    "guided_backprop": GuidedBackprop(),
    "deconv": Deconv(),
    "smoothgrad": SmoothGrad(),
    "integrated_gradients": IntegratedGradients(),
    "epsilon_lrp": EpsilonLRP(),
    "deeplift": DeepLift(),
    "random": RandomMap(),
}

TITLES = {
    "rectgrad": "RectGrad",
    "rectgrad_prr": "RectGrad PRR",
    "rectgrad_mod": "RectGrad mod",
    "saliency": "saliency",
    "gradient_x_input": "gradient x input",
    "guided_backprop": "guided backprop",
    "deconv": "deconv",
    "smoothgrad": "SmoothGrad",
    "integrated_gradients": "integrated gradients",
    "epsilon_lrp": "epsilon-LRP",
    "deeplift": "DeepLIFT",
    "random": "random",
}


def as_method(method: Any, options: dict[str, Any]) -> Method:
    """A method from its name and options, or as it is."""
    if isinstance(method, str):
        return _configured(_named(method), method, options)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a name or an instance of a method, not {method!r}; {_names()}")
    if options:
        raise TypeError(
            f"options ({', '.join(options)}) go with a method's name; {method!r} has its own: use "
            "dataclasses.replace"
        )
    return method


def _named(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {_names()}")
    return METHODS[name]


def _names() -> str:
    return f"methods are {', '.join(METHODS)}"


def _configured(method: Method, name: str, options: dict[str, Any]) -> Method:
    known = [field.name for field in fields(method)]
    for option in options:
        if option not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has no options"
            raise TypeError(f"method {name!r} has no option {option!r}; {valid}")
    if isinstance(options.get("over"), str):
        options = {**options, "over": _named(options["over"])}
    return replace(method, **options)
