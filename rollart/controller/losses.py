"""Losses: what becomes of a run that loses a worker, and what a person is told.

A worker is lost in several ways at once: its connection breaks, its process ends, calls to it fail.  The
first of these to arrive is rarely the one that says why.  So a loss that ends the run waits a moment for the
process's end, and the run's cause is composed of all that is known by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.errors import RunError
from rollart.launch.local import WorkerExit

__all__ = ["Losses"]

EXIT_PATIENCE_S = 1.0
"""For the end of a process whose worker is lost."""


class Losses:
    """The workers that are gone."""

    def __init__(self, *, fail: Callable[[RunError], None], tail: Callable[[str], str]) -> None:
        """``fail`` ends the run; ``tail(worker)`` gives the last lines of a worker's log."""
        self._fail = fail
        self._tail = tail
        self._exits: dict[str, WorkerExit] = {}
        self._pending: tuple[str, str, asyncio.TimerHandle] | None = None

    @property
    def pending(self) -> bool:
        """The run is about to fail for a loss: what else fails meanwhile is a consequence."""
        return self._pending is not None

    def exited(self, exit: WorkerExit) -> None:
        """A worker's process ended."""
        self._exits[exit.placement.name] = exit
        if self._pending is not None and self._pending[0] == exit.placement.name:
            self._pending[2].cancel()
            self._conclude()

    def fatal(self, worker: str, reason: str) -> None:
        """The run can't go on without ``worker``; the first such loss counts."""
        if self._pending is not None:
            return
        patience_s = 0.0 if worker in self._exits else EXIT_PATIENCE_S
        timer = asyncio.get_running_loop().call_later(patience_s, self._conclude)
        self._pending = (worker, reason, timer)

    def cancel(self) -> None:
        """The run ends for another reason."""
        if self._pending is not None:
            self._pending[2].cancel()

    def _conclude(self) -> None:
        assert self._pending is not None
        worker, reason, _ = self._pending
        known = self._exits.get(worker)
        how = f" ({known})" if known is not None and str(known) not in reason else ""
        log = "".join(f"\n  | {line}" for line in self._tail(worker).splitlines())
        self._fail(RunError(f"{reason}{how}" + (f"\nits log ends:{log}" if log else "")))
