"""The event stream: every transition of a run, in one file that metrics, tests and tools read.

File format, version 2: the line ``RollArt events 2\\n``, then blocks.  A block is the payload's length and its
CRC-32 (two little-endian uint32), then the payload, a MessagePack array of events.  An event is an array: its
type name, then its fields in the order of its class here.  Fields are only ever appended to a class.  Times
``t`` are seconds since the run began.  A torn last block (a killed writer) ends the stream.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollart.packed_array import PackedArray
from rollart.protocol import VersionRun

__all__ = [
    "AffinityProposed",
    "Bound",
    "Dispatched",
    "Ended",
    "Evaluated",
    "Event",
    "EventLog",
    "GroupEnded",
    "Moved",
    "Published",
    "Pulled",
    "Quarantined",
    "Resumed",
    "RoleChanged",
    "Sampled",
    "Shipped",
    "Started",
    "Swapped",
    "TrainedSample",
    "TrainedStep",
    "WorkerChanged",
    "cut_torn",
    "parse_events",
    "read_events",
]

HEADER = b"RollArt events 2\n"
_BLOCK = struct.Struct("<II")
FLUSH_BYTES = 1 << 16


class _Event(msgspec.Struct, array_like=True, tag=True, gc=False):
    t: float


class Started(_Event):
    """The run began; ``unix_time`` is its zero of ``t``.  ``alpha``, ``update_at``, ``schedule`` as configured."""

    unix_time: float
    rollart: str
    name: str
    alpha: int
    update_at: str
    groups_per_batch: int
    schedule: str = "rollart"


class Dispatched(_Event):
    """A trajectory exists (PENDING)."""

    trajectory: int
    group: int
    member: int
    task: str
    seed: int
    kind: str


class Moved(_Event):
    """A trajectory changed state; ``attempt`` is the one it left."""

    trajectory: int
    attempt: int
    before: str
    after: str
    reason: str
    detail: str
    turns: int
    tokens: int


class Sampled(_Event):
    """The engine's answer of one turn: ``logprobs`` counts them, ``unsound`` those that are not
    finite and ≤ 0."""

    trajectory: int
    attempt: int
    turn: int
    worker: str
    routed_version: int
    """What the worker had acknowledged when the request was sent."""
    tokens: int
    logprobs: int
    unsound: int
    versions: list[VersionRun]
    finish_reason: str
    cached_tokens: int
    prefilled_by: str = ""
    """The worker that computed the prompt, where another one decoded."""
    kept_tokens: int = 0
    """So many of the tokens are from workers that were lost before the answer was complete."""


class GroupEnded(_Event):
    """A group left the buffer: shipped, filtered, incomplete or cleared; ``version`` is v (-1: none)."""

    group: int
    outcome: str
    members: int
    version: int
    started: int


class Shipped(_Event):
    """A batch was formed: its groups' v, the reference they are measured against, and n, m at that time."""

    step: int
    reference: int
    n: int
    m: int
    groups: list[tuple[int, int]]


class TrainedSample(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A trajectory in a train_step: tokens in all, tokens the engine sampled, and the versions of those that
    have a weight in the loss."""

    trajectory: int
    tokens: int
    sampled: int
    versions: list[VersionRun]


class TrainedStep(_Event):
    """A train_step on version ``before`` ended; ``after`` equals it when the step was skipped."""

    step: int
    before: int
    after: int
    skipped: str
    samples: list[TrainedSample]


class WorkerChanged(_Event):
    """A worker joined, became ready, was taken out or left, and why."""

    worker: str
    role: str
    state: str
    reason: str
    hardware_class: str = ""


class Published(_Event):
    """A version is in the weight store; publishing held the trainer for ``blocked_s``."""

    version: int
    size_bytes: int
    blocked_s: float


class Swapped(_Event):
    """A worker took new weights: seconds of each phase, the canary's largest difference, requests in flight."""

    worker: str
    before: int
    version: int
    pull_s: float
    suspend_s: float
    update_s: float
    resume_s: float
    canary_gap: float
    in_flight: int


class Pulled(_Event):
    """A worker brought a version to its host, in ``seconds``, or left it for a newer one.

    ``size_bytes`` is the version's, ``moved_bytes`` what came from elsewhere; ``refetched`` buckets came twice.
    """

    worker: str
    version: int
    seconds: float
    superseded: bool
    size_bytes: int
    moved_bytes: int
    refetched: int


class Evaluated(_Event):
    """Greedy episodes on the held-out split, all sampled by ``version``."""

    step: int
    version: int
    episodes: int
    failed: int
    success: float
    reward: float
    task_success: dict[str, float] = {}
    """Of each task, where there are several."""


class Bound(_Event):
    """A trajectory's requests go to hardware of a class from now on; ``reason`` says why it isn't the ``wanted`` one.

    ``phase`` is ``both`` for a request that is served whole, else ``prefill`` or ``decode``.
    """

    trajectory: int
    task: str
    phase: str
    wanted: str
    hardware_class: str
    reason: str


class RoleChanged(_Event):
    """A worker serves another phase from now on, and why."""

    worker: str
    before: str
    after: str
    reason: str


class AffinityProposed(_Event):
    """``hw_affinity: auto`` prefers other classes for a task from now on, and why."""

    task: str
    order: list[str]
    reason: str


class KeptTrajectory(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A scored trajectory that a resumed run has of the run before it."""

    trajectory: int
    attempt: int
    sampled: int


class Resumed(_Event):
    """Another controller goes on with the run, from ``step`` on ``version``.

    Of the trajectories that had not ended it has ``kept``, all scored.  Those of trained batches are consumed, and all
    others were aborted by the end of the controller before it, which may have told less than it had done.
    """

    unix_time: float
    step: int
    version: int
    kept: list[KeptTrajectory]


class Ended(_Event):
    """The run is over: ``success``, ``error`` or ``interrupted``, and the first cause."""

    outcome: str
    reason: str


class Quarantined(_Event):
    """A task was taken out of the run, for its groups fail again and again; ``error`` is the last failure."""

    task: str
    error: str


Event = (
    Started
    | Dispatched
    | Moved
    | Sampled
    | GroupEnded
    | Shipped
    | TrainedStep
    | WorkerChanged
    | Published
    | Swapped
    | Evaluated
    | Pulled
    | Ended
    | Quarantined
    | Bound
    | RoleChanged
    | AffinityProposed
    | Resumed
)

_decoder: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])


class EventLog:
    """Writes events to a file, and to everyone who listens."""

    def __init__(self, file: BinaryIO, *, more: bool = False) -> None:
        """``file`` is closed by ``close``; ``more``: what is in it stays, and it goes on there."""
        self._file: BinaryIO | None = file
        self._pending = PackedArray()
        self.last_s = cut_torn(file) if more else 0.0
        """The time of the last event that was in ``file``."""
        if not more:
            file.write(HEADER)
        self._listeners: list[Callable[[Event], None]] = []
        self._listeners_of: dict[type[Event], list[Callable[[Any], None]]] = {}

    def listen(self, listener: Callable[[Any], None], *kinds: type[Event]) -> None:
        """Call ``listener`` with every event from now on, or with those of ``kinds`` alone: most are of others."""
        if not kinds:
            self._listeners.append(listener)
        for kind in kinds:
            self._listeners_of.setdefault(kind, []).append(listener)

    def write(self, event: Event) -> None:
        """Record ``event``; it reaches the file by the next ``flush`` at the latest."""
        for listener in self._listeners:
            listener(event)
        for listener in self._listeners_of.get(type(event), ()):
            listener(event)
        if self._file is None:
            return
        self._pending.append(event)
        if self._pending.size >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Give what is pending to the operating system."""
        if self._file is None or not self._pending.count:
            return
        payload = self._pending.take()
        self._file.write(_BLOCK.pack(len(payload), zlib.crc32(payload)))
        self._file.write(payload)
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_torn(file: BinaryIO) -> float:
    """Cut what follows the last whole block off ``file``; the time of the last event that is left, 0 for none."""
    if file.read(len(HEADER)) != HEADER:
        file.seek(0)
        file.truncate()
        file.write(HEADER)
        return 0.0
    end, last = len(HEADER), b""
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        length, checksum = _BLOCK.unpack(head)
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            break
        end, last = file.tell(), payload
    file.seek(end)
    file.truncate()
    return _decoder.decode(last)[-1].t if last else 0.0


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run folder's ``events`` file; ``ValueError`` when it is none or a block is damaged."""
    with path.open("rb") as file:
        yield from parse_events(file, str(path))


def parse_events(file: BinaryIO, name: str) -> Iterator[Event]:
    """The events in ``file``, which people know as ``name``; errors as of ``read_events``."""
    if file.read(len(HEADER)) != HEADER:
        raise ValueError(f"{name} is no RollArt event stream of version 2")
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        length, checksum = _BLOCK.unpack(head)
        payload = file.read(length)
        if len(payload) < length:
            return
        if zlib.crc32(payload) != checksum:
            raise ValueError(f"{name}: a block before byte {file.tell()} is damaged")
        yield from _decoder.decode(payload)
