"""Threads for code that may block, hang or do worse, at the service of one asyncio loop.

Unlike an executor's, these threads never keep the process alive, and a call that its caller gave up on does
not occupy the pool: its thread is replaced, and ends when the call does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")


class _Job:
    __slots__ = ("abandoned", "call", "ended", "future", "running")

    def __init__(
        self, call: Callable[[], Any], ended: Callable[[], None], future: asyncio.Future[Any]
    ) -> None:
        self.call = call
        self.ended = ended
        self.future = future
        self.running = False
        self.abandoned = False


class Threads:
    """``count`` threads; made and used on a running event loop."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards each job's ``running`` and ``abandoned``; the rest of a job belongs to the loop."""
        for _ in range(count):
            self._start()

    async def run(self, call: Callable[[], T], ended: Callable[[], None]) -> T:
        """What ``call()`` returns or raises, ``SystemExit`` and the like included.

        ``ended`` runs on the loop once ``call`` has ended or will not begin: before this returns, but long
        after this was cancelled where ``call`` hangs.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        job = _Job(call, ended, future)
        self._queue.put(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def stop(self) -> None:
        """Let the threads end after what is queued; one that hangs ends with the process."""
        for _ in range(self._count):
            self._queue.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            running = job.running
        if running:
            self._start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                job.running = not job.abandoned
            outcome = _carry_out(job.call) if job.running else (None, None)
            with self._lock:
                replaced = job.running and job.abandoned
                job.running = False
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_deliver, job, outcome)
            if replaced:
                return


def _carry_out(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    process = os.getpid()
    try:
        return call(), None
    except StopIteration as error:  # a future can't hold one
        failure = RuntimeError("StopIteration").with_traceback(error.__traceback__)
        return None, failure
    except BaseException as error:  # the boundary of foreign code in a thread: told to who waits for it
        return None, error
    finally:
        if (
            os.getpid() != process
        ):  # it forked, and this is the child, which must not go on as a second worker
            os._exit(0)


def _deliver(job: _Job, outcome: tuple[Any, BaseException | None]) -> None:
    job.ended()
    if job.future.done():  # its caller has given up
        return
    result, error = outcome
    if error is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(error)
