"""Frames between a simulated run's controller and its workers: the ``Transport`` and the ``Dialer`` of virtual time.

Each connection keeps its order, as TCP does; two connections of one worker don't wait for each other.  A
worker can be cut off (its process died: the controller's sends fail) or frozen (stopped, or the network is
down: frames wait, and nobody is told).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from rollart.controller.transport import OnFrames, Unreachable
from rollart.workers.dialer import OnMessage

__all__ = ["TO_CONTROLLER", "TO_WORKER", "Interfere", "SimDialer", "SimNetwork"]

TO_WORKER, TO_CONTROLLER = "to worker", "to controller"
Delay = Callable[[str, int], float]
"""(worker, bytes) → seconds that a message takes."""
Tap = Callable[[str, str, Sequence[bytes]], None]
"""(direction, worker, frames): hears each message as it is sent."""
Interfere = Callable[[str, str, list[bytes]], list[list[bytes]]]
"""(direction, worker, frames) → the messages that arrive in its place: none, a changed one, two, …"""


class _Lane:
    """One direction of one connection."""

    __slots__ = ("deliver", "free_at", "held", "open")

    def __init__(self, deliver: OnMessage) -> None:
        self.deliver = deliver
        self.open = True
        self.free_at = 0.0
        """When the last message arrives: none overtakes it."""
        self.held: deque[list[bytes]] = deque()
        """What arrived while the worker was frozen."""


class SimNetwork:
    """The controller's transport, and what its workers dial."""

    def __init__(
        self, delay: Delay, *, jitter: Callable[[], float] | None = None, interfere: Interfere | None = None
    ) -> None:
        """``jitter()`` is what each message's delay is multiplied by."""
        self.refused_peers = 0
        self.taps: list[Tap] = []
        self.messages = 0
        self._delay = delay
        self._jitter = jitter
        self._interfere = interfere
        self._on_frames: OnFrames | None = None
        self._lanes: dict[bytes, tuple[_Lane, _Lane]] = {}
        """A connection's identity → to the worker, to the controller."""
        self._frozen: dict[str, None] = {}

    # --- the controller's end: Transport --------------------------------------------------------------

    def start(self, on_frames: OnFrames) -> None:
        """Begin to receive."""
        self._on_frames = on_frames

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        """Send to a worker's connection; ``Unreachable`` when there is none."""
        lanes = self._lanes.get(identity)
        if lanes is None:
            raise Unreachable("not connected")
        self._carry(TO_WORKER, identity, lanes[0], list(frames))

    def close(self) -> None:
        """Receive no more."""
        self._on_frames = None

    # --- the workers' end -----------------------------------------------------------------------------

    def connect(self, identity: bytes, on_message: OnMessage) -> None:
        """A worker's connection."""

        def to_controller(frames: list[bytes]) -> None:
            if self._on_frames is not None:
                self._on_frames(identity, frames)

        self._lanes[identity] = (_Lane(on_message), _Lane(to_controller))

    def send_to_controller(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Send from a worker's connection; nobody hears it when that is gone."""
        lanes = self._lanes.get(identity)
        if lanes is not None:
            self._carry(TO_CONTROLLER, identity, lanes[1], list(frames))

    def disconnect(self, identity: bytes, *, flush: bool) -> None:
        """The worker closes a connection; with ``flush`` what it has sent still arrives."""
        lanes = self._lanes.pop(identity, None)
        if lanes is not None:
            lanes[0].open = False
            lanes[1].open = flush

    # --- faults ---------------------------------------------------------------------------------------

    def cut(self, worker: str) -> None:
        """The worker is gone, with all that is on the way."""
        self._frozen.pop(worker, None)
        for kind in ("control", "data"):
            self.disconnect(f"{kind}:{worker}".encode(), flush=False)

    def freeze(self, worker: str) -> None:
        """Nothing reaches the worker or leaves it until ``thaw``."""
        self._frozen[worker] = None

    def thaw(self, worker: str) -> None:
        """What has waited arrives now, in order."""
        self._frozen.pop(worker, None)
        for kind in ("control", "data"):
            for lane in self._lanes.get(f"{kind}:{worker}".encode(), ()):
                while lane.held and lane.open:
                    lane.deliver(lane.held.popleft())

    # --- carrying -------------------------------------------------------------------------------------

    def _carry(self, direction: str, identity: bytes, lane: _Lane, frames: list[bytes]) -> None:
        worker = identity.partition(b":")[2].decode()
        self.messages += 1
        for tap in self.taps:
            tap(direction, worker, frames)
        arriving = [frames] if self._interfere is None else self._interfere(direction, worker, frames)
        loop = asyncio.get_running_loop()
        for message in arriving:
            size = sum(map(len, message))
            delay_s = self._delay(worker, size) * (self._jitter() if self._jitter is not None else 1.0)
            lane.free_at = max(lane.free_at, loop.time() + delay_s)
            loop.call_at(lane.free_at, self._arrive, worker, lane, message)

    def _arrive(self, worker: str, lane: _Lane, frames: list[bytes]) -> None:
        if not lane.open:
            return
        if worker in self._frozen:
            lane.held.append(frames)
        else:
            lane.deliver(frames)


class SimDialer:
    """A worker's way into the network."""

    address = "the simulated network"

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    def dial(self, kind: str, name: str, on_message: OnMessage) -> SimConnection:
        """The connection ``kind`` of worker ``name``."""
        return SimConnection(self._network, f"{kind}:{name}".encode(), on_message)

    def close(self) -> None:
        """Nothing is left to let go of."""


class SimConnection:
    """One connection of a worker."""

    def __init__(self, network: SimNetwork, identity: bytes, on_message: OnMessage) -> None:
        self._network = network
        self._identity = identity
        network.connect(identity, on_message)

    def send(self, frames: list[bytes]) -> None:
        """Queue a message."""
        self._network.send_to_controller(self._identity, frames)

    def close(self, *, linger_ms: int) -> None:
        """Receive no more; with ``linger_ms`` what was sent arrives."""
        self._network.disconnect(self._identity, flush=linger_ms > 0)
