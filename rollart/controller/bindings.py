"""Bindings: which hardware class each trajectory's requests go to, told to the event stream when it changes."""

from __future__ import annotations

from rollart.config.routing import Phase
from rollart.controller import events
from rollart.controller.affinity import Orders
from rollart.controller.engines import Engines, Seat, Seats
from rollart.controller.run_context import RunContext
from rollart.controller.trajectory import Trajectory

__all__ = ["Bindings"]


class Bindings:
    """Of the trajectories in flight; nothing is recorded where there is nothing to choose."""

    def __init__(self, orders: Orders, engines: Engines, run: RunContext) -> None:
        self._orders = orders
        self._engines = engines
        self._run = run
        self._nothing_to_choose = orders.trivial
        self._bound: dict[int, tuple[str, ...]] = {}
        """The classes of a trajectory's last request: of one worker, or of the prefilling and the decoding one."""

    def bound(self, trajectory: Trajectory, seats: Seats) -> None:
        """The trajectory's request goes to ``seats``."""
        if self._nothing_to_choose:
            return
        legs = _legs(seats)
        classes = tuple(f"{phase} {seat.engine.candidate.hardware}" for phase, seat in legs)
        if self._bound.get(trajectory.id) == classes:
            return
        self._bound[trajectory.id] = classes
        order = self._orders.of(trajectory.task)
        for phase, seat in legs:
            wanted = {Phase.PREFILL: order.prefill, Phase.DECODE: order.decode}.get(phase, order.whole)[0]
            found = seat.engine.candidate.hardware
            reason = "" if found == wanted else self._why_not(wanted)
            if phase is Phase.BOTH and order.split:
                reason = "; ".join(filter(None, [reason, "served whole"]))
            self._run.write(
                events.Bound(self._run.clock(), trajectory.id, trajectory.task, phase, wanted, found, reason)
            )

    def forget(self, trajectory: Trajectory) -> None:
        """It has ended."""
        self._bound.pop(trajectory.id, None)

    def _why_not(self, hardware: str) -> str:
        """Why nothing went to that class just now."""
        there = [e for e in self._engines.by_name.values() if e.candidate.hardware == hardware]
        if not there:
            return f"no {hardware} worker is left"
        if not any(engine.open for engine in there):
            return f"every {hardware} worker is taking new weights"
        if all(engine.candidate.full for engine in there if engine.open):
            return f"every {hardware} worker is full"
        return f"no {hardware} worker has room, the phase and the version"


def _legs(seats: Seats) -> list[tuple[Phase, Seat]]:
    if seats.prefill is None:
        return [(Phase.BOTH, seats.main)]
    return [(Phase.PREFILL, seats.prefill), (Phase.DECODE, seats.main)]
