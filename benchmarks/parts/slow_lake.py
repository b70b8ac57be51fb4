"""The demo's lakes, far away: environments as slow and as heavy-tailed as the paper found them, on a smaller scale.

The paper (arXiv 2512.22560) gives turns of N(10 s, 10 s) in its study of environment latency, environment starts that
are 15% of a 365.7 s step, and resets of hundreds of seconds in the tail.  Everything is divided by ``SCALE``.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from rollart.environments import Turn
from rollart.environments.frozen_lake import FrozenLake
from rollart.simulation.workload import Distribution

__all__ = ["RESET_S", "SCALE", "STEP_S", "SlowLake"]

SCALE = 100.0
RESET_S = Distribution(30.0 / SCALE, sigma=1.0, high=600.0 / SCALE)
"""Log-normal: 49 s on average before the division."""
STEP_S = Distribution(10.0 / SCALE, deviation=10.0 / SCALE, low=0.1 / SCALE)

_episodes: Counter[int] = Counter()


class SlowLake(FrozenLake):
    """Waits without computing; the n-th episode of a map waits as long in every run."""

    async def reset(self, seed: int, split: str) -> str:  # type: ignore[override]
        """As of ``Environment``."""
        _episodes[seed] += 1
        self._delays = random.Random(f"{seed}/{_episodes[seed]}")
        await asyncio.sleep(RESET_S.draw(self._delays))
        return super().reset(seed, split)

    async def step(self, action: str) -> Turn:  # type: ignore[override]
        """As of ``Environment``."""
        await asyncio.sleep(STEP_S.draw(self._delays))
        return super().step(action)
