"""Which words decide: token attributions of a classifier and of a causal language model, as coloured words.

Token ids have no gradient, but their embeddings do. So each model takes embeddings, the map has one value for
each of their components, and the score of a word is the sum of its values. With a model of transformers the
same lines work: `lambda e: bert(inputs_embeds=e)` is the model, `bert.get_input_embeddings()(ids)` its input,
and the score of a causal model's next word is the target `lambda out: out.logits[:, -1, word]`.

`coloured` is the idea; the rest is data and two models, which are trained here in seconds. Prints the words
in 24-bit colours, and writes them to words.html.

    python examples/text.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad
from rectgrad import image

GOOD, BAD = "lovely brilliant moving".split(), "dull tedious clumsy".split()
NEUTRAL = "the film was a story about two men and their dog in paris last year".split()
ONE, MANY = "key coin letter book".split(), "keys coins letters books".split()
WORDS = ["<pad>", *GOOD, *BAD, *NEUTRAL, *ONE, *MANY, "is", "are", "near", "old", "red", "small"]
LENGTH = 10


def coloured(model: nn.Module, tokens: Tensor, answers: list[str], target=None) -> tuple[Tensor, str]:
    """The idea, in ten lines: one score for each word, (N, T), and the first texts on the colours of their
    words' scores, printed and as HTML."""
    embeddings, padding = model.embedding(tokens).detach(), tokens == 0
    maps = rectgrad.attribute(model, embeddings, "attn_lrp", target, forward_kwargs={"padding": padding})
    scores, page = maps.sum(2), ""
    for text, values, answer in zip(tokens[:4], scores.tolist(), answers, strict=False):
        words = [WORDS[i] for i in text if i]
        drawn = [*words, f"-> {answer}"], [*values[: len(words)], 0]
        print(image.words(*drawn))
        page += image.words_html(*drawn) + "\n"
    return scores, page


def ids(words: list[str]) -> Tensor:
    return torch.tensor([WORDS.index(word) for word in words])


def reviews(n: int) -> tuple[Tensor, Tensor]:
    """Token ids (n, LENGTH), padded at the end, and 1 for a positive review: one with a positive word."""
    labels, lengths = torch.randint(0, 2, (n,)), torch.randint(4, LENGTH + 1, (n,))
    tokens = ids(NEUTRAL)[torch.randint(0, len(NEUTRAL), (n, LENGTH))]
    opinions = torch.where(labels == 1, 1, 1 + len(GOOD)) + torch.randint(0, 3, (n,))
    tokens[torch.arange(n), (lengths * torch.rand(n)).long()] = opinions
    tokens[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, labels


def sentences(n: int) -> tuple[Tensor, Tensor]:
    """Token ids (n, 7) such as "the red keys near the old coin", and the verb that follows: "are". It agrees
    with the first noun, whatever the second one is."""
    tokens = ids("the red key near the old coin".split()).repeat(n, 1)
    many, nouns = torch.randint(0, 2, (n, 2)), torch.stack([ids(ONE), ids(MANY)])
    tokens[:, [2, 6]] = nouns[many, torch.randint(0, len(ONE), (n, 2))]
    tokens[:, [1, 5]] = ids("old red small".split())[torch.randint(0, 3, (n, 2))]
    return tokens, torch.where(many[:, 0] == 1, WORDS.index("are"), WORDS.index("is"))


class Reader(nn.Module):
    """A transformer over embeddings (N, T, 32). It gives the scores of a review, or of the next word."""

    def __init__(self, outputs: int, causal: bool) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(len(WORDS), 32), nn.Parameter(torch.randn(LENGTH, 32) / 4)
        self.layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0, batch_first=True)
        self.head, self.causal = nn.Linear(32, outputs), causal

    def forward(self, embeddings: Tensor, padding: Tensor) -> Tensor:
        """padding: (N, T), true after the last word. A causal model's words see only those before them."""
        steps = embeddings.shape[1]
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1) if self.causal else None
        read = self.layer(embeddings + self.places[:steps], src_mask=later, src_key_padding_mask=padding)
        if self.causal:
            return self.head(read[:, -1])
        words = ~padding[:, :, None]
        return self.head((read * words).sum(1) / words.sum(1))


def trained(model: Reader, data) -> Reader:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        tokens, answers = data(64)
        optimiser.zero_grad()
        F.cross_entropy(model(model.embedding(tokens), tokens == 0), answers).backward()
        optimiser.step()
    return model.eval()


def print_accuracy(model: Reader, tokens: Tensor, answers: Tensor) -> None:
    right = model(model.embedding(tokens), tokens == 0).argmax(1) == answers
    print(f"accuracy: {float(right.float().mean()):.2f}")


def main() -> None:
    torch.manual_seed(0)
    print("a classifier of reviews")
    tokens, labels = reviews(100)
    model = trained(Reader(2, causal=False), reviews)
    print_accuracy(model, tokens, labels)
    scores, page = coloured(model, tokens, [("bad", "good")[y] for y in labels])
    opinions = (tokens > 0) & (tokens <= len(GOOD + BAD))
    hits = opinions.gather(1, scores.argmax(1, keepdim=True)).float().mean()
    print(f"reviews where the word of opinion has the highest score: {float(hits):.2f}")
    print(f"largest score of padding: {float(scores[tokens == 0].abs().max()):g}")

    print("a causal language model: which words call for this verb rather than for the other?")
    tokens, verbs = sentences(100)
    other = WORDS.index("is") + WORDS.index("are") - verbs
    model = trained(Reader(len(WORDS), causal=True), sentences)
    print_accuracy(model, tokens, verbs)
    scores, more = coloured(model, tokens, [WORDS[y] for y in verbs], rectgrad.contrast(verbs, other))
    hits = (scores[:, 2] > scores[:, 6]).float().mean()
    print(f"sentences whose subject has a higher score than the other noun: {float(hits):.2f}")
    Path("words.html").write_text("<!doctype html><meta charset=utf-8>" + page + more, encoding="utf-8")


if __name__ == "__main__":
    main()
