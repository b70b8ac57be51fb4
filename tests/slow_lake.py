"""The demo's lakes, with environments that are slow: what a planner is tried on."""

from __future__ import annotations

import time

from rollart.environments import Turn
from rollart.environments.frozen_lake import FrozenLake

SECONDS = 0.1
"""That a reset and a step wait, without computing."""


class SlowLake(FrozenLake):
    """A lake far away."""

    def reset(self, seed: int, split: str) -> str:
        """As of ``Environment``."""
        time.sleep(SECONDS)
        return super().reset(seed, split)

    def step(self, action: str) -> Turn:
        """As of ``Environment``."""
        time.sleep(SECONDS)
        return super().step(action)
