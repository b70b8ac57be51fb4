"""When a trajectory may take its next step: at its own pace, or in step with all others.

``LockStep`` is how batch-level systems roll out; it is there to be compared with.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollart.controller.trajectory import Kind, Next, Trajectory

__all__ = ["LockStep", "OwnPace", "Pace"]

ORDER = (Next.RESET, Next.GENERATE, Next.STEP, Next.SCORE)


class Pace(Protocol):
    """Asked before each step of each trajectory."""

    def enter(self, trajectory: Trajectory) -> None:
        """The trajectory has an owner from now on."""

    async def before(self, trajectory: Trajectory, todo: Next) -> None:
        """Wait until the trajectory may do ``todo``."""

    def leave(self, id: int) -> None:
        """The trajectory of that id has none any more; may be told twice."""


class OwnPace:
    """Nobody waits for anybody."""

    def enter(self, trajectory: Trajectory) -> None:
        """Nothing to know."""

    async def before(self, trajectory: Trajectory, todo: Next) -> None:
        """At once."""

    def leave(self, id: int) -> None:
        """Nothing to know."""


class LockStep:
    """All training trajectories do the same at the same time; evaluations go at their own pace.

    When each has finished its last step, those that are furthest behind (reset before generate before step before
    score) take the next one together.  So all are scored when the last has ended.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Next, asyncio.Future[None]] | None] = {}
        """What each wants to do; ``None`` while it does it."""

    def enter(self, trajectory: Trajectory) -> None:
        """The others wait for it from now on."""
        if trajectory.kind is Kind.TRAIN:
            self._waiting[trajectory.id] = None

    async def before(self, trajectory: Trajectory, todo: Next) -> None:
        """Wait for the others."""
        if trajectory.kind is not Kind.TRAIN:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[trajectory.id] = (todo, turn)
        self._go_on()
        await turn

    def leave(self, id: int) -> None:
        """The others don't wait for it any more."""
        if id in self._waiting:
            del self._waiting[id]
            self._go_on()

    def _go_on(self) -> None:
        wanted = [entry for entry in self._waiting.values() if entry is not None]
        if not wanted or len(wanted) < len(self._waiting):
            return
        first = min((todo for todo, _ in wanted), key=ORDER.index)
        for id, entry in self._waiting.items():
            if entry is not None and entry[0] is first:
                self._waiting[id] = None
                if not entry[1].done():
                    entry[1].set_result(None)
