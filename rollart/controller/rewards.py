"""RewardClient: the score of a finished trajectory, by its environment or by the reward functions of its task.

A trajectory without a score is never given one in silence: what fails follows the task's ``on_failure`` and is
counted.  Whoever stops waiting (an abort cancels a trajectory's owner) cancels the call.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from rollart.config import Config
from rollart.config.rewards import OnFailure, Reward, Scope
from rollart.controller.reward_batches import Batches
from rollart.controller.reward_calls import Backend, Caller, CallError, FailureKind, Stats
from rollart.controller.reward_groups import GroupCalls, Members
from rollart.controller.reward_views import view_of
from rollart.controller.trajectory import Kind, Reason, Trajectory
from rollart.errors import RunError
from rollart.packing import pack_floats
from rollart.rewards.payload import Request, Result, WrongScore, checked
from rollart.rewards.view import TrajectoryView

__all__ = ["OwnRewards", "RewardClient", "RewardError", "Rewards"]

Row = dict[str, float | int | str | None]


class RewardError(Exception):
    """A trajectory has no score, and why."""

    def __init__(self, message: str, reason: Reason = Reason.REWARD_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Rewards(Protocol):
    """Whatever scores trajectories."""

    async def score(self, trajectory: Trajectory) -> float:
        """A finite score; ``RewardError`` when there is none.  To cancel it stops what it waits for."""

    def reads(self, task: str) -> bool:
        """Whether trajectories of ``task`` are scored by what was said in them."""

    def attach(self, members: Members) -> None:
        """Before the first trajectory: how to find the other members of a group."""

    def changed(self, group: int) -> None:
        """A member of ``group`` ended: those that wait for it need not."""

    def take_row(self) -> Row:
        """What was measured since the last call."""

    async def close(self) -> None:
        """The run is over, and nobody waits for a score any more."""


class OwnRewards:
    """Scores by the environment's own rewards: their sum over the steps."""

    async def score(self, trajectory: Trajectory) -> float:
        """A finite score; ``RewardError`` when the environment's rewards don't give one."""
        if not math.isfinite(trajectory.reward):
            raise RewardError(f"the environment's rewards sum to {trajectory.reward}, which is no score")
        return trajectory.reward

    def reads(self, task: str) -> bool:
        """Numbers are enough."""
        return False

    def attach(self, members: Members) -> None:
        """Each is scored by itself."""

    def changed(self, group: int) -> None:
        """Nobody waits for anybody."""

    def take_row(self) -> Row:
        """Nothing of its own."""
        return {}

    async def close(self) -> None:
        """Holds nothing."""


class RewardClient(OwnRewards):
    """Scores by the tasks' reward functions, and where a task has none by the environment's rewards."""

    def __init__(
        self,
        config: Config,
        backend: Callable[[Reward], Backend],
        *,
        run_id: str,
        bug: Callable[[BaseException], None],
    ) -> None:
        """``backend`` makes the way to a function; ``run_id`` makes the keys of calls unique; ``bug`` ends the run."""
        self._stats = {task.name: Stats() for task in config.tasks if task.rewards}
        rng = random.Random(f"rewards {config.seed}")
        self._parts: dict[str, list[_Part]] = {
            task.name: [
                _Part(
                    task.name,
                    number,
                    reward,
                    Caller(reward, backend(reward), rng, self._stats[task.name]),
                    run_id,
                    bug,
                )
                for number, reward in enumerate(task.rewards)
            ]
            for task in config.tasks
            if task.rewards
        }

    def reads(self, task: str) -> bool:
        """Whether ``task`` has reward functions."""
        return task in self._parts

    def attach(self, members: Members) -> None:
        """As of ``Rewards``."""
        for part in self._all_parts():
            part.attach(members)

    def changed(self, group: int) -> None:
        """As of ``Rewards``."""
        for part in self._all_parts():
            part.changed(group)

    async def score(self, trajectory: Trajectory) -> float:
        """A finite score; ``RewardError`` when the functions give none and the task drops what has none."""
        parts = self._parts.get(trajectory.task)
        if parts is None:
            return await super().score(trajectory)
        stats, loop = self._stats[trajectory.task], asyncio.get_running_loop()
        started = loop.time()
        try:
            results = await _all([part.score(trajectory) for part in parts])
        except RewardError:
            stats.counts["dropped"] += 1
            raise
        finally:
            stats.latencies_s.append(loop.time() - started)
        score = math.fsum(
            part.reward.weight * (result.score or 0.0) for part, result in zip(parts, results, strict=True)
        )
        if not math.isfinite(score):
            raise RewardError(
                f"the weighted scores of task {trajectory.task} sum to {score}, which is no score"
            )
        self._note(trajectory, parts, results)
        stats.counts["scored"] += 1
        return score

    def _note(self, trajectory: Trajectory, parts: Sequence[_Part], results: Sequence[Result]) -> None:
        """What a structured score says beside the score itself."""
        stats = self._stats[trajectory.task]
        turns: list[float] | None = None
        for part, result in zip(parts, results, strict=True):
            if len(parts) > 1:
                stats.add_part(part.reward.name, result.score or 0.0)
            for name, value in result.parts.items():
                stats.add_part(name, value)
            if result.success is not None:
                trajectory.success = result.success
            if result.turns is not None:
                turns = turns or [0.0] * len(result.turns)
                turns = [a + part.reward.weight * b for a, b in zip(turns, result.turns, strict=True)]
        # What the environment gave for its turns is no part of this score, unless a function says so.
        trajectory.turn_rewards = pack_floats(turns) if turns else b""

    def take_row(self) -> Row:
        """Of each task with reward functions: calls, failures by kind, latency, cold starts (docs/metrics.md)."""
        row: Row = {}
        for task, stats in self._stats.items():
            head = f"reward/{task}/"
            row.update(
                (f"{head}{name}", stats.counts[name]) for name in sorted(stats.counts) if stats.counts[name]
            )
            if stats.latencies_s:
                latencies = sorted(stats.latencies_s)
                row[f"{head}latency_mean_seconds"] = round(sum(latencies) / len(latencies), 6)
                row[f"{head}latency_p99_seconds"] = round(latencies[int(0.99 * (len(latencies) - 1))], 6)
            if stats.busy_s:
                row[f"{head}busy_seconds"] = round(stats.busy_s, 6)
            row.update(
                (f"{head}part/{name}_mean", round(sum(values) / len(values), 6))
                for name, values in sorted(stats.parts.items())
            )
            stats.counts.clear()
            stats.latencies_s.clear()
            stats.parts.clear()
            stats.busy_s = 0.0
        return row

    async def close(self) -> None:
        """End what still goes on, and let go of the backends."""
        for part in self._all_parts():
            await part.close()

    def _all_parts(self) -> list[_Part]:
        return [part for parts in self._parts.values() for part in parts]


class _Part:
    """One reward function of one task."""

    def __init__(
        self,
        task: str,
        number: int,
        reward: Reward,
        caller: Caller,
        run_id: str,
        bug: Callable[[BaseException], None],
    ) -> None:
        self.reward = reward
        self._task = task
        self._head = f"{run_id}-{task}-{number}"
        self._caller = caller
        self._stats = caller.stats
        self._bug = bug
        self._failures = 0
        self._stopped = False
        self._groups = GroupCalls(self._call) if reward.scope is Scope.GROUP else None
        self._batches = Batches(self._call, reward.batch) if (reward.batch or 1) > 1 else None

    def attach(self, members: Members) -> None:
        if self._groups is not None:
            self._groups.attach(members)

    def changed(self, group: int) -> None:
        if self._groups is not None:
            self._groups.changed(group)

    async def score(self, trajectory: Trajectory) -> Result:
        """A result with a score; ``RewardError`` when there is none and the task drops what has none."""
        try:
            view = view_of(trajectory, ids=self.reward.send_ids)
            if self._groups is not None and trajectory.kind is Kind.TRAIN:
                result = await self._groups.score(trajectory, lambda t: view_of(t, ids=self.reward.send_ids))
            elif self._batches is not None:
                result = await self._batches.score(trajectory.session, view)
            else:
                (result,) = await self._call(trajectory.session, [view])
            result = self._checked(result, view)
        except CallError as error:
            return self._failed(error)
        self._failures = 0
        return result

    def _checked(self, result: Result, view: TrajectoryView) -> Result:
        if result.error:
            self._stats.counts[f"failed_{FailureKind.ERROR}"] += 1
            raise CallError(FailureKind.ERROR, result.error)
        try:
            return checked(result, view)
        except WrongScore as error:
            self._stats.counts[f"failed_{FailureKind.REFUSED}"] += 1
            raise CallError(FailureKind.REFUSED, f"the answer {error}") from None

    def _failed(self, error: CallError) -> Result:
        """What the task's policy makes of a failure."""
        said = f"reward {self.reward.name} of task {self._task}: {error}"
        self._failures += 1
        if self._failures >= self.reward.max_failures and not self._stopped:
            self._stopped = True
            self._bug(RunError(f"{self._failures} rewards in a row failed. The last: {said}"))
        if self.reward.on_failure is OnFailure.VALUE:
            self._stats.counts["values"] += 1
            return Result(score=self.reward.value)
        timed_out = error.kind is FailureKind.TIMEOUT
        raise RewardError(said, Reason.REWARD_TIMEOUT if timed_out else Reason.REWARD_ERROR)

    async def _call(self, name: str, views: Sequence[TrajectoryView]) -> list[Result]:
        """The results of one call."""
        reply = await self._caller.call(
            Request(
                key=f"{self._head}-{name}",
                function=self.reward.function or "",
                scope=(self.reward.scope or Scope.TRAJECTORY).value,
                deadline_s=self._caller.timeout_s,
                options=self.reward.options,
                trajectories=list(views),
            )
        )
        if len(reply.results) != len(views):
            self._stats.counts[f"failed_{FailureKind.REFUSED}"] += 1
            raise CallError(
                FailureKind.REFUSED,
                f"the answer has {len(reply.results)} results for {len(views)} trajectories",
            )
        return reply.results

    async def close(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        if self._batches is not None:
            await self._batches.close()
        await self._caller.close()


async def _all(scores: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """All results; the first failure, or a cancellation, ends the others."""
    if len(scores) == 1:
        return [await scores[0]]
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(score, name="reward part") for score in scores]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in tasks if task.done() and task.exception() is not None), None)
        if failed is not None:
            failed.result()
        return [task.result() for task in tasks]
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # it is looked at, whatever becomes of it
