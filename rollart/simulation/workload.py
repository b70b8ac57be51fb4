"""What episodes of a task are like: how many turns, how long its texts, how slow and how unreliable its environment.

A ``Family`` is a set of distributions; an ``Episode`` is one draw of them, fixed by the task instance's seed
and the session's name, so that a run repeats exactly.  Figures and their sources: docs/simulation-models.md.
"""

from __future__ import annotations

import math
import random

import msgspec

__all__ = ["FAMILIES", "Distribution", "Episode", "Family"]


class Distribution(msgspec.Struct, frozen=True):
    """A positive number: log-normal, or normal, cut to [low, high]; with ``second``, a mixture of two."""

    median: float
    sigma: float = 0.0
    """Of the logarithm; 0: always the median."""
    deviation: float = 0.0
    """Standard deviation of a normal distribution, instead of ``sigma``."""
    low: float = 0.0
    high: float = math.inf
    second: Distribution | None = None
    second_share: float = 0.0

    def draw(self, rng: random.Random) -> float:
        """One number."""
        if self.second is not None and rng.random() < self.second_share:
            return self.second.draw(rng)
        if self.deviation:
            value = rng.gauss(self.median, self.deviation)
        else:
            value = self.median * math.exp(rng.gauss(0.0, self.sigma)) if self.sigma else self.median
        return min(max(value, self.low), self.high)

    def draw_int(self, rng: random.Random) -> int:
        """One number, rounded, at least 1."""
        return max(1, round(self.draw(rng)))


class Family(msgspec.Struct, frozen=True):
    """A kind of task.  Times in seconds, lengths in tokens."""

    turns: Distribution
    prompt_tokens: Distribution
    """Of the first observation."""
    observation_tokens: Distribution
    """Of each later one."""
    answer_tokens: Distribution
    """A turn's."""
    reset_s: Distribution
    step_s: Distribution
    reward_s: Distribution = Distribution(0.0)
    """Of scoring, after the last step."""
    reset_failure: float = 0.0
    """Share of the resets that fail as infrastructure does."""
    step_failure: float = 0.0
    success: float = 0.5
    """Share of the episodes that succeed, on average over the instances."""
    turns_shared: float = 1.0
    """Share of the episodes that take as many turns as their instance gives; the others draw their own number."""


class Episode:
    """One session's draw."""

    __slots__ = ("_rng", "family", "steps", "success", "task", "turns")

    def __init__(self, task: str, family: Family, seed: int, session: str) -> None:
        self.task = task
        self.family = family
        instance = random.Random(f"{seed}")
        # Members of a group share the instance, and with it most of its length and difficulty.
        self.turns = family.turns.draw_int(instance)
        difficulty = instance.random()
        self._rng = random.Random(f"{seed}/{session}")
        if family.turns_shared < 1 and self._rng.random() >= family.turns_shared:
            self.turns = family.turns.draw_int(self._rng)
        self.success = self._rng.random() < _chance(family.success, difficulty)
        self.steps = 0

    def reset_s(self) -> float:
        """Seconds of the reset."""
        return self.family.reset_s.draw(self._rng)

    def step_s(self) -> float:
        """Seconds of the next step."""
        return self.family.step_s.draw(self._rng)

    def fails(self, rate: float) -> bool:
        """Whether the next request fails."""
        return rate > 0 and self._rng.random() < rate

    def observation(self) -> int:
        """Tokens of the next observation."""
        length = self.family.prompt_tokens if self.steps == 0 else self.family.observation_tokens
        return length.draw_int(self._rng)

    def answer(self) -> int:
        """Tokens of the next answer."""
        return self.family.answer_tokens.draw_int(self._rng)

    @property
    def done(self) -> bool:
        """The step just taken was the last."""
        return self.steps >= self.turns


def _chance(mean: float, difficulty: float) -> float:
    """A success rate for an instance of ``difficulty`` in [0, 1), ``mean`` on average over difficulties."""
    width = min(mean, 1 - mean)
    return mean + width * (1 - 2 * difficulty)


_SHORT = Distribution(0.02, 1.0, high=1.4)
"""Environment I/O per call: mean 0.02 s, at most 1.4 s (the paper)."""

FAMILIES: dict[str, Family] = {
    "SWE-bench": Family(
        turns=Distribution(30, 0.5, low=5, high=100),
        prompt_tokens=Distribution(3000, 0.5, high=8000),
        observation_tokens=Distribution(350, 0.9, high=4000),
        answer_tokens=Distribution(150, 0.7, high=1500),
        # One reset in about 1,200 takes minutes: with batches of 128 one iteration in 10 meets one (the paper).
        reset_s=Distribution(
            20.0, 0.4, high=120.0, second=Distribution(300.0, 0.3, high=600.0), second_share=0.0008
        ),
        step_s=Distribution(0.5, 1.0, high=60.0),
        reward_s=Distribution(10.0, 0.5, high=60.0),
        success=0.3,
    ),
    "WebShop": Family(
        turns=Distribution(12, 0.5, low=3, high=30),
        prompt_tokens=Distribution(1000, 0.3, high=3000),
        observation_tokens=Distribution(600, 0.6, high=3000),
        answer_tokens=Distribution(60, 0.6, high=400),
        reset_s=Distribution(1.0, 0.8, high=60.0),
        step_s=Distribution(0.2, 1.0, high=10.0),
        success=0.5,
    ),
    "FrozenLake": Family(
        turns=Distribution(12, 0.6, low=2, high=30),
        prompt_tokens=Distribution(600, 0.2, high=1500),
        observation_tokens=Distribution(250, 0.2, high=600),
        answer_tokens=Distribution(60, 0.6, high=400),
        reset_s=Distribution(0.3, 0.8, high=30.0),
        step_s=_SHORT,
        success=0.5,
    ),
    "GEM-math": Family(
        turns=Distribution(2, 0.5, low=1, high=5),
        prompt_tokens=Distribution(250, 0.5, high=1000),
        observation_tokens=Distribution(120, 0.6, high=1000),
        answer_tokens=Distribution(2500, 0.9, low=100, high=16000),
        reset_s=Distribution(0.1, 0.8, high=10.0),
        step_s=Distribution(0.3, 1.0, high=20.0),
        reward_s=Distribution(0.5, 1.0, high=10.0),
        success=0.5,
    ),
    "GEM-game": Family(
        turns=Distribution(4, 0.4, low=1, high=5),
        prompt_tokens=Distribution(400, 0.4, high=1000),
        observation_tokens=Distribution(150, 0.4, high=600),
        answer_tokens=Distribution(1200, 0.8, low=50, high=8000),
        reset_s=Distribution(0.1, 0.8, high=10.0),
        step_s=_SHORT,
        success=0.4,
    ),
}
"""The paper's five families: turns as it gives them, the rest assumed, SWE-bench so that the paper's clean step
comes out (a test)."""


def table() -> str:
    """The families as a Markdown table: medians, and what they are cut to."""
    lines = [
        "| family | turns | first prompt | observation | answer | reset s | step s | reward s | success |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, family in FAMILIES.items():
        drawn = (
            family.turns,
            family.prompt_tokens,
            family.observation_tokens,
            family.answer_tokens,
            family.reset_s,
            family.step_s,
            family.reward_s,
        )
        lines.append(f"| {name} | {' | '.join(map(_short, drawn))} | {family.success:g} |")
    return "\n".join(lines)


def _short(distribution: Distribution) -> str:
    if not distribution.sigma:
        return f"{distribution.median:g}"
    return f"{distribution.median:,g} (σ {distribution.sigma:g}, ≤ {distribution.high:,g})"
