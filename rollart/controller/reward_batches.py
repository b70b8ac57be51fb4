"""One call for several trajectories: each waits for its own result, and the call is cancelled when none waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollart.controller.reward_calls import CallError
from rollart.rewards.payload import Result
from rollart.rewards.view import TrajectoryView

__all__ = ["Batches", "Call", "Joint", "Waiter"]

Call = Callable[[str, Sequence[TrajectoryView]], Awaitable[list[Result]]]
"""(name, views) → a result for each; ``CallError`` when there are none."""
WAIT_S = 0.01
"""For a batch to fill."""


class Waiter:
    """One trajectory that wants a result."""

    __slots__ = ("future", "name", "view")

    def __init__(self, name: str, view: TrajectoryView) -> None:
        self.name = name
        self.view = view
        self.future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()


class Joint:
    """The calls under way that several wait for."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], Sequence[Waiter]] = {}

    def start(self, waiters: Sequence[Waiter], call: Awaitable[Sequence[Result]]) -> None:
        """Give each of ``waiters`` its result of ``call``, or its failure."""
        task = asyncio.get_running_loop().create_task(_serve(waiters, call), name="reward call")
        self._tasks[task] = waiters
        task.add_done_callback(self._tasks.pop)
        for waiter in waiters:
            waiter.future.add_done_callback(lambda _: self._look(task))

    def _look(self, task: asyncio.Task[None]) -> None:
        waiters = self._tasks.get(task)
        if waiters is not None and all(waiter.future.done() for waiter in waiters):
            task.cancel()

    async def close(self) -> None:
        """End all, and wait until each has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _serve(waiters: Sequence[Waiter], call: Awaitable[Sequence[Result]]) -> None:
    try:
        results = await call
    except CallError as error:
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        return
    except Exception as error:  # a bug: told to those who wait, whose owners name it
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        return
    for waiter, result in zip(waiters, results, strict=True):
        if not waiter.future.done():
            waiter.future.set_result(result)


class Batches:
    """Trajectories that wait a moment for each other, and go together."""

    def __init__(self, call: Call, size: int | None) -> None:
        self._call = call
        self._size = size or 1
        self._joint = Joint()
        self._waiting: list[Waiter] = []
        self._timer: asyncio.TimerHandle | None = None

    async def score(self, name: str, view: TrajectoryView) -> Result:
        """The result for ``view``; ``CallError`` when its call has none."""
        waiter = Waiter(name, view)
        self._waiting.append(waiter)
        if len(self._waiting) >= self._size:
            self._go()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._go)
        return await waiter.future

    def _go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [waiter for waiter in self._waiting if not waiter.future.done()]
        self._waiting = []
        if waiting:
            name = f"{waiting[0].name}+{len(waiting) - 1}"
            self._joint.start(waiting, self._call(name, [waiter.view for waiter in waiting]))

    async def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._joint.close()
