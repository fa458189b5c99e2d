"""AttnLRP on language models that were trained here: relevance is conserved, and it goes to the tokens that
the model reads. In float64, and with embeddings as the input, because token ids have no gradient."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

WORDS, LENGTH, WIDTH, HEADS = 8, 10, 32, 4
BACK = 3  # the next token is the one that many places before it


class Block(nn.Module):
    def __init__(self, norm: type) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(read)
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class LanguageModel(nn.Module):
    """Causal: the scores of the token after each one."""

    def __init__(self, norm: type) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 2)
        self.blocks = nn.Sequential(Block(norm), Block(norm))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(embeddings + self.places[: embeddings.shape[1]])))


def texts(n: int) -> Tensor:
    """(n, LENGTH): each token is the one BACK places before; the first ones are random."""
    return torch.randint(0, WORDS, (n, BACK))[:, torch.arange(LENGTH) % BACK]


@functools.cache
def trained(norm: type) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel(norm)
        optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(200):
            tokens = texts(64)
            optimiser.zero_grad()
            scores = model(model.embedding(tokens[:, :-1]))[:, BACK - 1 :]
            F.cross_entropy(scores.flatten(0, 1), tokens[:, BACK:].flatten()).backward()
            optimiser.step()
    return model.double().eval().requires_grad_(False)


def explained(norm: type) -> tuple[LanguageModel, Tensor, Tensor]:
    """A model, texts without their last token, and that token."""
    torch.manual_seed(1)
    tokens = texts(12)
    return trained(norm), tokens[:, :-1], tokens[:, -1]


EVERY_NORM = pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])


@EVERY_NORM
def test_relevance_is_conserved(norm):
    model, tokens, following = explained(norm)
    embeddings = model.embedding(tokens)
    rows = torch.arange(len(tokens))
    kept = rectgrad.record(model, embeddings)
    assert bool((kept.outputs[:, -1].argmax(1) == following).all()), "the model has not learned its task"
    maps = kept.attribute("attn_lrp", lambda scores: scores[rows, -1, following])
    found, score = kept.trace.conservation, model(embeddings)[rows, -1, following]
    torch.testing.assert_close(found.score, score)
    torch.testing.assert_close(found.at_input, maps.sum((1, 2)))
    missing = score - maps.sum((1, 2)) - found.biases - found.stabilisers
    assert bool((missing.abs() <= 1e-4 * score.abs().clamp(min=1)).all()), missing
    assert float((maps.sum((1, 2)).abs() / score.abs()).mean()) > 0.1  # not all of it is absorbed


@EVERY_NORM
def test_the_token_that_is_copied_has_the_highest_relevance(norm):
    """Earlier copies of it come next: none of the other tokens may exceed all of them."""
    model, tokens, following = explained(norm)
    rows = torch.arange(len(tokens))
    maps = rectgrad.attribute(
        model, model.embedding(tokens), "attn_lrp", lambda scores: scores[rows, -1, following]
    )
    strongest = maps.sum(2).argmax(1)
    copied = tokens.gather(1, strongest[:, None])[:, 0] == following
    assert float(copied.double().mean()) > 0.8
