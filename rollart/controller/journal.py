"""The journal: what a run needs, beside its checkpoint, to go on exactly where it was.

A file of checksummed blocks, each one record, that is only appended to; every prefix of it is a consistent earlier
state of the run.  It holds the groups that were drawn and have not left, the samples of their scored members, the
batches that were shipped, and which of those are trained.  With each checkpoint a new file begins, which replaces the
old one when it is whole.  It outlives the controller's process, not the machine: it is not synced.

Format, version 1: the line ``RollArt journal 1\\n``, then blocks as of ``events``, a record in MessagePack in each.
"""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol

import msgspec

from rollart.errors import RunError
from rollart.protocol import TrainGroup, TrainSample, encode_group

__all__ = [
    "Batch",
    "Began",
    "Drew",
    "Dropped",
    "Finished",
    "Journal",
    "JournalStorage",
    "Ledger",
    "Left",
    "OpenGroup",
    "Record",
    "Reserved",
    "Scored",
    "Shipped",
    "Texts",
    "Trained",
]

HEADER = b"RollArt journal 1\n"
_BLOCK = struct.Struct("<II")
RESERVED_AT_ONCE = 4096


class OpenGroup(msgspec.Struct, array_like=True, frozen=True):
    """A group that was drawn."""

    id: int
    task: str
    seed: int


class Texts(msgspec.Struct, array_like=True, frozen=True):
    """A ``controller.record.Record``: (observation, answer, reward) of each turn, and the rest."""

    turns: list[tuple[str, str, float]]
    last: str
    reference: str
    info: dict[str, float]


class Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all records."""


class Began(Record, frozen=True):
    """First in the file: where the run was then.  Its weights are those of ``checkpoint``, empty: the model's own."""

    step: int
    version: int
    checkpoint: str
    source: dict[str, Any]
    """``TaskSource.state()``."""
    next_group: int
    reserved: int
    groups: list[OpenGroup]


class Drew(Record, frozen=True):
    """Groups were opened; ``source`` is the task source's state after that."""

    groups: list[OpenGroup]
    source: dict[str, Any]


class Reserved(Record, frozen=True):
    """Trajectories with ids below ``below`` may exist."""

    below: int


class Scored(Record, frozen=True):
    """A trajectory of an open group is scored, and may be trained on."""

    group: int
    member: int
    attempt: int
    turns: int
    success: float | None
    score: float
    reward: float
    """The environment's."""
    tokens: int
    """Of all its sequences."""
    truncated: str
    trajectory: int
    samples: list[TrainSample]
    texts: Texts | None = None
    """Where a reward function may read them yet: with the other members of its group."""


class Dropped(Record, frozen=True):
    """A scored trajectory won't be trained on."""

    trajectory: int


class Left(Record, frozen=True):
    """A group ended without a batch."""

    group: int
    outcome: str
    error: str


class Shipped(Record, frozen=True):
    """The batch of ``step``, to be trained on version ``before``: (group, its trajectories in order); ``m`` as of
    ``Versions``."""

    step: int
    before: int
    m: int
    groups: list[tuple[int, list[int]]]


class Trained(Record, frozen=True):
    """The batch that was shipped last is trained, or skipped; ``row`` is what its metrics say for sure."""

    step: int
    after: int
    skipped: str
    row: dict[str, Any]


class Finished(Record, frozen=True):
    """The run made all its steps, and ended with success."""


AnyRecord = Began | Drew | Reserved | Scored | Dropped | Left | Shipped | Trained | Finished
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
_encoder = msgspec.msgpack.Encoder()


class Batch(msgspec.Struct):
    """A batch that was shipped; for each group its trajectories, and where they are in the file."""

    step: int
    before: int
    m: int
    groups: list[tuple[OpenGroup, dict[int, int]]]


class Ledger:
    """The state that the records amount to."""

    def __init__(self) -> None:
        self.step = 0
        """The next one."""
        self.version = 0
        self.checkpoint = ""
        self.source: Mapping[str, Any] = {}
        self.next_group = 0
        self.reserved = 0
        self.groups: dict[int, OpenGroup] = {}
        self.scored: dict[int, dict[int, int]] = {}
        """Of each open group: its scored trajectories, and where they are in the file."""
        self.shipped: Batch | None = None
        """In training."""
        self.kept: list[Batch] = []
        """Trained since the checkpoint, in order; skipped ones are not among them."""
        self.left: list[tuple[str, str, str]] = []
        """Groups that left since the source's state was taken: task, outcome, error."""
        self.trained: list[Trained] = []
        """Since the checkpoint, the skipped ones too."""
        self.finished = False
        self._group_of: dict[int, int] = {}

    def apply(self, record: Record, position: int) -> None:
        """``record`` was written at ``position``."""
        match record:
            case Began():
                self.__init__()  # type: ignore[misc]  # all that came before is in it
                self.step, self.version, self.checkpoint = record.step, record.version, record.checkpoint
                self.source, self.next_group, self.reserved = (
                    record.source,
                    record.next_group,
                    record.reserved,
                )
                self._open(record.groups)
            case Drew():
                self._open(record.groups)
                self.next_group = max(self.next_group, *(group.id + 1 for group in record.groups))
                self.source, self.left = record.source, []
            case Reserved():
                self.reserved = record.below
            case Scored():
                if record.group in self.groups:
                    self.scored[record.group][record.trajectory] = position
                    self._group_of[record.trajectory] = record.group
            case Dropped():
                group = self._group_of.pop(record.trajectory, None)
                if group in self.scored:
                    self.scored[group].pop(record.trajectory, None)
            case Left():
                if record.group in self.groups:
                    self.left.append((self.groups[record.group].task, record.outcome, record.error))
                    self._leave(record.group)
            case Shipped():
                self._ship(record)
            case Trained():
                self._trained(record)
            case Finished():
                self.finished = True

    def _open(self, groups: list[OpenGroup]) -> None:
        for group in groups:
            self.groups[group.id] = group
            self.scored[group.id] = {}

    def _leave(self, group: int) -> None:
        del self.groups[group]
        for trajectory in self.scored.pop(group):
            self._group_of.pop(trajectory, None)

    def _ship(self, record: Shipped) -> None:
        batch = Batch(record.step, record.before, record.m, [])
        for id, trajectories in record.groups:
            group, scored = self.groups[id], self.scored[id]
            batch.groups.append((group, {trajectory: scored[trajectory] for trajectory in trajectories}))
            self.left.append((group.task, "shipped", ""))
            self._leave(id)
        self.shipped = batch

    def _trained(self, record: Trained) -> None:
        if self.shipped is not None and not record.skipped:
            self.kept.append(self.shipped)
        self.shipped = None
        self.step, self.version = record.step + 1, record.after
        self.trained.append(record)


class JournalStorage(Protocol):
    """Where a run's journal is."""

    def existing(self) -> BinaryIO:
        """The journal, to read and to append to, unbuffered; ``OSError`` when there is none."""

    def fresh(self) -> BinaryIO:
        """A new one, to read and to append to, which is not the journal yet."""

    def install(self) -> None:
        """What ``fresh`` gave last is the journal from now on, in place of the one before."""


class Journal:
    """Writes the records of a run, and finds again what they hold."""

    def __init__(self, storage: JournalStorage | None, *, before_batch: Callable[[], None]) -> None:
        """``before_batch()`` is called before a record of a group that leaves is written: the events tell of it, and
        must not be behind.  Without ``storage`` nothing is kept, and a lost trainer ends the run."""
        self.ledger = Ledger()
        self._storage = storage
        self._before_batch = before_batch
        self._file: BinaryIO | None = None
        self._end = 0
        self._frozen = False

    # --- beginning ------------------------------------------------------------------------------------

    def begin(self, source: Mapping[str, Any]) -> None:
        """A new run."""
        if self._storage is not None and self._file is None:
            self._write_anew(Began(0, 0, "", dict(source), 0, 0, []))

    def resume(self) -> int:
        """Go on with the journal that is there; how many bytes at its end were no whole record, and are cut off.

        ``RunError`` when it can't be read.
        """
        assert self._storage is not None
        self._file = file = self._storage.existing()
        if _read(file, len(HEADER)) != HEADER:
            raise RunError("the journal is none of this version of RollArt: the run can't be resumed")
        self._end = len(HEADER)
        while (payload := _block(file)) is not None:
            try:
                record = _decoder.decode(payload)
            except msgspec.DecodeError:
                break
            self.ledger.apply(record, self._end)
            self._end += _BLOCK.size + len(payload)
        if self._end == len(HEADER):
            raise RunError("the journal's first record is damaged: the run can't be resumed")
        torn = file.seek(0, io.SEEK_END) - self._end
        file.truncate(self._end)
        return torn

    # --- records --------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._file is not None

    def write(self, record: Record) -> None:
        """Append ``record``; the operating system has it when this returns."""
        if self._file is None or self._frozen:
            return
        if type(record) in (Shipped, Trained, Left):
            self._before_batch()
        position = self._end
        self._append(_encoder.encode(record))
        self.ledger.apply(record, position)

    def reserve(self, id: int) -> None:
        """A trajectory with ``id`` comes to be."""
        if self._file is not None and id >= self.ledger.reserved:
            self.write(Reserved(id + RESERVED_AT_ONCE))

    def freeze(self) -> None:
        """The run ends: what happens from now on did not happen, for one that resumes it."""
        self._frozen = True

    def finish(self) -> None:
        """The run ended with success."""
        self.write(Finished())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, payload: bytes) -> None:
        assert self._file is not None
        block = memoryview(_BLOCK.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.seek(self._end)
        self._end += len(block)
        while block:
            block = block[self._file.write(block) :]

    # --- what is kept ---------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._end

    def scored(self, position: int) -> Scored:
        """The record of a scored trajectory."""
        assert self._file is not None
        record = _decoder.decode(_payload(self._file, position))
        if not isinstance(record, Scored):
            raise RunError(f"the journal is damaged at byte {position}")
        return record

    def frames(self, step: int) -> Iterator[bytes]:
        """The batch of ``step``, an encoded ``TrainGroup`` each; ``RunError`` when it is not kept."""
        batches = [*self.ledger.kept, *([self.ledger.shipped] if self.ledger.shipped else [])]
        for batch in batches:
            if batch.step == step:
                break
        else:
            raise RunError(
                f"the batch of step {step} is not kept: without a journal a lost trainer ends the run"
            )
        for group, positions in batch.groups:
            samples = [sample for each in positions.values() for sample in self.scored(each).samples]
            yield encode_group(TrainGroup(group.id, group.task, samples))

    def checkpointed(self, path: str, step: int, version: int) -> None:
        """The checkpoint ``path`` holds what was trained before ``step``, and is ``version``: begin anew, with what
        came since and what is open."""
        if self._file is None or self._frozen:
            return
        ledger, old = self.ledger, self._file
        kept = {batch.step: batch for batch in ledger.kept if batch.step >= step}
        batches = [*kept.values(), *([ledger.shipped] if ledger.shipped is not None else [])]
        groups = [group for batch in batches for group, _ in batch.groups]
        positions = [at for batch in batches for _, found in batch.groups for at in found.values()]
        positions += [at for found in ledger.scored.values() for at in found.values()]
        began = Began(
            step,
            version,
            path,
            dict(ledger.source),
            ledger.next_group,
            ledger.reserved,
            [*groups, *ledger.groups.values()],
        )
        later: list[Record] = []
        for trained in ledger.trained:
            if trained.step >= step:
                later += [_shipped(kept[trained.step])] if trained.step in kept else []
                later.append(trained)
        if ledger.shipped is not None:
            later.append(_shipped(ledger.shipped))
        self._write_anew(began, (_payload(old, at) for at in positions), later, ledger.left)
        old.close()

    def _write_anew(
        self,
        began: Began,
        scored: Iterable[bytes] = (),
        later: Iterable[Record] = (),
        left: Iterable[tuple[str, str, str]] = (),
    ) -> None:
        assert self._storage is not None
        self._file = self._storage.fresh()
        self._file.write(HEADER)
        self._end = len(HEADER)
        self.ledger = Ledger()
        for payload in itertools.chain([_encoder.encode(began)], scored, map(_encoder.encode, later)):
            position = self._end
            self._append(payload)
            self.ledger.apply(_decoder.decode(payload), position)
        self.ledger.left = list(left)
        self._storage.install()


def _shipped(batch: Batch) -> Shipped:
    return Shipped(
        batch.step, batch.before, batch.m, [(group.id, list(found)) for group, found in batch.groups]
    )


def _payload(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    payload = _block(file)
    if payload is None:
        raise RunError(f"the journal is damaged at byte {position}")
    return payload


def _read(file: BinaryIO, count: int) -> bytes:
    """``count`` bytes, or what there is."""
    found = b""
    while len(found) < count and (more := file.read(count - len(found))):
        found += more
    return found


def _block(file: BinaryIO) -> bytes | None:
    """The payload of the block at the file's position; ``None`` when none that is whole is there."""
    head = _read(file, _BLOCK.size)
    if len(head) < _BLOCK.size:
        return None
    length, checksum = _BLOCK.unpack(head)
    payload = _read(file, length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
