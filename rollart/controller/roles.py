"""Roles: inference workers change between prefill and decode when the queues say so.

``decide`` is the whole decision, without a clock; ``Roles`` looks from time to time and carries it out.  A change
costs nothing but routing: every engine of such a run can do both, and what a worker has goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from rollart.config.routing import Phase
from rollart.controller import events
from rollart.controller.engines import Engines
from rollart.controller.run_context import RunContext

__all__ = ["Change", "Load", "Roles", "decide"]

LOOK_EVERY_S = 1.0
LOOKS = 3
"""So many looks in a row have to want the same change: a burst is over by then."""
LONG_QUEUE = 4.0
"""Prompts a prefilling worker has beside the one that it computes, on average: they wait."""
SHORT_QUEUE = 1.0
FILLED = 0.75
"""Of the sequences that decoding workers run at once; beyond that they have none to spare."""


class Load(msgspec.Struct, frozen=True):
    """What a worker of a phase has."""

    worker: str
    phase: Phase
    requests: int


class Change(msgspec.Struct, frozen=True):
    """A worker that should serve the other phase."""

    worker: str
    to: Phase
    reason: str


def decide(loads: Sequence[Load], *, waiting: int, sequences: int) -> Change | None:
    """The worker to change now, if any; each phase keeps one.

    A worker computes prompts one after the other and decodes ``sequences`` at once, so a queue of prompts is what
    exceeds one a worker, and one of decodes what exceeds ``sequences`` a worker.  ``waiting`` requests have no worker.
    """
    prefill = [load for load in loads if load.phase is Phase.PREFILL]
    decode = [load for load in loads if load.phase is Phase.DECODE]
    if not prefill or not decode:
        return None
    prompts = sum(load.requests for load in prefill) / len(prefill) - 1
    decodes = sum(load.requests for load in decode) + waiting
    if len(decode) > 1 and prompts >= LONG_QUEUE and decodes <= FILLED * sequences * (len(decode) - 1):
        return Change(
            _idlest(decode),
            Phase.PREFILL,
            f"{prompts:.1f} prompts wait at each of {len(prefill)} prefilling workers, and {decodes} requests fill "
            f"less than {len(decode)} decoding ones",
        )
    if len(prefill) > 1 and prompts <= SHORT_QUEUE and decodes > sequences * len(decode):
        return Change(
            _idlest(prefill),
            Phase.DECODE,
            f"{decodes} requests are more than {len(decode)} decoding workers take at once, and no prompt waits",
        )
    return None


def _idlest(loads: Sequence[Load]) -> str:
    return min(loads, key=lambda load: (load.requests, load.worker)).worker


class Roles:
    """Of one run's inference workers."""

    def __init__(self, engines: Engines, run: RunContext, *, sequences: int) -> None:
        self._engines = engines
        self._run = run
        self._sequences = sequences
        self._wanted: tuple[Phase, int] | None = None
        """The change that the last looks wanted, and how many of them did."""

    async def keep(self) -> None:
        """Look from time to time, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Look once, and change a worker's phase if this look is the one too many."""
        loads = [
            Load(name, engine.candidate.phase, engine.requests)
            for name, engine in self._engines.by_name.items()
            if engine.open
        ]
        change = decide(loads, waiting=self._engines.waiting, sequences=self._sequences)
        if change is None:
            self._wanted = None
            return
        before = self._wanted[1] if self._wanted is not None and self._wanted[0] is change.to else 0
        self._wanted = change.to, before + 1
        if before + 1 < LOOKS:
            return
        self._wanted = None
        engine = self._engines.by_name[change.worker]
        was = engine.candidate.phase
        self._engines.change_phase(engine, change.to)
        self._run.write(events.RoleChanged(self._run.clock(), change.worker, was, change.to, change.reason))
