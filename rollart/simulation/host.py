"""Host: CPU cores that the workers of one machine share.

Processor sharing: who computes says so, and while more threads compute than there are cores, all go slower by
threads / cores.  It has the real scheduler's fairness, and neither its time slices nor its caches.  Invariants:

- between two changes every job advances at the same rate, at most 1;
- work that is done is never more than cores × time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from rollart.simulation.engine_costs import StepCosts

__all__ = ["Host", "Messages", "OnHost", "Sharing"]

DONE_S = 1e-9
"""Work that is left through rounding."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose cores all workers share."""

    cores: int
    engine_threads: int = 1
    """That an engine computes with."""
    trainer_threads: int = 1
    message_s: float = 0.0
    """Seconds of a core for one message to or from the controller, which handles one after the other."""


class _Job:
    """Something that computes until its work is done."""

    __slots__ = ("done", "left_s")

    def __init__(self, left_s: float, done: asyncio.Future[None]) -> None:
        self.left_s = left_s
        """Seconds of work, on cores of its own."""
        self.done = done


class Host:
    """One machine in virtual time."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.used_s = 0.0
        """Core-seconds, as of the last change."""
        self._threads: dict[str, int] = {}
        """Of everyone who computes."""
        self._jobs: dict[str, _Job] = {}
        self._changed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def factor(self) -> float:
        """How many times as slow as alone everybody is now, at least 1."""
        return max(1.0, sum(self._threads.values()) / self.cores)

    def enter(self, name: str, threads: int = 1) -> None:
        """``name`` computes from now on."""
        if self._threads.get(name) != threads:
            self._advance()
            self._threads[name] = threads
            self._arm()

    def leave(self, name: str) -> None:
        """``name`` computes no more; nothing happens when it didn't."""
        if name in self._threads:
            self._advance()
            del self._threads[name]
            self._arm()

    async def compute(self, name: str, work_s: float, threads: int = 1) -> None:
        """Wait until ``name`` has done ``work_s`` seconds of work, in seconds of ``threads`` cores of its own."""
        job = _Job(work_s, asyncio.get_running_loop().create_future())
        self._advance()
        self._jobs[name] = job
        self._threads[name] = threads
        self._arm()
        try:
            await job.done
        finally:
            if self._jobs.get(name) is job:
                self._advance()
                del self._jobs[name]
                self._threads.pop(name, None)
                self._arm()

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        elapsed_s, self._changed_at = now - self._changed_at, now
        self.used_s += elapsed_s * min(self.cores, sum(self._threads.values()))
        worked_s = elapsed_s / self.factor
        for job in self._jobs.values():
            job.left_s -= worked_s

    def _arm(self) -> None:
        """Wake when the first job is done, unless something changes before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            left_s = max(0.0, min(job.left_s for job in self._jobs.values()))
            self._timer = asyncio.get_running_loop().call_later(left_s * self.factor, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        for name, job in list(self._jobs.items()):
            if job.left_s <= DONE_S:
                del self._jobs[name]
                self._threads.pop(name, None)
                if not job.done.done():
                    job.done.set_result(None)
        self._arm()


class OnHost:
    """Costs of an engine's steps on a host that it shares: each step at the rate that holds when it begins."""

    def __init__(self, costs: StepCosts, host: Host) -> None:
        self.kv_capacity = costs.kv_capacity
        self._costs = costs
        self._host = host

    def step_s(
        self,
        prefill_tokens: float,
        prefill_context: float,
        decodes: float,
        decode_context_tokens: float,
        *,
        prefill_pairs: float | None = None,
        samples: float | None = None,
    ) -> float:
        """As of ``StepCosts``."""
        alone_s = self._costs.step_s(
            prefill_tokens,
            prefill_context,
            decodes,
            decode_context_tokens,
            prefill_pairs=prefill_pairs,
            samples=samples,
        )
        return alone_s * self._host.factor


class Messages:
    """The delay of a message when the controller handles one after the other, on a host that it shares."""

    def __init__(self, delay: Callable[[str, int], float], message_s: float, host: Host) -> None:
        self._delay = delay
        self._message_s = message_s
        self._host = host
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, worker: str, size: int) -> float:
        """Seconds until the message has arrived."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._host.enter("controller")
        self._free_at = max(self._free_at, now) + self._message_s * self._host.factor
        if self._timer is None:
            self._timer = loop.call_at(self._free_at, self._rest)
        return self._free_at - now + self._delay(worker, size)

    def close(self) -> None:
        """Nothing is left to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._free_at:
            self._timer = loop.call_at(self._free_at, self._rest)
        else:
            self._timer = None
            self._host.leave("controller")
