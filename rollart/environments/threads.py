"""Threads for code that may block, hang or do worse, at the service of one asyncio loop.

Unlike an executor's, these threads never keep the process alive, and a call that its caller gave up on does
not occupy the pool: its thread is replaced, and ends when the call does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Threads"]

logger = logging.getLogger(__name__)


class _Job:
    __slots__ = ("abandoned", "call", "future", "late", "running")

    def __init__(self, call: Callable[[], Any], future: asyncio.Future[Any] | None) -> None:
        self.call = call
        self.future = future
        self.late: Callable[[], None] | None = None
        self.running = False
        self.abandoned = False


class Threads:
    """``count`` threads; made and used on a running event loop."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards each job's ``running`` and ``abandoned``."""
        self._count = count
        for _ in range(count):
            self._start()

    async def run[T](self, call: Callable[[], T], late: Callable[[], None]) -> T:
        """What ``call()`` returns or raises; any exception of it, ``SystemExit`` included, as ``RuntimeError``.

        When this is cancelled, ``late`` runs on the loop once ``call`` has ended, or won't begin.
        """
        job = _Job(call, self._loop.create_future())
        self._queue.put(job)
        assert job.future is not None
        try:
            result: T = await job.future
        except asyncio.CancelledError:
            self._abandon(job, late)
            raise
        return result

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` run; an exception of it is logged."""
        self._queue.put(_Job(call, None))

    def stop(self) -> None:
        """Let the threads end after what is queued; those that hang end with the process."""
        for _ in range(self._count):
            self._queue.put(None)

    def _abandon(self, job: _Job, late: Callable[[], None]) -> None:
        with self._lock:
            job.late = late
            job.abandoned = True
            running = job.running
        if running:
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if not job.abandoned:
                    job.running = True
            if job.running:
                outcome = self._carry_out(job)
                with self._lock:
                    job.running = False
                if not job.abandoned:
                    self._tell(self._deliver, job, outcome)
                    continue
                self._tell_late(job)
                return  # another thread has taken this one's place
            self._tell_late(job)

    def _carry_out(self, job: _Job) -> tuple[Any, BaseException | None]:
        try:
            return job.call(), None
        except BaseException as error:  # the boundary of foreign code in a thread: handed to who waits for it
            if job.future is None:
                logger.warning("a call in a thread failed", exc_info=True)
            return None, error

    def _tell_late(self, job: _Job) -> None:
        if job.late is not None:
            self._tell(job.late)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *arguments)

    def _deliver(self, job: _Job, outcome: tuple[Any, BaseException | None]) -> None:
        if job.future is None or job.future.done():
            return
        result, error = outcome
        if error is None:
            job.future.set_result(result)
        else:
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            job.future.set_exception(failure)
