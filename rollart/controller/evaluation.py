"""Evaluation: greedy episodes on the held-out split, all with one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollart.config import Task
from rollart.controller import events
from rollart.controller.run_context import RunContext
from rollart.controller.trajectory import State, Trajectory
from rollart.errors import RunError

__all__ = ["Evaluation"]


class Evaluation:
    """Runs a fixed set of episodes: the same instances each time."""

    def __init__(
        self,
        tasks: Sequence[Task],
        episodes: int,
        *,
        start: Callable[[str, int], Trajectory],
        run: RunContext,
    ) -> None:
        """``start(task, seed)`` dispatches an evaluation trajectory."""
        self._tasks = tasks
        self._episodes = episodes
        self._start = start
        self._run = run
        self._waiting: set[int] = set()
        self._all_ended: asyncio.Future[None] | None = None

    def waiting_for(self) -> str:
        """What the running evaluation waits for, in one line."""
        return f"{len(self._waiting)} of {self._episodes} episodes left"

    async def run(self, step: int) -> events.Evaluated:
        """The result of all episodes; ``RunError`` when not one of them finished."""
        self._all_ended = asyncio.get_running_loop().create_future()
        started = [self._start(self._tasks[i % len(self._tasks)].name, i) for i in range(self._episodes)]
        self._waiting = {t.id for t in started if t.state not in (State.SCORED, State.FAILED)}
        if self._waiting:
            await self._all_ended
        scored = [t for t in started if t.state is State.SCORED]
        if not scored:
            raise RunError(f"all {len(started)} evaluation episodes failed; the last: {started[-1].detail}")
        for trajectory in scored:
            trajectory.move(State.CONSUMED)
        success = [t.success if t.success is not None else float(t.score >= 1) for t in scored]
        return events.Evaluated(
            self._run.clock(),
            step,
            max(t.newest for t in scored),
            len(scored),
            len(started) - len(scored),
            sum(success) / len(scored),
            sum(t.score for t in scored) / len(scored),
            self._by_task(scored, success) if len(self._tasks) > 1 else {},
        )

    def _by_task(self, scored: Sequence[Trajectory], success: Sequence[float]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for trajectory, value in zip(scored, success, strict=True):
            found.setdefault(trajectory.task, []).append(value)
        return {task: sum(values) / len(values) for task, values in sorted(found.items())}

    def settled(self, trajectory: Trajectory) -> None:
        """One of the episodes is SCORED or FAILED."""
        self._waiting.discard(trajectory.id)
        if not self._waiting and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)
