"""Deadlines: when requests run out of time, with one timer for all of them.

Nearly every request is answered in time, so setting and clearing a deadline is what must be cheap: an entry in
a dict.  Requests with the same patience run out in the order they were made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Deadlines"]


class Deadlines:
    """Calls ``expire(seq)`` when a request's time is up."""

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._due: dict[float, dict[int, float]] = {}
        """For each patience: the requests, oldest first, and when they run out."""
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")

    def set(self, seq: int, timeout_s: float) -> None:
        """Request ``seq`` has ``timeout_s`` from now."""
        due = self._loop.time() + timeout_s
        queue = self._due.get(timeout_s)
        if queue is None:
            queue = self._due[timeout_s] = {}
        queue[seq] = due
        if due < self._armed_for:
            self._arm(due)

    def clear(self, seq: int, timeout_s: float) -> None:
        """Request ``seq``, which was given ``timeout_s``, has ended."""
        queue = self._due.get(timeout_s)
        if queue is not None:
            queue.pop(seq, None)

    def close(self) -> None:
        """No request runs out any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.clear()
        self._armed_for = float("inf")

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        """Expire what is due; the requests that were answered in time are not here any more."""
        self._timer, self._armed_for = None, float("inf")
        now = self._loop.time()
        out = [seq for queue in self._due.values() for seq in _until(queue, now)]
        for seq in out:
            self._expire(seq)
        heads = [next(iter(queue.values())) for queue in self._due.values() if queue]
        if heads and min(heads) < self._armed_for:
            self._arm(min(heads))


def _until(queue: dict[int, float], now: float) -> list[int]:
    """Take what is due out of ``queue``."""
    out = []
    for seq, due in queue.items():
        if due > now:
            break
        out.append(seq)
    for seq in out:
        del queue[seq]
    return out
