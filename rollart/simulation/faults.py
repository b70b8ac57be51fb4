"""Faults: what goes wrong in a simulated run, when, and at which worker."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable

import msgspec

from rollart.simulation.launcher import SimLauncher
from rollart.simulation.network import TO_CONTROLLER, TO_WORKER, SimNetwork
from rollart.simulation.world import World

__all__ = ["Fault", "FaultKind", "Injector"]


class FaultKind(enum.StrEnum):
    """What can go wrong with a worker; ``Fault.value`` is what the description names."""

    CRASH = "crash"
    """It dies as by SIGKILL, and can't be started again for ``value`` seconds (ever, for 0)."""
    HANG = "hang"
    """It is stopped for ``value`` seconds: what it has to say comes late."""
    PARTITION = "partition"
    """It lives, and no message passes for ``value`` seconds; what was sent is lost."""
    SLOW = "slow"
    """Everything takes it ``value`` times as long from now on."""
    DROP = "drop"
    """A message to it is lost."""
    DROP_ANSWER = "drop_answer"
    """A message from it is lost."""
    GARBLE = "garble"
    """A message from it arrives damaged."""
    DOUBLE = "double"
    """A message from it arrives twice."""
    FAIL = "fail"
    """``value`` requests fail as infrastructure does."""
    OLD_WEIGHTS = "old_weights"
    """Its updates report success and change nothing."""
    LOST_BUCKET = "lost_bucket"
    """``value`` pulls find a bucket missing in the store."""
    KILL_CONTROLLER = "kill_controller"
    """The controller, and with it all workers, dies as by SIGKILL, and the run is resumed: at that time for 0, else in
    the middle of the ``value``-th write to the journal after it."""
    NAN = "nan"
    """``value`` train_steps find a loss that is not finite."""


class Fault(msgspec.Struct, frozen=True):
    """One fault; ``at_s`` is in virtual time since the run began."""

    at_s: float
    kind: FaultKind
    worker: str
    value: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}({self.value:g}) of {self.worker} at {self.at_s:.1f} s"


FRAME_FAULTS = {
    FaultKind.DROP: TO_WORKER,
    FaultKind.DROP_ANSWER: TO_CONTROLLER,
    FaultKind.GARBLE: TO_CONTROLLER,
    FaultKind.DOUBLE: TO_CONTROLLER,
}


class Injector:
    """Makes the faults of a plan happen; ``happened`` counts them by kind."""

    def __init__(self, faults: list[Fault], world: World) -> None:
        self.happened: Counter[str] = Counter()
        self.befell: set[str] = set()
        """The workers to which something happened."""
        self._faults = faults
        self._world = world
        self._armed: list[Fault] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._partitioned: dict[str, None] = {}
        self._rng = world.rng("garbled")
        self.kill: Callable[[int], None] = lambda torn: None
        """Kills the controller; so many bytes of its last write to the journal are not there."""
        self._writes_left = 0

    def start(self, network: SimNetwork, launcher: SimLauncher) -> None:
        """Set every fault's timer."""
        self._network, self._launcher = network, launcher
        for fault in self._faults:
            self._after(fault.at_s, self._happen, fault)

    async def close(self) -> None:
        """No fault happens any more."""
        for timer in self._timers:
            timer.cancel()

    def interfere(self, direction: str, worker: str, frames: list[bytes]) -> list[list[bytes]]:
        """What arrives of a message."""
        if worker in self._partitioned:
            return []
        for fault in self._armed:
            if fault.worker == worker and FRAME_FAULTS[fault.kind] == direction:
                self._armed.remove(fault)
                self._count(fault)
                return self._altered(fault.kind, frames)
        return [frames]

    def _altered(self, kind: FaultKind, frames: list[bytes]) -> list[list[bytes]]:
        if kind is FaultKind.DOUBLE:
            return [frames, frames]
        if kind is FaultKind.GARBLE:
            # Cut short, it never decodes.  Damage that would is not for the controller to see: CURVE signs each frame.
            return [[frames[0][: self._rng.randrange(len(frames[0]))], *frames[1:]]]
        return []

    def _happen(self, fault: Fault) -> None:
        if fault.kind in FRAME_FAULTS:
            self._armed.append(fault)
            return
        self._count(fault)
        worker, value, ailments = fault.worker, fault.value, self._world.of(fault.worker)
        match fault.kind:
            case FaultKind.CRASH:
                self._launcher.down.add(worker)
                self._launcher.crash(worker)
                if value:
                    self._after(value, self._launcher.down.discard, worker)
            case FaultKind.HANG:
                self._network.freeze(worker)
                self._after(value, self._network.thaw, worker)
            case FaultKind.PARTITION:
                self._partitioned[worker] = None
                self._after(value, self._heal, worker)
            case FaultKind.SLOW:
                ailments.slowdown = value
            case FaultKind.FAIL:
                ailments.failing_requests += int(value)
            case FaultKind.OLD_WEIGHTS:
                ailments.keeps_old_weights = True
            case FaultKind.LOST_BUCKET:
                ailments.lost_buckets += int(value)
            case FaultKind.KILL_CONTROLLER:
                self._writes_left = int(value)
                if not value:
                    self.kill(0)
            case FaultKind.NAN:
                ailments.skips += int(value)

    def _count(self, fault: Fault) -> None:
        self.happened[fault.kind] += 1
        self.befell.add(fault.worker)

    def wrote(self) -> None:
        """The controller has written to the journal."""
        if self._writes_left:
            self._writes_left -= 1
            if not self._writes_left:
                self.kill(self._rng.choice([0, 1, 5]))

    def later(self, now_s: float) -> list[Fault]:
        """The faults that have not happened at ``now_s``, with times from then on."""
        return [
            msgspec.structs.replace(fault, at_s=fault.at_s - now_s)
            for fault in self._faults
            if fault.at_s > now_s
        ]

    def _heal(self, worker: str) -> None:
        self._partitioned.pop(worker, None)

    def _after(self, seconds: float, callback: object, *args: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, callback, *args))  # type: ignore[arg-type]
