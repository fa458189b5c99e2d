"""Slow twins of `rectgrad.metrics`: numpy and plain loops over one sample, written from the definitions.

Every function takes one sample: a map is (C, H, W), float64; a mask is (H, W), boolean.
"""

import math


def total_variation(m, normalize=False):
    channels, height, width = m.shape
    tv = total = 0.0
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                total += abs(m[c, y, x])
                if y + 1 < height:
                    tv += abs(m[c, y + 1, x] - m[c, y, x])
                if x + 1 < width:
                    tv += abs(m[c, y, x + 1] - m[c, y, x])
    if not normalize:
        return tv
    return tv / total if total else 0.0


def inside(m, mask, share=False):
    channels, height, width = m.shape
    amount = total = 0.0
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                total += abs(m[c, y, x])
                if mask[y, x]:
                    amount += abs(m[c, y, x])
    if not share:
        return amount
    return amount / total if total else 0.0


def outside(m, mask, share=False):
    return inside(m, ~mask, share)


def in_box(m, box, share=False):
    top, left, tall, wide = box
    amount = total = 0.0
    for c in range(m.shape[0]):
        for y in range(m.shape[1]):
            for x in range(m.shape[2]):
                total += abs(m[c, y, x])
                if top <= y < top + tall and left <= x < left + wide:
                    amount += abs(m[c, y, x])
    if not share:
        return amount
    return amount / total if total else 0.0


def gini(m):
    """Half the mean absolute difference over all pairs, relative to the mean."""
    values = [abs(v) for v in m.flatten()]
    if sum(values) == 0:
        return 0.0
    n = len(values)
    differences = sum(abs(v - w) for v in values for w in values)
    return differences / (2 * n * n) / (sum(values) / n)


def zero_share(m):
    return sum(1 for v in m.flatten() if v == 0) / m.size


def pointing_game(m, mask, tolerance=0):
    _, height, width = m.shape
    best, peak = -math.inf, None
    for y in range(height):
        for x in range(width):
            value = sum(m[:, y, x])
            if value > best:
                best, peak = value, (y, x)
    for y in range(height):
        for x in range(width):
            if mask[y, x] and math.hypot(y - peak[0], x - peak[1]) <= tolerance:
                return 1.0
    return 0.0


def average_ranks(values):
    ranks = []
    for v in values:
        smaller = sum(1 for w in values if w < v)
        equal = sum(1 for w in values if w == v)
        ranks.append(sum(range(smaller + 1, smaller + equal + 1)) / equal)
    return ranks


def rank_correlation(a, b, absolute=False):
    x = average_ranks([abs(v) if absolute else v for v in a.flatten()])
    y = average_ranks([abs(v) if absolute else v for v in b.flatten()])
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y, strict=True))
    variances = sum((p - mean_x) ** 2 for p in x) * sum((q - mean_y) ** 2 for q in y)
    return covariance / math.sqrt(variances) if variances else math.nan


def ssim(a, b, data_range=None):
    if data_range is None:
        data_range = max(a.max(), b.max()) - min(a.min(), b.min())
    if data_range == 0:
        return 1.0
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    channels, height, width = a.shape
    values = []
    for c in range(channels):
        for y in range(height - 6):
            for x in range(width - 6):
                p, q = a[c, y : y + 7, x : x + 7], b[c, y : y + 7, x : x + 7]
                cross = ((p - p.mean()) * (q - q.mean())).sum() / 48
                numerator = (2 * p.mean() * q.mean() + c1) * (2 * cross + c2)
                spread = p.var(ddof=1) + q.var(ddof=1) + c2
                values.append(numerator / ((p.mean() ** 2 + q.mean() ** 2 + c1) * spread))
    return sum(values) / len(values)


def curve(score, start, end, m, steps):
    """Scores of one (C, H, W) image on its way from `start` to `end`; `score` takes one image."""
    _, height, width = m.shape
    places = [(y, x) for y in range(height) for x in range(width)]
    # Python's sort is stable: equal pixels keep their reading order
    places = sorted(places, key=lambda place: -sum(m[:, place[0], place[1]]))
    scores = []
    for k in range(steps + 1):
        image = start.copy()
        for y, x in places[: k * len(places) // steps]:
            image[:, y, x] = end[:, y, x]
        scores.append(score(image))
    return scores


def area(scores):
    gaps = len(scores) - 1
    return sum((scores[i] + scores[i + 1]) / 2 / gaps for i in range(gaps))
