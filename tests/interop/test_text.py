"""Language models of the real transformers package: relevance is conserved, and words are drawn.

Small networks with random weights in float64; nothing is downloaded. Their embeddings are explained.
"""

import re

import pytest
import torch
from torch import Tensor, nn

import rectgrad
from rectgrad import image

transformers = pytest.importorskip(
    "transformers",
    reason="NO transformers: nothing of Hugging Face's own code is tested (pip install transformers)",
)

SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 48}
CAUSAL = {
    "GPT2LMHeadModel": {"vocab_size": 40, "n_layer": 2, "n_embd": 32, "n_head": 4, "bos_token_id": 0},
    "LlamaForCausalLM": {**WIDE, "num_key_value_heads": 2},
    "GPTNeoXForCausalLM": WIDE,
}
ENCODERS = {
    "BertForSequenceClassification": {**WIDE, "num_labels": 3},
    "RobertaForSequenceClassification": {**WIDE, "num_labels": 3},
    "DistilBertForSequenceClassification": {
        "vocab_size": 40,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
    },
}
WORDS = "the film that my brothers saw was <b>lovely</b>".split()


def built(name: str, **options) -> nn.Module:
    """A model with weights large enough that its words matter."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.double().eval()


def embedded(model: nn.Module, samples: int = 2) -> Tensor:
    ids = torch.randint(1, 40, (samples, len(WORDS)), generator=torch.Generator().manual_seed(1))
    return model.get_input_embeddings()(ids).detach()


def last_word(outputs) -> Tensor:
    """The score of word 7 as the next one."""
    return outputs.logits[:, -1, 7]


def conserved(model, inputs: Tensor, target) -> None:
    kept = rectgrad.record(model, inputs)
    kept.attribute("attn_lrp", target)
    found = kept.trace.conservation
    lost = found.score - found.at_input - found.biases - found.stabilisers
    assert bool(found.at_input.abs().min() > 1e-3)
    assert (lost.abs() <= 1e-4 * found.score.abs().clamp(min=1)).all(), found


@pytest.mark.parametrize("name", [*ENCODERS, *CAUSAL])
def test_attn_lrp_conserves_relevance_in_language_models(name):
    model = built(name, **{**ENCODERS, **CAUSAL}[name])
    conserved(lambda e: model(inputs_embeds=e), embedded(model), last_word if name in CAUSAL else 1)


VISION = {
    "ViTForImageClassification": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "patch_size": 8, "image_size": 32,
    },
    "SwinForImageClassification": {
        "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 4,
        "image_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VISION)
def test_attn_lrp_conserves_relevance_in_image_models(name):
    model = built(name, **VISION[name], num_labels=3)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
    conserved(model, pixels, 1)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", *CAUSAL])
def test_words_are_coloured_by_what_they_add(name):
    """As in examples/text.py: the same lines with BERT and with causal models."""
    model = built(name, **{**ENCODERS, **CAUSAL}[name])
    target = last_word if name in CAUSAL else 1
    maps = rectgrad.attribute(lambda e: model(inputs_embeds=e), embedded(model, 1), "attn_lrp", target)
    shown = image.words(WORDS, maps[0])
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == " ".join(WORDS)
    assert "\x1b[48;2;" in shown
    page = image.words_html(WORDS, maps[0])
    assert "&lt;b&gt;lovely&lt;/b&gt;" in page
    values = [float(value) for value in re.findall(r'title="([^"]+)"', page)]
    assert values == pytest.approx(maps[0].sum(1).tolist(), rel=1e-2)
