"""An environment with a heavy tail: 5% of its steps take 50 times as long, and 2% of them crash.

It waits without computing.  The n-th episode of an instance has the same delays and crashes in every run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from rollart.environments import Environment, Turn, Unavailable

__all__ = ["CRASHING", "DELAYED", "STEP_S", "TIMES", "TURNS", "Stragglers"]

STEP_S = 0.02
TIMES = 50
DELAYED = 0.05
CRASHING = 0.02
TURNS = 8

_episodes: Counter[int] = Counter()


class Stragglers(Environment):
    """``TURNS`` turns, and a reward by chance."""

    async def reset(self, seed: int, split: str) -> str:  # type: ignore[override]
        """As of ``Environment``."""
        _episodes[seed] += 1
        self._random = random.Random(f"{seed}/{_episodes[seed]}")
        self._left = TURNS
        return "go "

    async def step(self, action: str) -> Turn:  # type: ignore[override]
        """As of ``Environment``."""
        await asyncio.sleep(STEP_S * (TIMES if self._random.random() < DELAYED else 1))
        if self._random.random() < CRASHING:
            raise Unavailable("the sandbox died")
        self._left -= 1
        return Turn("on ", self._random.random(), done=not self._left)
