"""Dense layers, transformers, experts and recurrent networks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stored_networks.registry import TOKENS, Written, conv, network


@network((3, 20))
def mlp():
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))


@network((3, 20))
def mlp_with_norm_and_dropout():
    layers: list[nn.Module] = []
    for width, out in ((20, 16), (16, 16), (16, 12)):
        layers += [
            nn.Linear(width, out),
            nn.BatchNorm1d(out),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Linear(12, 5))


@network((2, 12), seed=1)
def linear_by_hand():
    """Linear layers written as products with their weights."""

    def forward(net, x):
        x = torch.relu(x @ net.a.weight.t() + net.a.bias)
        x = torch.relu(torch.addmm(net.b.bias, x, net.b.weight.T))
        x = torch.relu(torch.matmul(net.c.weight, x.unsqueeze(-1)).squeeze(-1))
        return torch.einsum("nf,of->no", x, net.d.weight) + net.d.bias

    sizes = ((12, 10), (10, 10), (10, 8), (8, 5))
    return Written(forward, **{name: nn.Linear(*size) for name, size in zip("abcd", sizes, strict=True)})


@network()
def mixer():
    def forward(net, x):
        x = net.patches(x).flatten(2).transpose(1, 2)
        x = x + net.tokens(net.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + net.channels(net.norm2(x))
        return net.head(net.norm3(x).mean(1))

    return Written(
        forward, patches=conv(3, 6, 2, 2, padding=0), norm1=nn.LayerNorm(6), norm2=nn.LayerNorm(6),
        norm3=nn.LayerNorm(6), tokens=nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16)),
        channels=nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)), head=nn.Linear(6, 5),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention written out; `fused` calls scaled_dot_product_attention with these options instead."""

    def __init__(self, width: int, heads: int = 2, fused: dict[str, Any] | None = None):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        qkv = self.qkv(x).reshape(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused is not None:
            x = F.scaled_dot_product_attention(q, k, v, **self.fused)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            x = scores.softmax(dim=-1) @ v
        return self.out(x.transpose(1, 2).reshape(n, t, width))


class LibraryAttention(nn.Module):
    def __init__(self, width: int, need_weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Transformer(nn.Module):
    """A pre-norm block over patches, with positions and a class token; reads the token at position `read`."""

    def __init__(self, attention: nn.Module, activation: nn.Module, read: int = 0, width: int = 8):
        super().__init__()
        self.read = read
        self.patches = conv(3, width, 2, 2, padding=0)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 17, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(width, 12), activation, nn.Dropout(0.1), nn.Linear(12, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x)[:, self.read])


@network()
def attention_by_hand():
    return Transformer(Attention(8), nn.GELU())


@network()
def attention_fused():
    return Transformer(Attention(8, fused={}), nn.GELU())


@network()
def attention_fused_causal():
    return Transformer(Attention(8, 1, fused={"is_causal": True, "scale": 0.3}), nn.ReLU(), read=-1)


@network()
def multihead_attention():
    return Transformer(LibraryAttention(8, need_weights=False), nn.ReLU())


@network()
def multihead_attention_with_weights():
    return Transformer(LibraryAttention(8, need_weights=True), nn.GELU())


@network(TOKENS)
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Written(lambda net, x: net.head(net.encoder(x).mean(1)), encoder=encoder, head=nn.Linear(8, 5))


@network(TOKENS)
def einsum_attention():
    def forward(net, x):
        q, k, v = net.q(x), net.k(x), net.v(x)
        weights = torch.softmax(torch.einsum("bic,bjc->bij", q, k) / 8**0.5, dim=-1)
        x = F.relu(torch.einsum("bij,bjc->bic", weights, v))
        return net.head(torch.einsum("bic,co->bio", x, net.out.weight).mean(1))

    projections = {name: nn.Linear(8, 8) for name in "qkv"}
    return Written(forward, **projections, out=nn.Linear(6, 8), head=nn.Linear(6, 5))


@network(TOKENS)
def batched_products():
    """bmm and baddbmm of two data tensors, and a mean over tokens by a product."""

    def forward(net, x):
        h = F.relu(net.a(x))
        gram = torch.bmm(h, h.transpose(1, 2)) / 6
        mixed = torch.baddbmm(h, gram, net.b(x), beta=0.5, alpha=0.2)
        return net.head(F.relu(mixed).transpose(1, 2) @ x.new_full((6, 1), 1 / 6)).squeeze(1)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 5)

        def forward(self, x):
            return self.linear(x.transpose(1, 2))

    return Written(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), head=Head())


@network((2, 3, 8, 8))
def windows_folded_into_batch():
    """Four windows of each picture become rows of the batch."""

    def forward(net, x):
        n = x.shape[0]
        windows = x.reshape(n, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(n * 4, 3, 4, 4)
        rows = F.relu(net.mlp(F.relu(net.conv(windows)).flatten(1)))
        return net.head(rows.reshape(n, 40))

    return Written(forward, conv=conv(3, 4), mlp=nn.Linear(64, 10), head=nn.Linear(40, 5))


@network(TOKENS)
def tokens_folded_into_batch():
    def forward(net, x):
        rows = net.b(F.gelu(net.a(x.flatten(0, 1))))
        return net.head(F.relu(rows.view_as(x)).mean(1))

    return Written(forward, a=nn.Linear(8, 12), b=nn.Linear(12, 8), head=nn.Linear(8, 5))


@network((2, 3, 8, 8), seed=1)
def shifted_windows():
    """A Swin block: rolled, windows of 2x2 tokens folded into the batch, attention inside each."""

    def forward(net, x):
        x = net.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        rolled = torch.roll(net.norm(x), shifts=(-1, -1), dims=(1, 2))
        windows = (
            rolled.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)
        )
        y = F.relu(net.attention(windows)).view(n, h // 2, w // 2, 2, 2, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(n, h, w, c)
        x = x + torch.roll(y, shifts=(1, 1), dims=(1, 2))
        return net.head((x + net.mlp(x)).flatten(1, 2).mean(1))

    mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    return Written(
        forward, patches=conv(3, 8, 2, 2, padding=0), norm=nn.LayerNorm(8), attention=Attention(8), mlp=mlp,
        head=nn.Linear(8, 5),
    )  # fmt: skip


@network(TOKENS)
def experts():
    """Each token goes to one expert, so samples take different paths."""

    def forward(net, x):
        flat = x.reshape(-1, 8)
        gates = net.gate(flat).softmax(-1)
        best = gates.argmax(-1)
        final = torch.zeros_like(flat)
        for i, expert in enumerate((net.a, net.b)):
            chosen = best == i
            if chosen.any():
                final[chosen] += gates[chosen, i, None] * expert(flat[chosen])
        return net.head(final.view_as(x).mean(1))

    pair = {name: nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8)) for name in "ab"}
    return Written(forward, **pair, gate=nn.Linear(8, 2), head=nn.Linear(8, 5))


@network((2, 5, 4))
def lstm():
    def forward(net, x):
        return net.head(F.relu(net.fc(net.rnn(x)[0][:, -1])))

    return Written(forward, rnn=nn.LSTM(4, 6, batch_first=True), fc=nn.Linear(6, 10), head=nn.Linear(10, 5))


@network((2, 5, 4), seed=1)
def gru_bidirectional():
    def forward(net, x):
        out, last = net.rnn(F.relu(net.embed(x)))
        return net.head(F.relu(net.fc(torch.cat([out.mean(1), last[0]], dim=1))))

    return Written(
        forward, embed=nn.Linear(4, 6), rnn=nn.GRU(6, 4, batch_first=True, bidirectional=True),
        fc=nn.Linear(12, 10), head=nn.Linear(10, 5),
    )  # fmt: skip


@network((2, 5, 4))
def recurrent_by_hand():
    """One cell, unrolled over the steps."""

    def forward(net, x):
        h = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            h = F.relu(net.a(step) + net.b(h))
        return net.head(h)

    return Written(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 8), head=nn.Linear(8, 5))


@network((2, 5, 4))
def relu_rnn():
    """ReLUs inside a fused recurrent layer, out of reach of any rule."""

    def forward(net, x):
        return net.head(F.relu(net.fc(net.rnn(x)[0][:, -1])))

    rnn = nn.RNN(4, 6, nonlinearity="relu", batch_first=True)
    return Written(forward, rnn=rnn, fc=nn.Linear(6, 10), head=nn.Linear(10, 5))
