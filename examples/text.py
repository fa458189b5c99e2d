"""Which words make a review positive: attribution to the embeddings of a small transformer.

Token ids have no gradient, but their embeddings do. So the model takes embeddings, the map has one value for
each of their components, and the score of a word is the sum of its values. Reviews differ in length: the
padding mask is a further argument of the model, passed in `forward_kwargs`.

    python examples/text.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rectgrad

GOOD, BAD = "lovely brilliant moving".split(), "dull tedious clumsy".split()
NEUTRAL = "the film was a story about two men and their dog in paris last year".split()
WORDS = ["<pad>", *GOOD, *BAD, *NEUTRAL]
LENGTH = 10


def reviews(n: int) -> tuple[Tensor, Tensor]:
    """Token ids (n, LENGTH), padded at the end, and 1 for a positive review: one with a positive word."""
    labels, lengths = torch.randint(0, 2, (n,)), torch.randint(4, LENGTH + 1, (n,))
    first_neutral = WORDS.index(NEUTRAL[0])
    tokens = torch.randint(first_neutral, len(WORDS), (n, LENGTH))
    opinions = torch.where(labels == 1, 1, 1 + len(GOOD)) + torch.randint(0, 3, (n,))
    tokens[torch.arange(n), (lengths * torch.rand(n)).long()] = opinions
    tokens[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, labels


class Reader(nn.Module):
    """A transformer of one layer over embeddings (N, T, 32); `padding` (N, T) is true after the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, embeddings: Tensor, padding: Tensor) -> Tensor:
        read = self.layer(embeddings, src_key_padding_mask=padding)
        words = ~padding[:, :, None]
        return self.head((read * words).sum(1) / words.sum(1))


def trained() -> Reader:
    model = Reader()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(80):
        tokens, labels = reviews(64)
        optimiser.zero_grad()
        F.cross_entropy(model(model.embedding(tokens), tokens == 0), labels).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    torch.manual_seed(0)
    model = trained()
    tokens, labels = reviews(100)
    embeddings, padding = model.embedding(tokens).detach(), tokens == 0
    answers = model(embeddings, padding).argmax(1)
    print(f"accuracy: {float((answers == labels).float().mean()):.2f}")

    maps = rectgrad.attribute(
        model, embeddings, "rectgrad", q=95, positive_only=False, forward_kwargs={"padding": padding}
    )
    scores = maps.sum(2)
    for ids, values, answer in zip(tokens[:3], scores, answers, strict=False):
        print(("bad", "good")[answer])
        for i, value in zip(ids, values / values.abs().max(), strict=True):
            if i:
                print(f"  {WORDS[i]:>10} {value:6.2f} {'#' * round(20 * max(float(value), 0))}")
    opinions = (tokens > 0) & (tokens <= len(GOOD + BAD))
    hits = opinions.gather(1, scores.argmax(1, keepdim=True)).float().mean()
    print(f"reviews where the word of opinion has the highest score: {float(hits):.2f}")
    print(f"largest score of padding: {float(scores[padding].abs().max()):g}")


if __name__ == "__main__":
    main()
