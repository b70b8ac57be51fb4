"""Numbers from observations: least squares with coefficients of at least 0, samples as quantiles, turns with censoring.

Every number keeps how many observations it comes from and its standard error.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rollart.protocol import VersionRun
from rollart.simulation.workload import Distribution

__all__ = [
    "Empirical",
    "Measured",
    "Sample",
    "fit",
    "mean",
    "mean_of",
    "padded_tokens",
    "sample_of",
    "scored_lengths",
    "shared_share",
    "trained_tokens",
    "turns_of",
]

POINTS = 51
"""Quantiles that are kept of a sample."""


class Measured(msgspec.Struct, frozen=True):
    """A number that was measured."""

    value: float
    error: float
    """Its standard error, in the same unit."""
    observations: int


class Sample(msgspec.Struct, frozen=True):
    """A distribution that was measured."""

    mean: float
    error: float
    """Of the mean: its standard error."""
    observations: int
    quantiles: list[float]
    """Evenly spaced, from the least to the greatest."""

    def distribution(self) -> Distribution:
        """To draw from."""
        middle = self.quantiles[len(self.quantiles) // 2]
        return Empirical(middle, quantiles=tuple(self.quantiles))


class Empirical(Distribution, frozen=True):
    """Draws what was observed, in between linearly."""

    quantiles: tuple[float, ...] = (0.0,)

    def draw(self, rng: random.Random) -> float:
        """One number."""
        at = rng.random() * (len(self.quantiles) - 1)
        low = int(at)
        high = min(low + 1, len(self.quantiles) - 1)
        return self.quantiles[low] + (at - low) * (self.quantiles[high] - self.quantiles[low])


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return statistics.fmean(values) if values else 0.0


def mean_of(values: Sequence[float], missing: float = 0.0) -> Measured:
    """The mean; ``missing`` where there are none."""
    if not values:
        return Measured(missing, 0.0, 0)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Measured(_round(statistics.fmean(values)), _round(error), len(values))


def sample_of(values: Sequence[float]) -> Sample:
    """The distribution of ``values``; always 0 where there are none."""
    mean, ordered = mean_of(values), sorted(values) or [0.0]
    quantiles = [_round(ordered[round(point * (len(ordered) - 1) / (POINTS - 1))]) for point in range(POINTS)]
    return Sample(mean.value, mean.error, mean.observations, quantiles)


def turns_of(episodes: Sequence[tuple[int, bool]]) -> Sample:
    """The distribution of turns, by Kaplan and Meier: of episodes that were cut short, (turns, False), only
    that they had more turns is known.  Leaving them out would lean to short ones."""
    at_risk = len(episodes)
    ended = Counter(turns for turns, whole in episodes if whole)
    cut = Counter(turns for turns, whole in episodes if not whole)
    alive, mass = 1.0, {}
    for turns in sorted({*ended, *cut}):
        share = ended[turns] / at_risk
        mass[turns], alive = alive * share, alive * (1 - share)
        at_risk -= ended[turns] + cut[turns]
    if not mass or not sum(mass.values()):
        return sample_of([turns for turns, _ in episodes])
    mass[max(mass)] += alive  # those that outlast every observation
    mean = sum(turns * share for turns, share in mass.items())
    spread = math.sqrt(max(0.0, sum((turns - mean) ** 2 * share for turns, share in mass.items())))
    cumulative = list(itertools.accumulate(mass.values()))
    # In the middle of each of the points' shares: so that rounding what is drawn between two points is no bias.
    quantiles = []
    for point in range(POINTS):
        wanted = (point + 0.5) / POINTS * cumulative[-1]
        quantiles.append(float(next(t for t, c in zip(mass, cumulative, strict=True) if c >= wanted)))
    error = spread / math.sqrt(len(episodes))
    return Sample(_round(mean), _round(error), len(episodes), quantiles)


def padded_tokens(lengths: Sequence[int], micro_batch_sequences: int) -> int:
    """Tokens that the trainer computes for sequences of these lengths: sorted, so many at a time, each as long as
    the longest of its micro-batch."""
    ordered = sorted(lengths)
    parts = [
        ordered[low : low + micro_batch_sequences] for low in range(0, len(ordered), micro_batch_sequences)
    ]
    return sum(len(part) * part[-1] for part in parts)


def scored_lengths(
    lengths: Sequence[int], versions: Sequence[Sequence[VersionRun]], current: int, share: float, step: int
) -> list[int]:
    """The lengths of what a trainer at version ``current`` verifies, each as often as it has versions that are not the
    current one; drawn as the real trainer does."""
    chosen = random.Random(step).sample(range(len(lengths)), math.ceil(share * len(lengths)))
    return [
        lengths[number]
        for number in chosen
        for version in {run.version for run in versions[number]}
        if version != current
    ]


def trained_tokens(lengths: Sequence[int], scored: Sequence[int], micro_batch_sequences: int) -> float:
    """Tokens by what they cost: those that are ``scored``, without a gradient, a third of those that are trained on."""
    trained, read = (padded_tokens(each, micro_batch_sequences) for each in (lengths, scored))
    return trained + read / 3


def shared_share(groups: Sequence[tuple[int, int]]) -> Measured:
    """Of (group, turns): the share of the episodes that take their group's number of turns, if the others draw theirs.

    Two members agree when both take it: the share is the root of their correlation.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    for group, turns in groups:
        members[group].append(turns)
    sizes = [values for values in members.values() if len(values) > 1]
    count = sum(map(len, sizes))
    if len(sizes) < 2:
        return Measured(0.0, 0.0, len(sizes))
    mean = sum(map(sum, sizes)) / count
    size = (count - sum(len(v) ** 2 for v in sizes) / count) / (len(sizes) - 1)
    between = sum(len(v) * (statistics.fmean(v) - mean) ** 2 for v in sizes) / (len(sizes) - 1)
    within = sum((x - statistics.fmean(v)) ** 2 for v in sizes for x in v) / (count - len(sizes))
    total = between + (size - 1) * within
    alike = min(1.0, max(0.0, (between - within) / total)) if total > 0 else 1.0
    # Fisher's approximation of the correlation's standard error, and the root's slope.
    error = (1 - alike) * (1 + (size - 1) * alike) * math.sqrt(2 / (size * (size - 1) * (len(sizes) - 1)))
    share = math.sqrt(alike)
    return Measured(_round(share), _round(error / (2 * max(share, 0.1))), len(sizes))


def fit(
    rows: Sequence[Sequence[float]], targets: Sequence[float], *, small: Mapping[int, float] | None = None
) -> tuple[list[Measured], float]:
    """Coefficients of at least 0 for the columns of ``rows``, by least squares, and the relative error of one target.

    Each target counts relative to its size, so that few long ones don't decide alone.  A column that would need
    a coefficient below 0 gets 0.  ``small`` says of a column what share of the mean target its part is thought to be
    at most, one standard deviation: where the targets themselves say little of it, it stays near 0.
    """
    width = len(rows[0]) if rows else 0
    kept = [(row, y) for row, y in zip(rows, targets, strict=True) if y > 0]
    if not kept:
        return [Measured(0.0, 0.0, 0)] * width, 0.0
    mean = statistics.fmean(y for _, y in kept)
    weighted = [([x / math.sqrt(y * mean) for x in row], math.sqrt(y / mean)) for row, y in kept]
    moments = [[sum(row[a] * row[b] for row, _ in weighted) for b in range(width)] for a in range(width)]
    products = [sum(row[a] * y for row, y in weighted) for a in range(width)]
    square = sum(y * y for _, y in weighted)
    left, coefficients, variances = _least(moments, products, square)
    noise = max(0.0, left) / max(1, len(kept) - width)
    if small:
        for column, share in small.items():
            moments[column][column] += noise / (share * mean) ** 2
        left, coefficients, variances = _least(moments, products, square)
    measured = [
        Measured(_round(value), _round(math.sqrt(max(0.0, variance) * noise)), len(kept))
        for value, variance in zip(coefficients, variances, strict=True)
    ]
    return measured, _round(math.sqrt(max(0.0, left) / len(kept)))


def _least(
    moments: list[list[float]], products: list[float], square: float
) -> tuple[float, list[float], list[float]]:
    """What is left of ``square``, the coefficients, and their variances by the unit of noise."""
    width = len(products)
    best: tuple[float, list[float], list[float]] = (square, [0.0] * width, [0.0] * width)
    for count in range(1, width + 1):
        for columns in itertools.combinations(range(width), count):
            inverse = _inverse([[moments[a][b] for b in columns] for a in columns])
            if inverse is None:
                continue
            found = [sum(inverse[i][j] * products[b] for j, b in enumerate(columns)) for i in range(count)]
            left = square - sum(found[i] * products[a] for i, a in enumerate(columns))
            if min(found) >= 0 and left < best[0] - 1e-12 * square:
                coefficients, variances = [0.0] * width, [0.0] * width
                for i, a in enumerate(columns):
                    coefficients[a], variances[a] = found[i], inverse[i][i]
                best = (left, coefficients, variances)
    return best


def _inverse(matrix: list[list[float]]) -> list[list[float]] | None:
    """By Gauss and Jordan; None: the columns say the same."""
    size = len(matrix)
    scale = [math.sqrt(matrix[i][i]) or 1.0 for i in range(size)]
    work = [
        [matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [float(i == j) for j in range(size)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(work[row][column]))
        if abs(work[pivot][column]) < 1e-9:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        head = work[column][column]
        work[column] = [value / head for value in work[column]]
        for row in range(size):
            if row != column:
                factor = work[row][column]
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [[work[i][size + j] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]


def _round(value: float) -> float:
    """To six digits: what a person reads, and what the same run gives everywhere."""
    return float(f"{value:.6g}")
