"""Triton kernels for many copies of the paper's CNN: one launch performs the same step on N networks.

Tensors are (network, image, row, column, channel), weights (network, tap, channel in, channel out). A 3 x 3
convolution is nine matrix products, one per tap, over the shifted image; the first convolution is a single
product over the pixels that `pixels` gathered. Sums are float32, or float64 for float64 tensors.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pixels(
    images, ranks, which, low, high, kind, mean, out, first, count, rows,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The inputs of the first convolution of each network: (network, position, taps x channels).

    A pixel whose rank is in low..high gets the mean colour. With kind 1 only the mask is shown: -1 and 1.
    """
    n = tl.program_id(1)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, 32)
    tap, colour = k // 3, k % 3
    area: tl.constexpr = SIDE * SIDE
    picture = first + m // area
    row = (m // SIDE) % SIDE
    column = m % SIDE
    y = row[:, None] + (tap // 3)[None, :] - 1
    x = column[:, None] + (tap % 3)[None, :] - 1
    inside = (m < count)[:, None] & (k < 27)[None, :] & (y >= 0) & (y < SIDE) & (x >= 0) & (x < SIDE)
    at = picture[:, None].to(tl.int64) * area + y * SIDE + x
    map_ = tl.load(which + n).to(tl.int64)
    rank = tl.load(ranks + map_ * rows * area + at, mask=inside, other=0)
    hidden = (rank >= tl.load(low + n)) & (rank < tl.load(high + n))
    value = tl.load(images + at * 3 + colour[None, :], mask=inside, other=0).to(tl.float32)
    value = tl.div_rn(value, 127.5) - 1
    replaced = tl.load(mean + colour)[None, :]
    alone = tl.load(kind + n) == 1
    shown = tl.where(alone, 1.0, value)
    value = tl.where(hidden, tl.where(alone, -1.0, replaced), shown)
    value = tl.where(inside, value, 0.0)
    to = out + n.to(tl.int64) * count * 32 + m[:, None] * 32 + k[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(m < count)[:, None])


@triton.jit
def convolve(
    x, w, bias, gate, y, count,
    SIDE: tl.constexpr, TAPS: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forward: relu(x * w + bias). Backward: propagates the gradient x through w, where the gate was
    active."""
    n = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = m < count
    row = (m // SIDE) % SIDE
    column = m % SIDE
    c, d = tl.arange(0, CIN), tl.arange(0, COUT)
    x += n * count * CIN
    w += n * TAPS * CIN * COUT
    total = tl.zeros((BLOCK, COUT), SUMS)
    for tap in range(TAPS):
        if TAPS == 1:
            seen = tl.load(x + m[:, None] * CIN + c[None, :], mask=within[:, None], other=0.0)
        else:
            dy, dx = tap // 3 - 1, tap % 3 - 1
            inside = within & (row + dy >= 0) & (row + dy < SIDE) & (column + dx >= 0) & (column + dx < SIDE)
            at = m + dy * SIDE + dx
            seen = tl.load(x + at[:, None] * CIN + c[None, :], mask=inside[:, None], other=0.0)
        if BACKWARD:
            weights = tl.load(w + (TAPS - 1 - tap) * CIN * COUT + d[None, :] * CIN + c[:, None])
        else:
            weights = tl.load(w + tap * CIN * COUT + c[:, None] * COUT + d[None, :])
        total = tl.dot(seen, weights, total, input_precision=PRECISION, out_dtype=SUMS)
    to = n * count * COUT + m[:, None] * COUT + d[None, :]
    if BACKWARD:
        active = tl.load(gate + to, mask=within[:, None], other=0.0)
        total = tl.where(active > 0, total, 0.0)
    else:
        total = tl.maximum(total + tl.load(bias + n * COUT + d)[None, :], 0.0)
    tl.store(y + to, total.to(y.dtype.element_ty), mask=within[:, None])


@triton.jit
def weigh(
    x, g, dw, db, count, part,
    SIDE: tl.constexpr, TAPS: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights and bias of a convolution from a part of the positions, for three taps of
    one row or the only tap. `adam` adds up the parts."""
    s, r = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    parts = tl.num_programs(0)
    c, d = tl.arange(0, CIN), tl.arange(0, COUT)
    x += n * count * CIN
    g += n * count * COUT
    left = tl.zeros((CIN, COUT), SUMS)
    middle = tl.zeros((CIN, COUT), SUMS)
    right = tl.zeros((CIN, COUT), SUMS)
    sums = tl.zeros((COUT,), SUMS)
    for start in range(s * part, tl.minimum((s + 1) * part, count), BLOCK):
        m = start + tl.arange(0, BLOCK)
        within = m < tl.minimum((s + 1) * part, count)
        R = tl.load(g + m[:, None] * COUT + d[None, :], mask=within[:, None], other=0.0)
        if TAPS == 1:
            seen = tl.load(x + m[:, None] * CIN + c[None, :], mask=within[:, None], other=0.0)
            middle = tl.dot(tl.trans(seen), R, middle, input_precision=PRECISION, out_dtype=SUMS)
        else:
            row = (m // SIDE) % SIDE + r - 1
            column = m % SIDE
            inside = within & (row >= 0) & (row < SIDE)
            at = m + (r - 1) * SIDE
            ok = inside & (column > 0)
            seen = tl.load(x + (at - 1)[:, None] * CIN + c[None, :], mask=ok[:, None], other=0.0)
            left = tl.dot(tl.trans(seen), R, left, input_precision=PRECISION, out_dtype=SUMS)
            seen = tl.load(x + at[:, None] * CIN + c[None, :], mask=inside[:, None], other=0.0)
            middle = tl.dot(tl.trans(seen), R, middle, input_precision=PRECISION, out_dtype=SUMS)
            ok = inside & (column < SIDE - 1)
            seen = tl.load(x + (at + 1)[:, None] * CIN + c[None, :], mask=ok[:, None], other=0.0)
            right = tl.dot(tl.trans(seen), R, right, input_precision=PRECISION, out_dtype=SUMS)
        sums += tl.sum(R.to(SUMS), 0)
    to = dw + (n * parts + s) * TAPS * CIN * COUT + c[:, None] * COUT + d[None, :]
    if TAPS == 1:
        tl.store(to, middle)
    else:
        to += r * 3 * CIN * COUT
        tl.store(to, left)
        tl.store(to + CIN * COUT, middle)
        tl.store(to + 2 * CIN * COUT, right)
    if r == 0:
        tl.store(db + (n * parts + s) * COUT + d, sums)


@triton.jit
def pool(y, p, count, SIDE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """2 x 2 max pooling. `count` is the number of pooled values of all networks."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    c, place = i % C, i // C
    half: tl.constexpr = SIDE // 2
    at = ((place // half) * 2 * SIDE + (place % half) * 2) * C + c
    a = tl.load(y + at, mask=ok)
    b = tl.load(y + at + C, mask=ok)
    e = tl.load(y + at + SIDE * C, mask=ok)
    f = tl.load(y + at + (SIDE + 1) * C, mask=ok)
    tl.store(p + i, tl.maximum(tl.maximum(a, b), tl.maximum(e, f)), mask=ok)


@triton.jit
def unpool(R, y, p, g, count, SIDE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Passes the gradient to the first maximum of each window, if it was active."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    c, place = i % C, i // C
    half: tl.constexpr = SIDE // 2
    at = ((place // half) * 2 * SIDE + (place % half) * 2) * C + c
    largest = tl.load(p + i, mask=ok)
    grad = tl.load(R + i, mask=ok)
    grad = tl.where(largest > 0, grad, 0.0).to(g.dtype.element_ty)
    zero = tl.zeros_like(grad)
    first = tl.load(y + at, mask=ok) == largest
    tl.store(g + at, tl.where(first, grad, zero), mask=ok)
    second = (tl.load(y + at + C, mask=ok) == largest) & ~first
    tl.store(g + at + C, tl.where(second, grad, zero), mask=ok)
    third = (tl.load(y + at + SIDE * C, mask=ok) == largest) & ~first & ~second
    tl.store(g + at + SIDE * C, tl.where(third, grad, zero), mask=ok)
    tl.store(g + at + (SIDE + 1) * C, tl.where(first | second | third, zero, grad), mask=ok)


@triton.jit
def adam(
    p, m, v, copy, g, size, rate, correction1, correction2,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """An Adam step on one parameter of all networks. The gradient is given in parts; kernels read `copy`."""
    n = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    grad = tl.zeros((BLOCK,), p.dtype.element_ty)
    for s in range(PARTS):
        grad += tl.load(g + (n * PARTS + s) * size + i, mask=ok, other=0.0).to(p.dtype.element_ty)
    at = n * size + i
    first = 0.9 * tl.load(m + at, mask=ok, other=0.0) + 0.1 * grad
    second = 0.999 * tl.load(v + at, mask=ok, other=0.0) + 0.001 * grad * grad
    tl.store(m + at, first, mask=ok)
    tl.store(v + at, second, mask=ok)
    change = rate / correction1 * first / (tl.sqrt(second) / correction2 + 1e-8)
    value = tl.load(p + at, mask=ok, other=0.0) - change
    tl.store(p + at, value, mask=ok)
    tl.store(copy + at, value.to(copy.dtype.element_ty), mask=ok)
