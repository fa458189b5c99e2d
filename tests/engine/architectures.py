"""Real architectures in miniature as cases for every method: the model, its inputs, what is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from every_method import QUICK
from token_networks import (
    Attention,
    Encoder,
    Experts,
    LibraryAttention,
    Mean,
    MixerBlock,
    Recurrent,
    Siamese,
    Swin,
    TwoHeads,
    ViT,
    image_and_table,
    padding,
    pairs,
    tokens,
)
from vision_networks import (
    ChannelShuffle,
    DenseNet,
    Inception,
    NFNet,
    ResNet,
    SqueezeExcitation,
    UNet,
    convnext,
    images,
    mobile,
    one_region,
    parametrised,
    super_resolution,
)

Q = 60.0
OPTIONS: dict[str, dict[str, Any]] = {
    **QUICK,
    **{name: {"q": Q} for name in ("rectgrad", "rectgrad_prr", "rectgrad_mod", "rectgrad_gated")},
    "integrated_gradients": {"steps": 3},
}


@dataclass(frozen=True)
class Case:
    """`build` makes the network; `exact`: DeepLIFT has a rule for every step; `relu`: all activations are."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]] = images
    target: Any = 1
    exact: bool = True
    relu: bool = False
    kwargs: Callable[[], dict] = field(default=dict)


CASES: dict[str, Case] = {
    "resnet": Case(ResNet, relu=True),
    "densenet": Case(DenseNet, relu=True),
    "densenet, checkpointed": Case(partial(DenseNet, memory_efficient=True), relu=True),
    "inception": Case(Inception, relu=True),
    "inception, auxiliary head": Case(Inception, target=lambda out: out.aux_logits[:, 1], relu=True),
    "mobilenet v2": Case(lambda: mobile(partial(nn.ReLU6, inplace=True), lambda: None)),
    "mobilenet v3": Case(
        lambda: mobile(
            partial(nn.Hardswish, inplace=True), lambda: SqueezeExcitation(12, nn.ReLU, nn.Hardsigmoid)
        )
    ),
    "efficientnet": Case(
        lambda: mobile(partial(nn.SiLU, inplace=True), lambda: SqueezeExcitation(12, nn.SiLU, nn.Sigmoid))
    ),
    "shufflenet": Case(ChannelShuffle, relu=True),
    "convnext": Case(convnext),
    "nfnet": Case(NFNet),
    "parametrised weights": Case(parametrised),
    "u-net": Case(UNet, target=one_region, relu=True),
    "super-resolution": Case(super_resolution, target=lambda out: out[:, 1, 10:14, 20:25].sum((1, 2))),
    "vit": Case(lambda: ViT(Attention)),
    "vit, attention by hand": Case(lambda: ViT(partial(Attention, fused=False))),
    "vit, nn.MultiheadAttention": Case(lambda: ViT(LibraryAttention)),
    "swin": Case(Swin),
    "mixer": Case(lambda: nn.Sequential(MixerBlock(6, 8), Mean(), nn.Linear(8, 5)), tokens),
    "encoder, relu": Case(Encoder, tokens),
    "encoder, gelu, padded": Case(partial(Encoder, activation="gelu"), tokens, kwargs=padding),
    "encoder, norm first, padded": Case(partial(Encoder, norm_first=True), tokens, kwargs=padding),
    "encoder, sequence first, padded": Case(partial(Encoder, batch_first=False), tokens, kwargs=padding),
    "encoder, as many tokens as samples": Case(
        partial(Encoder, batch_first=False), partial(tokens, n=3, length=3)
    ),
    "lstm": Case(partial(Recurrent, nn.LSTM), tokens, exact=False),
    "gru, two layers": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Recurrent(nn.GRU, num_layers=2)),
        tokens,
        exact=False,
    ),
    "experts": Case(Experts, partial(tokens, length=9), exact=False),
    "siamese": Case(Siamese, pairs),
    "two heads": Case(TwoHeads, image_and_table, target=lambda out: out["age"].squeeze(1)),
}


def unsettled(build: Callable[[], nn.Module]) -> nn.Module:
    """The network with weights and running statistics that are not those of its initialisation."""
    torch.manual_seed(1)
    model = build().double().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return model


def prepared(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], dict]:
    torch.manual_seed(2)
    inputs = tuple(x.double() for x in case.inputs())
    return unsettled(case.build), inputs, case.kwargs()


def maps(
    model: Any, inputs: tuple[Tensor, ...], method: str, case: Case, kwargs: dict, **options: Any
) -> Any:
    options = {**OPTIONS.get(method, {}), **options}
    return rectgrad.attribute(model, inputs, method, case.target, forward_kwargs=kwargs, **options)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-3)


# --- the same network with explicit activations ------------------------------------------------------------


def explicit(function: Callable[..., Tensor], rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    class Explicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor, args: tuple, kwargs: dict) -> Tensor:
            a = function(z, *args, **kwargs)
            ctx.save_for_backward(z, a.clone())  # the network may go on in place
            return a

        @staticmethod
        def backward(ctx: Any, R: Tensor) -> Any:
            return rule(*ctx.saved_tensors, R), None, None

    def activation(z: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args if not isinstance(a, bool))
        return Explicit.apply(z.clone() if inplace else z, args, kwargs)

    return activation


RECTIFIERS = "relu relu6 leaky_relu prelu elu silu gelu hardswish".split()


@contextlib.contextmanager
def explicit_activations(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in RECTIFIERS:
            stack.enter_context(mock.patch.object(F, name, explicit(getattr(F, name), rule)))
        ceiling = explicit(F.hardtanh, rule)
        stack.enter_context(mock.patch.object(F, "hardtanh", ceiling))  # nn.ReLU6
        yield


def explicit_maps(case: Case, rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """The plain gradient of the network with explicit activations, one sample at a time."""
    with explicit_activations(rule):
        model, inputs, kwargs = prepared(case)
        found = []
        for i in range(len(inputs[0])):
            one = tuple(x[i : i + 1].clone().requires_grad_() for x in inputs)
            outputs = model(*one, **{k: v[i : i + 1] for k, v in kwargs.items()})
            found.append(torch.autograd.grad(scores(outputs, case.target).sum(), one))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def scores(outputs: Any, target: Any) -> Tensor:
    return target(outputs) if callable(target) else getattr(outputs, "logits", outputs)[:, target]


def rectified(z: Tensor, a: Tensor, R: Tensor) -> Tensor:
    s = (a * R).flatten()
    tau = s.sort(descending=True).values[round((len(s) - 1) * (1 - Q / 100))]
    return R * (a * R > tau)


RULES: dict[str, tuple[str, dict, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "guided": ("guided_backprop", {}, lambda z, a, R: R * (R > 0) * (z > 0)),
    "deconv": ("deconv", {}, lambda z, a, R: R * (R > 0)),
    "all pass": ("rectgrad", {"tau": -1e30}, lambda z, a, R: R),
    "rectified": ("rectgrad", {}, rectified),
}
BARE = {"padding_trick": False, "multiply_by_input": False, "positive_only": False}


def call(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.functional_call(model, parameters, (x,))
