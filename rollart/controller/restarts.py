"""Workers that ended are started again: at once is of no use, so each time later than before, and not for ever.

A worker whose connection is lost is ended first, if it doesn't end by itself: it may be stopped, or cut off.  One that
fails again and again is given up.  Only what the launcher started is started again; who joins by hand leaves by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rollart.launch.local import Placement

__all__ = ["Restarts"]

FIRST_S = 1.0
LONGEST_S = 60.0
SOUND_S = 120.0
"""A worker that served for so long begins anew with the first delay."""
END_PATIENCE_S = 5.0
"""For a worker that is lost to end by itself."""


class Restarts:
    """The tries and delays of each worker."""

    def __init__(
        self,
        *,
        most: Callable[[Placement], int],
        start: Callable[[Placement], Awaitable[None]],
        end: Callable[[str], None],
        gave_up: Callable[[Placement, str], None],
        say: Callable[[str], None],
        patience_s: float,
    ) -> None:
        """``most(placement)`` restarts in a row; ``end(name)`` kills a worker's process, which ``ended`` hears of.
        A worker that has no try left is given up: ``gave_up(placement, why)``.  One that is not ready ``patience_s``
        after its start is ended, and that was a try."""
        self._most = most
        self._start = start
        self._end = end
        self._gave_up = gave_up
        self._say = say
        self._patience_s = patience_s
        self._known: dict[str, Placement] = {}
        self._tries: dict[str, int] = {}
        self._serving_since: dict[str, float] = {}
        self._coming: dict[str, None] = {}
        """Those that are lost and not given up, until they are ready."""
        self._given_up: set[str] = set()
        self._lost_for: dict[str, str] = {}
        """Why the connections of those are lost whose processes have not ended."""
        self._ready: dict[str, asyncio.Event] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.TimerHandle] = {}

    def know(self, placements: Iterable[Placement]) -> None:
        """What the launcher has started."""
        self._known.update((placement.name, placement) for placement in placements)

    def coming(self, role: str) -> bool:
        """A worker of ``role`` is about to be started again, or to join."""
        return any(self._known[name].role == role for name in self._coming)

    def lost(self, name: str, why: str) -> None:
        """The connection to a worker is lost: its process is ended soon, if it hasn't by then."""
        if name not in self._known or name in self._given_up or name in self._starting:
            return
        if self._tries.get(name, 0) < self._most(self._known[name]):
            self._coming[name] = None
        self._lost_for[name] = why
        if name not in self._ending:
            self._ending[name] = asyncio.get_running_loop().call_later(END_PATIENCE_S, self._kill, name)

    def _kill(self, name: str) -> None:
        del self._ending[name]
        self._end(name)

    def ended(self, placement: Placement, why: str) -> bool:
        """A worker's process ended, or could not be started; whether it is started again."""
        name = placement.name
        if name in self._ending:
            self._ending.pop(name).cancel()
        if name in self._lost_for:
            why = f"{why} ({self._lost_for.pop(name)})"
        loop = asyncio.get_running_loop()
        since = self._serving_since.pop(name, None)
        if since is not None and loop.time() - since > SOUND_S:
            self._tries[name] = 0
        starting = self._starting.pop(name, None)
        if starting is not None:
            starting.cancel()
        tries, most = self._tries.get(name, 0), self._most(placement)
        if tries >= most:
            self._coming.pop(name, None)
            self._given_up.add(name)
            self._gave_up(placement, why)
            return False
        self._tries[name] = tries + 1
        delay_s = min(FIRST_S * 2**tries, LONGEST_S)
        self._say(f"{why}; it is started again in {delay_s:g} s ({tries + 1} of {most} times)")
        self._coming[name] = None
        self._starting[name] = loop.create_task(self._later(placement, delay_s), name=f"restart of {name}")
        return True

    async def _later(self, placement: Placement, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        name = placement.name
        ready = self._ready[name] = asyncio.Event()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._start(placement)
                await ready.wait()
        except TimeoutError:
            self._say(f"{name} was not ready within {self._patience_s:g} s")
            self._starting.pop(name)
            self._end(name)
        except OSError as error:
            self._starting.pop(name)
            self.ended(placement, f"{name} can't be started: {error}")
        else:
            self._starting.pop(name)
            self._coming.pop(name, None)

    def joined(self, name: str) -> None:
        """A worker is ready."""
        ready = self._ready.pop(name, None)
        if ready is not None:
            ready.set()

    def serves(self, name: str) -> None:
        """A worker does its work."""
        if name in self._known:
            self._serving_since.setdefault(name, asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Start and end nothing any more."""
        for timer in self._ending.values():
            timer.cancel()
        tasks = list(self._starting.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
