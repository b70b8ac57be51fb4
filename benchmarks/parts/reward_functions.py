"""Reward functions that are measured: one that waits as long as the trace says, and one that does next to nothing."""

from __future__ import annotations

import time

from rollart.rewards import TrajectoryView

__all__ = ["instant", "waits"]


def waits(trajectory: TrajectoryView) -> float:
    """Take the seconds that the trace says, without a core: so two cores can hold many instances."""
    time.sleep(trajectory.environment.reward)
    return trajectory.environment.reward


def instant(trajectory: TrajectoryView) -> float:
    """Nothing but the call itself."""
    return float(trajectory.id)
