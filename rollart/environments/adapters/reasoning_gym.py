"""Tasks of ``reasoning-gym``: ``environment: rollart.environments.adapters.reasoning_gym:ReasoningGym``.

A question, one answer, scored by the dataset's own ``score_answer``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["ReasoningGym"]

HOW = "\nWrite your answer between <answer> and </answer>.\n"


class ReasoningGym(Environment):
    """``dataset`` is a name in reasoning-gym's register, ``config`` its settings, ``how`` stands after the question."""

    def __init__(self, dataset: str, config: Mapping[str, Any] | None = None, how: str = HOW) -> None:
        self._name = dataset
        self._config = dict(config or {})
        self._how = how
        self._dataset = self._made(0)
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int, split: str) -> str:
        """Draw the question that ``seed`` and ``split`` name."""
        return f"{draw(self._candidate, random.Random(seed), split)}{self._how}"

    def step(self, action: str) -> Turn:
        """Score the answer: what is between the tags, or all of it where there are none."""
        said = extract_answer(action) or action.strip()
        score = float(self._dataset.score_answer(answer=said, entry=self._entry))
        return Turn(reward=score, done=True, info={"success": float(score >= 1)})

    def _candidate(self, rng: random.Random) -> str:
        self._dataset = self._made(rng.getrandbits(31))
        self._entry = self._dataset[0]
        return str(self._entry["question"])

    def _made(self, seed: int) -> Any:
        return reasoning_gym.create_dataset(self._name, seed=seed, size=1, **self._config)
