"""LoopWatch: how late the event loop is, and which task keeps all others waiting.

While a task computes or blocks, nothing else of the controller runs: no answer is taken, no deadline noticed.  A timer
on the loop measures how late it is called; a thread beside it looks, while that is late, at what the loop's thread is
doing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Self

__all__ = ["LoopWatch"]

logger = logging.getLogger(__name__)

TICK_S = 0.05
BLOCKED_S = 1.0
SHOWN_FRAMES = 3
TELL_AGAIN_S = 60.0
"""The same place is said once in so long."""


class LoopWatch:
    """``async with LoopWatch(say)``: of the loop that runs this."""

    def __init__(self, say: Callable[[str], None], *, blocked_s: float = BLOCKED_S) -> None:
        """``say`` is called on the loop, when a task that held it for ``blocked_s`` or longer has let go of it."""
        self._say = say
        self._blocked_s = blocked_s
        self._longest_s = 0.0
        self._caught: str = ""
        """What blocks the loop now: its task and its innermost frames."""
        self._told: dict[str, float] = {}
        self._over = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._of = threading.get_ident()
        self._ticked = time.monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._thread = threading.Thread(target=self._look, name="loop watch", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._over.set()
        await asyncio.to_thread(self._thread.join)

    def take_lag(self) -> float:
        """The most that the loop was late since the last call, in seconds."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def _tick(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._ticked - TICK_S)
        self._longest_s = max(self._longest_s, late)
        if self._caught and late >= self._blocked_s:
            self._tell(late, self._caught, now)
        self._caught = ""
        self._ticked = now
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tell(self, late: float, caught: str, now: float) -> None:
        if now - self._told.get(caught, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return
        self._told[caught] = now
        self._say(f"warning: nothing else ran for {late:.1f} s, because of {caught}")

    def _look(self) -> None:
        """In the thread: the place is noted once for each time that the loop is late."""
        while not self._over.wait(self._blocked_s / 4):
            if not self._caught and time.monotonic() - self._ticked - TICK_S >= self._blocked_s / 2:
                frame = sys._current_frames().get(self._of)
                if frame is not None:
                    self._caught = f"{self._task()}: {_place(frame)}"
                    logger.warning("the event loop is late: %s", self._caught)

    def _task(self) -> str:
        task = asyncio.current_task(self._loop)
        return "a callback" if task is None else f"task {task.get_name()!r}"


def _place(frame: FrameType) -> str:
    """The innermost frames, innermost first."""
    frames = traceback.extract_stack(frame)[: -SHOWN_FRAMES - 1 : -1]
    return ", called by ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in frames)
