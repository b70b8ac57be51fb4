"""An asyncio event loop whose time is a number: it jumps to the next timer as soon as nothing is ready.

No thread, no descriptor, no real sleep.  The order in which callbacks run depends on nothing but the program
and, when ``shuffle`` is given, on its seed: then, of the tasks whose futures are done, any may be next.  All
else, a new task's first step too, keeps asyncio's promise of first in, first out.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from types import BuiltinMethodType
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["Deadlock", "VirtualLoop"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and what the loop runs has not ended: it never would."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs one program in virtual time; starts at time 0, in seconds."""

    def __init__(self, *, shuffle: random.Random | None = None, end_at: float = float("inf")) -> None:
        """``shuffle`` permutes the tasks that are ready; past ``end_at`` the loop gives up with ``Deadlock``."""
        self.steps = 0
        """Callbacks that ran."""
        self._now = 0.0
        self._end_at = end_at
        self._shuffle = shuffle
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._order = itertools.count()
        self._running = self._stopping = self._closed = False
        self._handler: ExceptionHandler | None = None

    # --- time and callbacks ---------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run ``callback`` at the present time, after what is ready already."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run ``callback`` in ``delay`` seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run ``callback`` at ``when``; timers of the same time run in the order they were set."""
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # else a cancel would not be told
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # A run sets a deadline for each call and cancels nearly all: without this the heap would keep them.
        self._cancelled_timers += 1
        if self._cancelled_timers > 256 and 2 * self._cancelled_timers > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    # --- running --------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until ``stop``; ``Deadlock`` when nothing can happen any more."""
        self._check_open()
        if self._running:
            raise RuntimeError("this event loop is running already")
        self._running = True
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._advance()
                while self._ready and not self._stopping:
                    self._run_one()
        finally:
            self._running = self._stopping = False
            asyncio._set_running_loop(before)

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until ``future`` is done, and give its result."""
        task: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        task.add_done_callback(self._stop_after)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._stop_after)
        if not task.done():
            raise RuntimeError("the event loop was stopped before the future was done")
        return task.result()

    def stop(self) -> None:
        """Stop after the callback that runs now."""
        self._stopping = True

    def is_running(self) -> bool:
        """Whether callbacks run now."""
        return self._running

    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Forget what is still to run."""
        if self._running:
            raise RuntimeError("a running event loop can't be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def waiting(self) -> list[str]:
        """The callbacks that are still to run, ready or timed; none when a program has cleaned up."""
        handles = [*self._ready, *(handle for _, _, handle in self._timers)]
        return [_name(handle) for handle in handles if not handle.cancelled()]

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators are ended by their owners."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no thread."""

    def _stop_after(self, future: asyncio.Future[Any]) -> None:
        self.stop()

    def _advance(self) -> None:
        """With nothing ready, go to the next timer; make ready all that are due."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not self._ready:
            if not timers:
                raise Deadlock(f"at {self._now:g} s nothing is ready and no timer is set")
            if timers[0][0] > self._end_at:
                raise Deadlock(f"the program has not ended at {self._end_at:g} s of virtual time")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if not handle.cancelled():
                self._ready.append(handle)
            else:
                self._cancelled_timers -= 1

    def _run_one(self) -> None:
        handle = self._ready.popleft()
        if self._shuffle is not None and _wakes_task(handle):
            handle = self._instead_of(handle, self._shuffle)
        if not handle.cancelled():
            self.steps += 1
            handle._run()

    def _instead_of(self, handle: asyncio.Handle, shuffle: random.Random) -> asyncio.Handle:
        """Any of the tasks that are ready; the one it replaces takes its place in the queue."""
        tasks = [index for index, other in enumerate(self._ready) if _wakes_task(other)]
        chosen = shuffle.randrange(len(tasks) + 1)
        if chosen == len(tasks):
            return handle
        index = tasks[chosen]
        other, self._ready[index] = self._ready[index], handle
        return other

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the event loop is closed")

    # --- futures, tasks, exceptions -------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        """A task of this loop."""
        self._check_open()
        return asyncio.Task(coro, loop=self, name=name, context=context, **options)

    def get_debug(self) -> bool:
        """Never in debug mode."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Ignored."""

    def get_exception_handler(self) -> ExceptionHandler | None:
        """What ``set_exception_handler`` set."""
        return self._handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Whom to tell of exceptions that nobody awaits."""
        self._handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log it."""
        logger.error("%s", context.get("message"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that nobody awaits."""
        (self._handler or type(self).default_exception_handler)(self, context)


def _wakes_task(handle: asyncio.Handle) -> bool:
    """The handle lets a task go on whose future is done; a task's first step keeps its turn."""
    callback = handle._callback  # type: ignore[attr-defined]
    return isinstance(callback, BuiltinMethodType) and isinstance(callback.__self__, asyncio.Task)


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    return str(getattr(callback, "__qualname__", callback))
