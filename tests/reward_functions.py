"""Reward functions that tests name by their import path."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rollart import register_serverless
from rollart.rewards import Score, TrajectoryView, Unavailable


def turns(trajectory: TrajectoryView, *, bonus: float = 0.0) -> Score:
    """A reward of 1 a turn."""
    assert trajectory.environment.reference == f"seed {trajectory.seed}"
    assert all(turn.observation in ("567", "89") and turn.answer for turn in trajectory.turns)
    return Score(turns=[1.0 + bonus] * len(trajectory.turns), success=1.0)


def last(trajectory: TrajectoryView) -> float:
    return float(trajectory.turns[-1].reward)


def group_size(trajectories: Sequence[TrajectoryView]) -> list[float]:
    """How many members each saw."""
    assert len({(t.group, t.seed) for t in trajectories}) == 1
    return [float(len(trajectories))] * len(trajectories)


def broken(trajectory: TrajectoryView) -> float:
    raise LookupError("no such rubric")


def unavailable(trajectory: TrajectoryView) -> float:
    raise Unavailable("the judge is down")


def not_a_number(trajectory: TrajectoryView) -> float:
    return float("nan")


async def sleeps(trajectory: TrajectoryView, *, seconds: float = 60.0, marks: str = "") -> float:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if marks:
            (Path(marks) / f"cancelled-{trajectory.id}").touch()
        raise
    return 1.0


def blocks(trajectory: TrajectoryView, *, seconds: float = 60.0) -> float:
    time.sleep(seconds)
    return float(trajectory.id)


def where(trajectory: TrajectoryView) -> Score:
    return Score(score=1.0, parts={"pid": os.getpid()})


def crashes(trajectory: TrajectoryView, *, marks: str) -> float:
    """Ends its process the first time that it sees a trajectory."""
    mark = Path(marks) / str(trajectory.id)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hoards(trajectory: TrajectoryView, *, mib: int) -> float:
    return float(len(bytearray(mib << 20)) > 0)


class Judge:
    """A Reward worker as the paper's: what it holds is loaded once for each instance."""

    def __init__(self) -> None:
        self.born = os.getpid()

    @register_serverless(attribute="grade", serverless_url="local", timeout_s=7.0, memory_mib=512, retries=1)
    def grade(self, trajectory: TrajectoryView) -> float:
        return float(self.born > 0)
