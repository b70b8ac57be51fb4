"""RunContext: what every part of a run is given: the event stream, the time, and where bugs are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.controller.events import Event

__all__ = ["RunContext"]


class RunContext:
    """One for each run, made on its event loop when it begins."""

    __slots__ = ("_loop", "_zero", "bug", "write")

    def __init__(
        self, *, write: Callable[[Event], None], bug: Callable[[BaseException], None], began_s: float = 0.0
    ) -> None:
        """``began_s`` is what the clock says now: more than 0 for a run that is resumed."""
        self.write = write
        """Records an event."""
        self.bug = bug
        """Hears of an exception that no one expected, and ends the run with it."""
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time() - began_s

    def clock(self) -> float:
        """Seconds since the run began."""
        return self._loop.time() - self._zero
