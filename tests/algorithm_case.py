"""The algorithms once more, a trajectory and a token at a time in plain Python numbers, to test the real ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollart.config import Algorithm


class Turn(NamedTuple):
    """One answer of the policy."""

    tokens: int
    reward: float
    seen: str
    """The observation before it."""


Attempt = list[Turn]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values)


def normalized(value: float, among: Sequence[float]) -> float:
    if len(set(among)) == 1:
        return 0.0
    mean, deviation = mean_and_deviation(among)
    return (value - mean) / (deviation + 1e-4)


def grpo(group: Sequence[Attempt]) -> list[list[float]]:
    rewards = [sum(turn.reward for turn in attempt) for attempt in group]
    return per_token(group, lambda i, k: normalized(rewards[i], rewards))


def dr_grpo(group: Sequence[Attempt]) -> list[list[float]]:
    rewards = [sum(turn.reward for turn in attempt) for attempt in group]
    return per_token(group, lambda i, k: rewards[i] - statistics.fmean(rewards))


def rloo(group: Sequence[Attempt]) -> list[list[float]]:
    rewards = [sum(turn.reward for turn in attempt) for attempt in group]
    others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
    return per_token(group, lambda i, k: rewards[i] - statistics.fmean(others[i]))


def reinforce_plus_plus(group: Sequence[Attempt], discount: float = 1.0) -> list[list[float]]:
    """One group is the whole batch here."""
    returns = per_token(group, lambda i, k: return_from(group[i], k, discount))
    every = [value for attempt in returns for value in attempt]
    return [[normalized(value, every) for value in attempt] for attempt in returns]


def reinforce_plus_plus_baseline(group: Sequence[Attempt]) -> list[list[float]]:
    centred = dr_grpo(group)
    every = [value for attempt in centred for value in attempt]
    return [[normalized(value, every) for value in attempt] for attempt in centred]


def gigpo(group: Sequence[Attempt], discount: float, omega: float) -> list[list[float]]:
    rewards = [sum(turn.reward for turn in attempt) for attempt in group]

    def step(i: int, k: int) -> float:
        alike = [
            return_from(attempt, number, discount)
            for attempt in group
            for number, turn in enumerate(attempt)
            if turn.seen == group[i][k].seen
        ]
        return normalized(return_from(group[i], k, discount), alike) if len(alike) > 1 else 0.0

    return per_token(group, lambda i, k: normalized(rewards[i], rewards) + omega * step(i, k))


def return_from(attempt: Attempt, turn: int, discount: float) -> float:
    return sum(discount ** (later - turn) * attempt[later].reward for later in range(turn, len(attempt)))


def per_token(group: Sequence[Attempt], advantage: Callable[[int, int], float]) -> list[list[float]]:
    return [
        [advantage(i, k) for k, turn in enumerate(attempt) for _ in range(turn.tokens)]
        for i, attempt in enumerate(group)
    ]


# --- losses ------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """A sampled token; ``now`` is the log-probability of the policy that is trained."""

    now: float
    engine: float
    proximal: float
    advantage: float


def losses_and_slopes(sequence: Sequence[Token], algorithm: Algorithm) -> list[tuple[float, float]]:
    """The loss of each token, and its derivative by the token's own log-probability."""
    old = [t.proximal if algorithm.denominator == "proximal" else t.engine for t in sequence]
    whole = sum(t.now - o for t, o in zip(sequence, old, strict=True))
    found = []
    for token, denominator in zip(sequence, old, strict=True):
        weight = correction(token, algorithm)
        ratio, a = math.exp(token.now - denominator), token.advantage
        match algorithm.loss:
            case "ppo":
                loss, slope = clipped(ratio, a, algorithm)
            case "gspo":
                loss, slope = clipped(math.exp(whole / len(sequence)), a, algorithm)
            case "cispo":
                low, high = algorithm.clip
                held = min(max(ratio, 1 - low), 1 + high)
                loss, slope = -held * a * token.now, -held * a
            case "topr":
                taper = 1.0 if a >= 0 else min(math.exp(whole), algorithm.topr_high or 1.0)
                loss, slope = -taper * a * token.now, -taper * a
            case _:
                loss, slope = -a * token.now, -a
        found.append((weight * loss, weight * slope))
    return found


def clipped(ratio: float, a: float, algorithm: Algorithm) -> tuple[float, float]:
    low, high = algorithm.clip
    held = min(max(ratio, 1 - low), 1 + high)
    loss, slope = -min(ratio * a, held * a), -ratio * a if ratio * a <= held * a else 0.0
    if algorithm.dual_clip and a < 0 and loss > -algorithm.dual_clip * a:
        return -algorithm.dual_clip * a, 0.0
    return loss, slope


def correction(token: Token, algorithm: Algorithm) -> float:
    ratio = math.exp(token.proximal - token.engine)
    low, high = algorithm.bounds
    match algorithm.correction:
        case "importance":
            return ratio
        case "truncate":
            return min(ratio, high)
        case "mask":
            return ratio if low <= ratio <= high else 0.0
    return 1.0
