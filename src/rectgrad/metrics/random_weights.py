"""Randomisation tests (Adebayo et al. 2018): do the maps change when the weights are random?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rectgrad.metrics.draws import seeded
from rectgrad.metrics.similarity import rank_correlations


class Stage(NamedTuple):
    """A copy of the network in which the weights of the named layers are random."""

    layers: tuple[str, ...]
    model: nn.Module


def randomisation(
    maps: Tensor,
    others: Iterable[Tensor],
    similarity: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Similarities, (N, stages), of the maps and the maps of each randomised network, for the same classes.

    Values near `unrelated(similarity, maps)` pass: then the maps are as different as those of two photos.
    The default is the rank correlation of absolute values, as in the paper and in Quantus' MPRT.
    """
    if similarity is None:
        return torch.stack(rank_correlations(maps, others, absolute=True), 1)
    return torch.stack([similarity(maps, other) for other in others], 1)


def stages(
    model: nn.Module,
    groups: int = 5,
    kind: Literal["cascading", "alone"] = "cascading",
    seed: int = 0,
) -> Iterator[Stage]:
    """Copies of the network with random layers, in `groups` steps from the output to the input.

    "cascading" adds one group after the other, "alone" randomises each group alone. The model is not changed;
    one copy exists at a time if the caller keeps none.
    """
    if kind not in ("cascading", "alone"):
        raise ValueError(f"stages(kind={kind!r}): needs 'cascading' or 'alone'")
    layers: tuple[str, ...] = ()
    changed = model
    for group in layer_groups(model, groups):
        if kind == "alone":
            yield Stage(group, randomised(model, group, seed))
        else:
            layers, changed = layers + group, randomised(changed, group, seed)
            yield Stage(layers, changed)


def layer_groups(model: nn.Module, groups: int = 5) -> list[tuple[str, ...]]:
    """The names of all modules that own parameters, in groups of equal size, the output's first.

    The order is the reverse of the one in which the modules were defined, as usual in these tests. With fewer
    layers than groups, each layer is a group.
    """
    names = [
        name for name, layer in model.named_modules() if any(True for _ in layer.parameters(recurse=False))
    ]
    if not names or groups < 1:
        raise ValueError(f"layer_groups(groups={groups}) of {len(names)} layers: needs 1 or more of each")
    names, groups = names[::-1], min(groups, len(names))
    edges = [i * len(names) // groups for i in range(groups + 1)]
    return [tuple(names[start:end]) for start, end in pairwise(edges)]


@torch.no_grad()
def randomised(
    model: nn.Module, layers: Sequence[str], seed: int = 0, fresh: nn.Module | None = None
) -> nn.Module:
    """A copy of the network in which the named layers have random weights; buffers are kept.

    Each parameter becomes normal with its own mean and standard deviation, which keeps the scale of the
    activations. The numbers depend on the seed and the parameter's name. fresh: another network of this
    architecture, whose weights are taken instead.
    """
    changed = copy.deepcopy(model)
    for layer in layers:
        for name, weights in changed.get_submodule(layer).named_parameters(layer, recurse=False):
            if fresh is None:
                weights.copy_(_normal(weights, seeded(str(seed).encode(), name.encode())))
            else:
                weights.copy_(fresh.get_parameter(name))
    return changed.requires_grad_(False)


def _normal(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers with the mean and standard deviation of the weights."""
    values = weights.float()
    drawn = torch.randn(weights.shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.mean() + values.std(correction=0) * drawn.to(values.device)
