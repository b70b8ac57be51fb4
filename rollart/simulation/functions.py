"""Reward functions in virtual time: an elastic pool by the function host's own ``scaling``, or warm workers.

An instance serves one call at a time and is paid from its start to its end, its start and its idle time included.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from rollart.workers.functions.scaling import Limits, Load, Means, further, patience_s

__all__ = ["FunctionPool", "SimFunctions"]


class FunctionPool(msgspec.Struct, frozen=True, kw_only=True):
    """What serves reward calls."""

    warm: int | None = None
    """So many dedicated workers from the start of the run to its end; ``None``: elastic."""
    most: int = 64
    """Elastic instances at the same time."""
    cold_start_s: float = 1.0


class _Instance:
    __slots__ = ("idle", "started_at")

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.idle: asyncio.TimerHandle | None = None


class SimFunctions:
    """One pool."""

    def __init__(self, pool: FunctionPool) -> None:
        self._pool = pool
        self._limits = Limits(most=pool.most)
        self._means = Means(cold_s=pool.cold_start_s)
        self._waiting: deque[asyncio.Future[_Instance]] = deque()
        self._resting: dict[_Instance, None] = {}
        self._instances: dict[_Instance, None] = {}
        self._starting: dict[asyncio.TimerHandle, None] = {}
        self._paid_s = 0.0
        self.busy_s = 0.0
        self.calls = 0
        self.cold_starts = 0
        self.waited_s: list[float] = []
        if pool.warm is not None:
            self._resting = {_Instance(0.0): None for _ in range(pool.warm)}
            self._instances = dict(self._resting)

    async def call(self, seconds: float) -> None:
        """Be busy for ``seconds`` somewhere; to cancel it frees the instance."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self._means.arrived(asked)
        instance = await self._get()
        self.waited_s.append(loop.time() - asked)
        began = loop.time()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.calls += 1
            self.busy_s += loop.time() - began
            self._means.called(loop.time() - began)
            self._free(instance)

    async def _get(self) -> _Instance:
        if self._resting:
            instance, _ = self._resting.popitem()
            if instance.idle is not None:
                instance.idle.cancel()
                instance.idle = None
            return instance
        place: asyncio.Future[_Instance] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._look()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._free(place.result())
            raise

    def _look(self) -> None:
        if self._pool.warm is not None:
            return
        live = len(self._instances) + len(self._starting)
        load = Load(
            waiting=sum(not place.done() for place in self._waiting),
            running=len(self._instances) - len(self._resting),
            instances=live,
        )
        for _ in range(further(load, self._limits, self._means)):
            self._start()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        instance = _Instance(loop.time())
        self.cold_starts += 1

        def ready() -> None:
            del self._starting[timer]
            self._means.started(self._pool.cold_start_s)
            self._instances[instance] = None
            self._free(instance)

        timer = loop.call_later(self._pool.cold_start_s, ready)
        self._starting[timer] = None

    def _free(self, instance: _Instance) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(instance)
                return
        self._resting[instance] = None
        if self._pool.warm is None:
            delay = patience_s(self._limits, self._means, len(self._resting) - 1)
            instance.idle = asyncio.get_running_loop().call_later(delay, self._retire, instance)

    def _retire(self, instance: _Instance) -> None:
        del self._resting[instance]
        del self._instances[instance]
        self._paid_s += asyncio.get_running_loop().time() - instance.started_at

    def paid_s(self, now: float) -> float:
        """Instance-seconds up to ``now``."""
        return self._paid_s + sum(now - instance.started_at for instance in self._instances)

    async def close(self) -> None:
        """The run is over: everything ends."""
        now = asyncio.get_running_loop().time()
        self._paid_s = self.paid_s(now)
        for instance in self._instances:
            if instance.idle is not None:
                instance.idle.cancel()
        for timer in self._starting:
            timer.cancel()
        self._instances.clear()
        self._resting.clear()
        self._starting.clear()
