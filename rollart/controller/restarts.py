"""Environment workers that ended are started again: at once is of no use, so each time later than before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollart.launch.local import Placement

__all__ = ["Restarts"]

FIRST_S = 1.0
LONGEST_S = 60.0
SOUND_S = 120.0
"""A worker that lasted so long begins anew with the first delay."""


class Restarts:
    """The delays of each worker."""

    def __init__(
        self,
        most: int,
        *,
        start: Callable[[Placement], Awaitable[None]],
        gave_up: Callable[[str, str], None],
        say: Callable[[str], None],
        patience_s: float,
    ) -> None:
        """``most`` restarts in a row; a worker that can't be started, or is not ready ``patience_s`` after its start,
        is given up: ``gave_up(name, why)``."""
        self._most = most
        self._start = start
        self._gave_up = gave_up
        self._say = say
        self._patience_s = patience_s
        self._joined: dict[str, asyncio.Event] = {}
        self._tries: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        self._pending: dict[str, asyncio.Task[None]] = {}

    @property
    def pending(self) -> bool:
        """A worker is about to be started again, or to join."""
        return bool(self._pending)

    def ended(self, placement: Placement, why: str) -> bool:
        """A worker's process ended; whether it is started again."""
        loop = asyncio.get_running_loop()
        name, now = placement.name, loop.time()
        if now - self._ended.get(name, now) > SOUND_S:
            self._tries[name] = 0
        tries = self._tries.get(name, 0)
        self._ended[name] = now
        starting = self._pending.pop(name, None)
        if starting is not None:
            starting.cancel()
        if tries >= self._most:
            return False
        self._tries[name] = tries + 1
        delay_s = min(FIRST_S * 2**tries, LONGEST_S)
        self._say(f"{why}; it is started again in {delay_s:g} s ({tries + 1} of {self._most} times)")
        self._pending[name] = loop.create_task(self._later(placement, delay_s))
        return True

    async def _later(self, placement: Placement, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        name = placement.name
        joined = self._joined[name] = asyncio.Event()
        why = ""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._start(placement)
                await joined.wait()
        except TimeoutError:
            why = f"it was not ready within {self._patience_s:g} s"
        except OSError as error:
            why = f"it can't be started: {error}"
        del self._pending[name]
        if why:
            self._gave_up(name, why)

    def joined(self, name: str) -> None:
        """A worker is ready."""
        event = self._joined.pop(name, None)
        if event is not None:
            event.set()

    async def close(self) -> None:
        """Start nothing any more."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
