"""Specificity: a direct implementation of the definition, and the reasons if there is none."""

import pytest
import torch
from torch import nn

import rectgrad
from rectgrad.explanation import specificity
from tiny_model import tiny


def slow(map, other):
    """The definition, word by word: a sorted list of (value, position)."""
    m, n = (x.sum(0).abs().flatten().tolist() for x in (map, other))
    k = min(round(0.05 * len(m)), sum(v != 0 for v in m), sum(v != 0 for v in n))
    best = [set(sorted(range(len(v)), key=lambda i, v=v: (-v[i], i))[:k]) for v in (m, n)]
    return 1 - len(best[0] & best[1]) / k


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_share_of_top_positions_that_the_other_class_does_not_have(seed):
    torch.manual_seed(seed)
    kind = [torch.randn, lambda *s: torch.randint(-2, 3, s).double(), torch.rand][seed % 3]
    a, b = kind(3, 20, 20), kind(3, 20, 20)
    b[:, :10] = a[:, :10]
    if seed % 2:  # fewer values than 5 % of the positions
        a[:, 1:], b[:, 1:] = 0, 0
        a[:, 0, 3:], b[:, 0, 12:] = 0, 0
        a[0, 0, 0] = b[0, 0, 0] = 1
    assert specificity(a, b).value == pytest.approx(slow(a, b))
    assert specificity(a, a).value == 0


def test_a_map_without_a_counterpart_is_specific_and_a_zero_map_is_nothing():
    a, zero = torch.rand(3, 8, 8), torch.zeros(3, 8, 8)
    assert specificity(a, zero).value == 1
    assert "no evidence for that class" in specificity(a, zero).note
    assert specificity(zero, a) == (None, "the map is zero")


def two_classes():
    """Class 0 reads the left half of the picture, class 1 the right half."""

    class Halves(nn.Module):
        def forward(self, x):
            x = x.relu()
            return torch.stack([x[..., :4].sum((1, 2, 3)), 0.5 * x[..., 4:].sum((1, 2, 3))], 1)

    return Halves(), torch.rand(3, 8, 8)


def test_it_compares_with_the_class_of_the_smallest_output():
    net, x = two_classes()
    found = rectgrad.explain(x, net, "saliency")
    assert found.target.index == 0
    assert found.specificity == 1
    assert found.specificity_note == ""
    assert rectgrad.explain(x, net, "saliency", 1).specificity == 1  # not with itself
    model = tiny()
    x = torch.randn(3, 32, 32)
    least = int(model.module(x[None]).argmin())
    target = (least + 1) % 4
    a, b = (rectgrad.attribute(model.module, x[None], target=t, q=60)[0] for t in (target, least))
    assert rectgrad.explain(x, model, target=target, q=60).specificity == specificity(a, b).value


def test_a_low_one_comes_with_a_caution_and_a_suggestion():
    class Same(nn.Module):
        def forward(self, x):
            return x.relu().sum((1, 2, 3))[:, None] * torch.tensor([1.0, 2.0, 3.0])

    found = rectgrad.explain(torch.rand(3, 8, 8), Same(), "gradient_x_input")
    assert found.specificity == 0
    assert "nearly the same for any class" in found.specificity_note
    assert rectgrad.recommended("why this class") in found.specificity_note
    assert found.notes[0].startswith("Specificity 0.00: this map looks")
    with pytest.raises(ValueError, match="unknown question 'who'; questions are 'where', 'why this class'"):
        rectgrad.recommended("who")


def test_where_there_is_none_the_reason_is_given():
    x, model = torch.randn(3, 32, 32), tiny()
    reasons = {
        "random": rectgrad.explain(x, model, "random"),
        "not the output of a single class": rectgrad.explain(x, model, "saliency", rectgrad.contrast(0, 1)),
        "of a single class": rectgrad.explain(x, model, "saliency", lambda out: out.sum(1)),
        "specificity=True": rectgrad.explain(x, model, "smoothgrad", samples=2),
        "fewer than two": rectgrad.explain(x, lambda x: x.relu().sum((1, 2, 3)), "saliency"),
        "not computed": rectgrad.explain(x, model, "saliency", specificity=False),
    }
    for reason, found in reasons.items():
        assert found.specificity is None
        assert reason in found.specificity_note
        assert found.notes[0] == f"Specificity –: {found.specificity_note}."
    assert reasons["not the output of a single class"].caption == "red cat rather than green dog"
    assert rectgrad.explain(x, model, "smoothgrad", samples=2, specificity=True).specificity is not None
