"""Frames that random mutation makes: no crash, no hang, no growth; the rest of a frame still counts.

``python -m tests.failures.test_frames 1000000`` does more of it.
"""

from __future__ import annotations

import io
import random
import sys
import tracemalloc

import msgspec

from rollart.controller.events import EventLog, Moved, cut_torn, parse_events
from rollart.controller.journal import Began, Dropped, Journal, Left
from rollart.errors import RunError
from rollart.protocol import (
    Beat,
    Failure,
    FailureKind,
    Generate,
    Generated,
    Hello,
    Observation,
    Role,
    Trained,
    TrainStep,
    Update,
    VersionRun,
    decode_to_controller,
    decode_to_worker,
    encode,
    salvage_to_controller,
    salvage_to_worker,
)
from rollart.simulation.output import MemoryJournal

COUNT = 20_000
TO_CONTROLLER = [
    encode(Hello(1, Role.INFERENCE, "inference-0", 7, "H800", {"vllm": "1"})),
    encode(Beat(1, 0), Generated(3, b"\1\0\0\0", b"\0\0\0\xbf", [VersionRun(1, 1)], "stop", 0)),
    encode(Observation(4, b"\1\0\0\0", 0.5, False, {"success": 1.0}, "text", "answer"), Beat(2, 0)),
    encode(Failure(5, FailureKind.TIMEOUT, "late"), Trained(6, 1, 2, "", {"loss": 0.5})),
]
TO_WORKER = [
    encode(Generate(1, "0.0.0.1", b"\1\0\0\0", 4, 1.0, b"", b"", False, None)),
    encode(Update(2, 3, b"\1\0\0\0"), TrainStep(3, 1, 2, 1, 1.0)),
]
DECODERS = [
    (TO_CONTROLLER, decode_to_controller, salvage_to_controller),
    (TO_WORKER, decode_to_worker, salvage_to_worker),
]


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """A few bytes changed, cut out, put in or repeated; sometimes nothing but noise."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
            case 1:
                del data[at : at + rng.randint(1, 9)]
            case 2 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 3:
                data[at:at] = data[at : at + 12]
            case 4 if rng.random() < 0.1:
                data = bytearray(rng.randbytes(rng.randint(0, 60)))
    return bytes(data)


def fuzz(count: int, seed: int = 0) -> int:
    """Decode so many mutated frames; how many of them were none."""
    rng, refused = random.Random(seed), 0
    for _ in range(count):
        frames, decode, salvage = rng.choice(DECODERS)
        frame = mutated(rng, rng.choice(frames))
        try:
            decode(frame)
        except msgspec.DecodeError:
            refused += 1
            salvage(frame)
    return refused


def test_mutated_frames_are_refused_or_decoded_and_nothing_else() -> None:
    fuzz(1000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    refused = fuzz(COUNT, seed=1)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert COUNT / 10 < refused < COUNT
    assert grown < 100_000


def test_a_mutated_journal_is_cut_where_it_is_wrong() -> None:
    """Whatever the damage, what is read is a prefix of what was written; only a ruined beginning is an error."""
    storage = MemoryJournal()
    journal = Journal(storage, before_batch=lambda: None)
    journal.begin({})
    for number in range(20):
        journal.write(Dropped(number))
        journal.write(Left(number, "filtered", ""))
    rng, content = random.Random(2), storage.content
    lengths = set()
    for _ in range(500):
        damaged = MemoryJournal(mutated(rng, content))
        again = Journal(damaged, before_batch=lambda: None)
        try:
            again.resume()
        except RunError:
            continue
        lengths.add(again.size_bytes)
        assert content.startswith(damaged.content[: again.size_bytes])
    assert len(lengths) > 10
    assert isinstance(Began(0, 0, "", {}, 0, 0, []), Began)


def test_a_torn_event_stream_goes_on_behind_its_last_whole_block() -> None:
    file = io.BytesIO()
    log = EventLog(file)
    for number in range(50):
        log.write(Moved(float(number), 1, 0, "pending", "resetting", "", "", 0, 0))
        log.flush()
    content = file.getvalue()
    for cut in range(len(content), 0, -7):
        torn = io.BytesIO(content[:cut])
        cut_torn(torn)
        times = [event.t for event in parse_events(io.BytesIO(torn.getvalue()), "torn")]
        assert times == [float(number) for number in range(len(times))]


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    sys.stdout.write(f"{wanted:,} mutated frames: {fuzz(wanted, seed=3):,} refused, the others decoded\n")
