"""Slow twins of `rectgrad.metrics`: numpy and plain loops over one sample, written from the definitions.

Every function takes one sample: a map is (C, H, W), float64; a mask is (H, W), boolean.
"""

import math

import numpy as np


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
    places, scores = ranked_pixels(m), []
    for k in range(steps + 1):
        image = start.copy()
        for y, x in places[: k * len(places) // steps]:
            image[:, y, x] = end[:, y, x]
        scores.append(score(image))
    return scores


def area(scores):
    gaps = len(scores) - 1
    return sum((scores[i] + scores[i + 1]) / 2 / gaps for i in range(gaps))


def linear_imputation(image, removed):
    """One (C, H, W) image whose removed pixels solve the linear system, with a dense matrix."""
    channels, height, width = image.shape
    places = [(y, x) for y in range(height) for x in range(width) if removed[y, x]]
    number = {place: i for i, place in enumerate(places)}
    matrix, right = np.zeros((len(places), len(places))), np.zeros((len(places), channels))
    for i, (y, x) in enumerate(places):
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                near = (y + down, x + across)
                if near == (y, x) or not (0 <= near[0] < height and 0 <= near[1] < width):
                    continue
                weight = 1 / 12 if down and across else 1 / 6
                matrix[i, i] += weight
                if near in number:
                    matrix[i, number[near]] -= weight
                else:
                    right[i] += weight * image[:, near[0], near[1]]
    filled = image.copy()
    for (y, x), values in zip(places, np.linalg.solve(matrix, right), strict=True):
        filled[:, y, x] = values
    return filled


def ranked_pixels(m):
    """(y, x) of a (C, H, W) map, most important first, equal ones in reading order (a stable sort)."""
    places = [(y, x) for y in range(m.shape[1]) for x in range(m.shape[2])]
    return sorted(places, key=lambda place: -sum(m[:, place[0], place[1]]))


def pearson(a, b):
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    variances = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return covariance / math.sqrt(variances) if variances else math.nan


def subset_correlation(score, image, baseline, m, subsets):
    """Sensitivity-n of one image for given subsets (H, W)."""
    sums, effects = [], []
    for chosen in subsets:
        changed, total = image.copy(), 0.0
        for y in range(chosen.shape[0]):
            for x in range(chosen.shape[1]):
                if chosen[y, x]:
                    changed[:, y, x] = baseline[:, y, x]
                    total += sum(m[:, y, x])
        sums.append(total)
        effects.append(score(image) - score(changed))
    return pearson(sums, effects)


def infidelity(score, image, m, perturbations, factors=None, optimal_scaling=False):
    """factors: what the map is multiplied with; default: the perturbations themselves."""
    predicted = [float((f * m).sum()) for f in (factors or perturbations)]
    effects = [score(image) - score(image - change) for change in perturbations]
    scale = 1.0
    if optimal_scaling:
        scale = sum(c * d for c, d in zip(predicted, effects, strict=True)) / sum(c * c for c in predicted)
    return sum((scale * c - d) ** 2 for c, d in zip(predicted, effects, strict=True)) / len(effects)


def max_sensitivity(m, others):
    return max(math.sqrt(((other - m) ** 2).sum()) for other in others) / math.sqrt((m**2).sum())


def specificity(a, b, share=0.05):
    sizes_a, sizes_b = ([abs(v) for v in m.sum(0).flatten()] for m in (a, b))
    if not any(sizes_a):
        return math.nan
    if not any(sizes_b):
        return 1.0
    counts = [sum(1 for v in sizes if v) for sizes in (sizes_a, sizes_b)]
    k = min(max(round(share * len(sizes_a)), 1), *counts)
    top_a, top_b = (
        set(sorted(range(len(sizes)), key=lambda i: -sizes[i])[:k]) for sizes in (sizes_a, sizes_b)
    )
    return 1 - len(top_a & top_b) / k


def grid_pointing(m, shape, cell):
    rows, columns = shape
    _, height, width = m.shape
    asked = total = 0.0
    for y in range(height):
        for x in range(width):
            value = max(sum(m[:, y, x]), 0.0)
            row = max(i for i in range(rows) if y >= round(i * height / rows))
            column = max(j for j in range(columns) if x >= round(j * width / columns))
            total += value
            asked += value if row * columns + column == cell else 0.0
    return asked / total if total else 0.0


def cut_to_gini(m, wanted):
    """Tries every threshold, from the lowest."""
    cut = m
    for limit in sorted({-1.0, *np.abs(m).flatten()}):
        if limit == np.abs(m).max():
            break
        cut = np.where(np.abs(m) > limit, m, 0)
        if gini(cut) >= wanted:
            break
    return cut


def holm(p):
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        corrected[i] = largest
    return corrected
