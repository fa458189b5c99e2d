"""The Triton kernels of cuda.py: tau of every row by exact selection, and the rule, in one launch.

A row goes through three kinds of jobs, and the jobs of all rows share the launch:

sample   reads a few units of the row and names two of them, lo and hi, that almost surely enclose tau
count    reads a part of the row, counts what lies where, and keeps the units over lo and not over hi, the
         candidates; who finishes the last part of a row selects tau among its candidates
rectify  reads a chunk of the row again and writes R where the score exceeds tau

A job that needs what another one finds waits for it. Jobs are handed out by a ticket, so a job waits only
for jobs that were handed out before it, and those run: no job waits for ever, however few programs the device
runs at once. If lo and hi do not enclose tau, or there are too many candidates, tau is searched in the whole
row: slow, rare, exact.
"""

# mypy: ignore-errors
# What follows is Triton's language, not Python's.

from __future__ import annotations

import triton
import triton.language as tl

# The words of the workspace, all 0 at first: HEAD with the ticket, then WORDS for each row. What is counted
# and what is waited for lie 128 bytes apart, so that waiting does not slow the counting.
HEAD = tl.constexpr(32)
WORDS = tl.constexpr(64)
FROM_LO, KEPT, OVER_HI, DONE = (tl.constexpr(i) for i in range(4))
BOUNDS, TAU = tl.constexpr(32), tl.constexpr(34)
NOT_YET = tl.constexpr(0x7FC00001)  # the bits of a NaN, which is never posted: what a word of 0 stands for

# A kernel is compiled once for all values of these.
NUMBERS = (
    "seen rows d k parts chunks capacity rank width together stride_R inner outer magic shift tau "
    "left right top bottom channels channels_magic channels_shift columns columns_magic columns_shift "
    "lines lines_magic lines_shift eps each factor".split()
)

# One argument a line would hide the code between the signatures.
# fmt: off


@triton.jit
def _flip(bits):
    """The bits of a float as an integer of the same order; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):
    return _flip(x.to(tl.int32, bitcast=True))


@triton.jit
def _value(key):
    return _flip(key).to(tl.float32, bitcast=True)


@triton.jit
def _infinity():
    return tl.full((), float("inf"), tl.float32)


@triton.jit
def _post(word, x, y):
    """Posts two numbers for waiting jobs in one write."""
    x = (x.to(tl.int32, bitcast=True) ^ NOT_YET).to(tl.int64) << 32
    y = y.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word.to(tl.pointer_type(tl.int64)), x | y, sem="relaxed")


@triton.jit
def _wait(word):
    """The numbers posted there. Nothing else is read of the other job, so no other memory is put in order."""
    word = word.to(tl.pointer_type(tl.int64))
    message = tl.atomic_add(word, 0, sem="relaxed")
    while message == 0:
        message = tl.atomic_add(word, 0, sem="relaxed")
    x = ((message >> 32).to(tl.int32) ^ NOT_YET).to(tl.float32, bitcast=True)
    return x, message.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _divided(at, magic, shift):
    """at // n. See `Divisor` in cuda.py."""
    return (tl.umulhi(at.to(tl.uint32), magic.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def _place(at, runs, ALIGN: tl.constexpr):
    """Where R keeps the unit `at`; ALIGN neighbours lie together. See `Runs` in cuda.py."""
    inner, outer, magic, shift = runs
    run = _divided(at, magic, shift)
    at = run * outer + (at - run * inner)
    if ALIGN > 1 and len(at.shape) == 1:
        at = tl.max_contiguous(tl.multiple_of(at, ALIGN), ALIGN)
    elif ALIGN > 1:
        at = tl.max_contiguous(tl.multiple_of(at, [1, ALIGN]), [1, ALIGN])
    return at


@triton.jit
def _load(pointer, valid, other, MASKED: tl.constexpr):
    return tl.load(pointer, mask=valid, other=other) if MASKED else tl.load(pointer)


@triton.jit
def _read(
    a, R, start, at, d, runs,
    RULE: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr, KEEP: tl.constexpr, MASKED: tl.constexpr,
):
    """(s, R) of the units start + at of a row of d; R only where it is to be kept.

    MASKED: not all of them may exist; there s is NaN, which no comparison counts, and R is 0.
    """
    valid = at < d - start
    if RULE != 4:
        x = _load(a + start + at, valid, float("nan"), MASKED)
        s = x.to(tl.float32)
    if RULE != 3 or KEEP:
        if SLICED:
            x = _load(R + _place(start + at, runs, ALIGN), valid, 0.0, MASKED)
        else:
            x = _load(R + start + at, valid, 0.0, MASKED)
    if RULE == 4:
        s = tl.where(valid, x.to(tl.float32), float("nan")) if MASKED else x.to(tl.float32)
    elif RULE != 3:
        s = s * x.to(tl.float32)
        if RULE == 2:
            s = tl.abs(s)
    return s, x


@triton.jit
def _write(out, start, at, valid, R, s, tau, seen):
    """R where s exceeds tau, else 0. `seen` becomes NaN where R is not finite: only then is R * 0 not 0."""
    tl.store(out + start + at, tl.where(s > tau, R, 0.0), mask=valid)
    trace = tl.sum(R.to(tl.float32) * 0.0)
    if trace != trace:
        tl.store(seen, trace)


@triton.jit
def _middle(low, high):
    """Of two integers, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _first(low, high):
    """Where the search begins: tau is seldom less than 2**-12 of the largest score."""
    far = high.to(tl.float32) - low.to(tl.float32) > 24 * 2**23
    return tl.where(far, high - 12 * 2**23, _middle(low, high))


@triton.jit
def _largest(s, limit):
    """The largest of s that does not exceed the limit."""
    return tl.max(tl.where(s <= limit, s, float("-inf")))


@triton.jit
def _kth(s, k, floor, ceil):
    """The k-th smallest of the numbers s that are not NaN, known to lie from floor to ceil.

    Halves the integers that order floats; a threshold that k numbers do not exceed ends it early.
    """
    low, high = _key(floor), _key(ceil)
    guess = _first(low, high)
    while low < high:
        count = tl.sum((s <= _value(guess)).to(tl.int32))
        if count < k:
            low = guess + 1
        else:
            high = guess
            low = tl.where(count == k, guess, low)
        guess = _middle(low, high)
    return _largest(s, _value(low))


@triton.jit
def _spread(d, seed, together, SAMPLE: tl.constexpr):
    """Positions of a sample of d units: 2**together neighbours at random in each of equal parts of a row."""
    i = tl.arange(0, SAMPLE) >> together
    h = (i + seed * SAMPLE).to(tl.uint32) * 2654435769
    h = (h ^ (h >> 15)) * 2246822519
    h = h ^ (h >> 13)
    runs = d >> together
    start = ((i.to(tl.int64) * (runs << together)) // SAMPLE).to(tl.int32)
    width = (runs // (SAMPLE >> together)).to(tl.uint32)
    run = start + tl.umulhi(h, tl.zeros_like(h) + width).to(tl.int32)
    return (run << together) + (tl.arange(0, SAMPLE) & ((1 << together) - 1))


@triton.jit
def _bracket(s, k, width, SAMPLE: tl.constexpr):
    """lo and hi: elements of the sample s, at least `width` ranks below and above its k-th smallest; or
    infinite. Both are looked for at once, and up to half as many ranks again will do."""
    slack = width // 2
    below, above = tl.maximum(k - width - slack, 1), k + width
    low_lo, high_lo = _key(-_infinity()), _key(_largest(s, _infinity()))
    low_hi, high_hi = tl.where(above <= SAMPLE, low_lo, high_lo), high_lo
    lo, hi = _first(low_lo, high_lo), _first(low_hi, high_hi)
    while (low_lo < high_lo) | (low_hi < high_hi):
        counts = tl.sum((s <= _value(lo)).to(tl.int32) + ((s <= _value(hi)).to(tl.int32) << 16))
        if (counts & 0xFFFF) < below:
            low_lo = tl.minimum(lo + 1, high_lo)
        else:
            high_lo = lo
            low_lo = tl.where((counts & 0xFFFF) <= below + slack, lo, low_lo)
        if (counts >> 16) < above:
            low_hi = tl.minimum(hi + 1, high_hi)
        else:
            high_hi = hi
            low_hi = tl.where((counts >> 16) <= above + slack, hi, low_hi)
        lo, hi = _middle(low_lo, high_lo), _middle(low_hi, high_hi)
    lo, hi = _largest(s, _value(lo)), _largest(s, _value(hi))
    return tl.where(k - width >= 1, lo, -_infinity()), tl.where(above <= SAMPLE, hi, _infinity())


@triton.jit
def _sample(
    a, R, words, d, rank, width, together, seed, runs,
    RULE: tl.constexpr, SLICED: tl.constexpr, SAMPLE: tl.constexpr,
):
    at = _spread(d, seed, together, SAMPLE)
    s, _ = _read(a, R, 0, at, d, runs, RULE, SLICED, 1, False, False)
    lo, hi = _bracket(s, rank, width, SAMPLE)
    _post(words + BOUNDS, lo, hi)


@triton.jit
def _units(CHUNK: tl.constexpr, BESIDE: tl.constexpr):
    """The numbers below CHUNK as a matrix, BESIDE to a line: its columns stay within a thread."""
    return tl.arange(0, CHUNK // BESIDE)[:, None] * BESIDE + tl.arange(0, BESIDE)[None, :]


@triton.jit
def _search(
    a, R, d, k, runs, low, high,
    RULE: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BESIDE: tl.constexpr,
):
    """The k-th smallest of a row of d units, its key from low to high. As `_kth`, but in memory, and each
    pass tries three thresholds; the third of the first pass is just below high, which is likely tau if many
    units are alike."""
    at = _units(CHUNK, BESIDE)
    third = high - 1
    while low < high:
        span = (high.to(tl.int64) - low).to(tl.uint32)
        first, second = low + (span >> 2).to(tl.int32), low + (span >> 1).to(tl.int32)
        third = tl.maximum(third, second)
        n_first = tl.zeros((BESIDE,), tl.int32)
        n_second, n_third = n_first, n_first
        for start in range(0, d, CHUNK):
            s, _ = _read(a, R, start, at, d, runs, RULE, SLICED, ALIGN, False, True)
            n_first += tl.sum((s <= _value(first)).to(tl.int32), 0)
            n_second += tl.sum((s <= _value(second)).to(tl.int32), 0)
            n_third += tl.sum((s <= _value(third)).to(tl.int32), 0)
        x, y, z = tl.sum(n_first) < k, tl.sum(n_second) < k, tl.sum(n_third) < k
        low = tl.where(z, third + 1, tl.where(y, second + 1, tl.where(x, first + 1, low)))
        high = tl.where(x, tl.where(y, tl.where(z, high, third), second), first)
        third = low + ((high.to(tl.int64) - low) * 3 >> 2).to(tl.int32)
    return _value(low)


@triton.jit
def _close(
    a, R, candidates, words, d, k, capacity, lo, hi, runs,
    RULE: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr, BESIDE: tl.constexpr,
):
    """tau of a row whose parts are all counted: among the n candidates, or lo, or neither."""
    n, below_lo = tl.load(words + KEPT, volatile=True), d - tl.load(words + FROM_LO, volatile=True)
    upto_hi = d - tl.load(words + OVER_HI, volatile=True)
    rank = k - (upto_hi - n)
    low, high = _key(lo), _key(hi)
    tau = lo
    if (rank >= 1) & (rank <= n) & (n <= capacity):
        if n <= CHUNK:
            i = tl.arange(0, CHUNK)
            tau = _kth(tl.load(candidates + i, mask=i < n, other=float("nan")), rank, lo, hi)
        else:
            tau = _search(candidates, candidates, n, rank, runs, low, high, 3, False, 1, CHUNK, BESIDE)
    elif (k <= below_lo) | (rank >= 1):  # below lo, over hi, or more candidates than places
        high = tl.where(k <= below_lo, low, high)
        low = tl.where(k <= below_lo, _key(-_infinity()), low)
        low = tl.where(k > upto_hi, high, low)
        high = tl.where(k > upto_hi, _key(_infinity()), high)
        tau = _search(a, R, d, k, runs, low, high, RULE, SLICED, ALIGN, CHUNK, BESIDE)
    return tau


@triton.jit
def _keep(candidates, words, s, lo, hi, column, capacity):
    """Writes the units over lo and not over hi, `column` of them in each column, behind those of others.

    Their order does not matter: free to choose one, the compiler leaves each unit where it is. So that a unit
    keeps its slot, the two are one number while they are put in order.
    """
    first = tl.atomic_add(words + KEPT + column * 0, column, sem="relaxed")
    inside = (s <= hi) & ~(s <= lo)  # not as in `_count`, so that it is computed again: to keep it is slower
    slot = tl.where(inside, first[None, :] + tl.cumsum(inside.to(tl.int32), 0) - 1, capacity)
    pair = (slot.to(tl.int64) << 32) | s.to(tl.uint32, bitcast=True).to(tl.int64)
    pair = tl.reshape(pair, (pair.numel,), can_reorder=True)
    slot = (pair >> 32).to(tl.int32)
    tl.store(candidates + slot, pair.to(tl.int32).to(tl.float32, bitcast=True), mask=slot < capacity)


@triton.jit
def _fetch(
    a, R, start, at, d, runs,
    RULE: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr,
):
    """s of a chunk; only the last one of a row may not be full."""
    if start + CHUNK <= d:
        s, _ = _read(a, R, start, at, d, runs, RULE, SLICED, ALIGN, False, False)
    else:
        s, _ = _read(a, R, start, at, d, runs, RULE, SLICED, ALIGN, False, True)
    return s


@triton.jit
def _count(
    a, R, candidates, words, out, d, k, begin, end, parts, capacity, runs,
    RULE: tl.constexpr, RECTIFY: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BESIDE: tl.constexpr,
):
    """The chunks from begin to end, the first read while the bounds are still looked for. Three counts of a
    column share an integer, 8 bits each: PART in cuda.py keeps them below 256."""
    at = _units(CHUNK, BESIDE)
    s = _fetch(a, R, begin * CHUNK, at, d, runs, RULE, SLICED, ALIGN, CHUNK)
    lo, hi = _wait(words + BOUNDS)
    counts = tl.zeros((BESIDE,), tl.int32)
    for chunk in range(begin, end):
        marks = (s >= lo).to(tl.int32) + ((s > lo).to(tl.int32) << 8) + ((s > hi).to(tl.int32) << 16)
        marks = tl.sum(marks, 0)
        counts += marks
        _keep(candidates, words, s, lo, hi, ((marks >> 8) & 0xFF) - (marks >> 16), capacity)
        if chunk + 1 < end:
            s = _fetch(a, R, (chunk + 1) * CHUNK, at, d, runs, RULE, SLICED, ALIGN, CHUNK)
    tl.atomic_add(words + FROM_LO, tl.sum(counts & 0xFF), sem="relaxed")
    tl.atomic_add(words + OVER_HI, tl.sum(counts >> 16), sem="relaxed")
    tl.debug_barrier()  # all candidates of this program are written before it says so
    if tl.atomic_add(words + DONE, 1, sem="acq_rel") == parts - 1:
        tau = _close(
            a, R, candidates, words, d, k, capacity, lo, hi, runs, RULE, SLICED, ALIGN, CHUNK, BESIDE
        )
        if RECTIFY:
            _post(words + TAU, tau, tau)
        else:
            tl.store(out, tau)


@triton.jit(do_not_specialize=NUMBERS)
def select_rows(
    a, R, out, seen, candidates, words,
    rows: tl.int32, d: tl.int32, k: tl.int32, parts: tl.int32, chunks: tl.int32, capacity: tl.int32,
    rank: tl.int32, width: tl.int32, together: tl.int32,
    stride_R: tl.int64, inner: tl.int32, outer: tl.int32, magic: tl.uint32, shift: tl.int32,
    RULE: tl.constexpr, RECTIFY: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, SAMPLE: tl.constexpr, BESIDE: tl.constexpr,
):
    """One job of rows * (1 + parts), which find tau, or of rows * chunks more, which rectify."""
    ticket = tl.atomic_add(words, 1, sem="relaxed")
    runs = (inner, outer, magic, shift)
    words += HEAD
    if ticket < rows:
        row = ticket.to(tl.int64)
        _sample(
            a + row * d, R + row * stride_R, words + row * WORDS, d, rank, width, together, ticket, runs,
            RULE, SLICED, SAMPLE,
        )
    elif ticket < rows * (1 + parts):
        row, part = ((ticket - rows) // parts).to(tl.int64), ((ticket - rows) % parts).to(tl.int64)
        begin, end = (part * chunks // parts).to(tl.int32), ((part + 1) * chunks // parts).to(tl.int32)
        _count(
            a + row * d, R + row * stride_R, candidates + row * capacity, words + row * WORDS, out + row,
            d, k, begin, end, parts, capacity, runs, RULE, RECTIFY, SLICED, ALIGN, CHUNK, BESIDE,
        )
    elif RECTIFY:
        ticket -= rows * (1 + parts)
        row, start, at = (ticket // chunks).to(tl.int64), ticket % chunks * CHUNK, tl.arange(0, CHUNK)
        d = d // ALIGN * ALIGN  # tells the compiler what divides it
        R += row * (stride_R // ALIGN * ALIGN)
        s, r = _read(a + row * d, R, start, at, d, runs, RULE, SLICED, ALIGN, True, True)
        tau, _ = _wait(words + row * WORDS + TAU)
        _write(out + row * d, start, at, at < d - start, r, s, tau, seen)


@triton.jit(do_not_specialize=NUMBERS)
def select_small_rows(
    a, R, out, seen,
    d: tl.int32, k: tl.int32,
    stride_R: tl.int64, inner: tl.int32, outer: tl.int32, magic: tl.uint32, shift: tl.int32,
    RULE: tl.constexpr, RECTIFY: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A row that fits into one program's registers."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    d = d // ALIGN * ALIGN
    R += row * (stride_R // ALIGN * ALIGN)
    s, r = _read(a + row * d, R, 0, at, d, (inner, outer, magic, shift), RULE, SLICED, ALIGN, RECTIFY, True)
    tau = _kth(s, k, -_infinity(), _largest(s, _infinity()))
    if RECTIFY:
        _write(out + row * d, 0, at, at < d, r, s, tau, seen)
    else:
        tl.store(out + row, tau)


@triton.jit(do_not_specialize=NUMBERS)
def rectify_rows(
    a, R, out, seen,
    tau: tl.float32, d: tl.int32, chunks: tl.int32,
    stride_R: tl.int64, inner: tl.int32, outer: tl.int32, magic: tl.uint32, shift: tl.int32,
    RULE: tl.constexpr, SLICED: tl.constexpr, ALIGN: tl.constexpr, CHUNK: tl.constexpr,
):
    """The rule with a constant tau."""
    row, start = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * CHUNK
    at = tl.arange(0, CHUNK)
    d = d // ALIGN * ALIGN
    R += row * (stride_R // ALIGN * ALIGN)
    s, r = _read(a + row * d, R, start, at, d, (inner, outer, magic, shift), RULE, SLICED, ALIGN, True, True)
    _write(out + row * d, start, at, at < d - start, r, s, tau, seen)
