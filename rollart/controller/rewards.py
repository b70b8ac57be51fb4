"""RewardClient: the score of a finished trajectory."""

from __future__ import annotations

import math
from typing import Protocol

from rollart.controller.trajectory import Trajectory

__all__ = ["RewardClient", "RewardError", "Rewards"]


class RewardError(Exception):
    """No usable score."""


class Rewards(Protocol):
    """Where scores come from."""

    async def score(self, trajectory: Trajectory) -> float:
        """A finite score; ``RewardError`` when there is none."""


class RewardClient:
    """Scores by the environment's own rewards: their sum over the steps."""

    async def score(self, trajectory: Trajectory) -> float:
        """A finite score; ``RewardError`` when the environment's rewards don't give one."""
        if not math.isfinite(trajectory.reward):
            raise RewardError(f"the environment's rewards sum to {trajectory.reward}, which is no score")
        return trajectory.reward
