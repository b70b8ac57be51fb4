"""Frames and deadlines: what is cheap by design must still be exact."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rollart import outbox
from rollart.channel import LARGE_BYTES, MAX_DRAIN, Channel
from rollart.controller import events
from rollart.controller.deadlines import Deadlines
from rollart.controller.events import EventLog, read_events
from rollart.outbox import Outbox
from rollart.packing import count_unsound, pack_floats
from rollart.protocol import (
    Beat,
    Cancel,
    Done,
    Failure,
    FailureKind,
    Message,
    TrainGroup,
    TrainPart,
    TrainSample,
    decode_to_controller,
    decode_to_worker,
    encode,
    encode_group,
    salvage_to_controller,
)
from rollart.simulation.loop import VirtualLoop

# --- log-probabilities ----------------------------------------------------------------------------------

edges = [0.0, -0.0, -1e-45, -3.4e38, -1.7e38, 1e-45, 1e-30, 1.0, math.inf, -math.inf, math.nan]


@given(st.lists(st.floats(width=32) | st.sampled_from(edges), max_size=40))
def test_unsound_log_probabilities_are_counted(values: list[float]) -> None:
    packed = pack_floats(values)
    held = struct.unpack(f"<{len(values)}f", packed)
    assert count_unsound(packed) == sum(not (math.isfinite(value) and value <= 0) for value in held)


# --- frames ---------------------------------------------------------------------------------------------

answers = st.lists(
    st.builds(Done, st.integers(0, 2**63 - 1)) | st.builds(Beat, st.integers(0, 9), st.just(0))
)


@given(answers)
def test_a_frame_holds_its_messages_in_order(messages: list[Message]) -> None:
    assert decode_to_controller(encode(*messages)) == messages


@given(answers, st.integers(0, 5))
def test_a_message_that_is_none_costs_no_other(messages: list[Message], at: int) -> None:
    parts = [msgspec.msgpack.decode(msgspec.msgpack.encode(message)) for message in messages]
    frame = msgspec.msgpack.encode([*parts[:at], ["Nothing", 1], *parts[at:]])
    with pytest.raises(msgspec.DecodeError):
        decode_to_controller(frame)
    assert salvage_to_controller(frame) == messages
    assert salvage_to_controller(frame[:-1]) == []


async def test_what_is_said_in_one_turn_of_the_loop_leaves_in_one_frame() -> None:
    sent: list[list[bytes]] = []
    box = Outbox(sent.append)
    for seq in range(5):
        box.add(Cancel(seq))
    assert sent == []
    await asyncio.sleep(0)
    assert [decode_to_worker(frames[0]) for frames in sent] == [[Cancel(seq) for seq in range(5)]]
    await asyncio.sleep(0)
    assert len(sent) == 1, "an empty outbox sends nothing"


async def test_what_cannot_be_sent_costs_no_other_its_place() -> None:
    sent: list[list[bytes]] = []
    box = Outbox(sent.append)
    for seq in range(8):
        if seq == 2:
            with pytest.raises(UnicodeEncodeError):
                box.add(Failure(seq, FailureKind.DETERMINISTIC, "no Unicode: \ud83d"))
        else:
            box.add(Done(seq))
    await asyncio.sleep(0)
    assert decode_to_controller(sent[0][0]) == [Done(seq) for seq in range(8) if seq != 2]


def test_an_event_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    log = EventLog((tmp_path / "events").open("xb"))
    before, after = events.Ended(1.0, "success", ""), events.Ended(3.0, "success", "")
    log.write(before)
    with pytest.raises(UnicodeEncodeError):
        log.write(events.Ended(2.0, "error", "\ud83d"))
    log.write(after)
    log.close()
    assert list(read_events(tmp_path / "events")) == [before, after]


async def test_a_full_outbox_and_a_payload_leave_at_once_and_in_order() -> None:
    sent: list[list[bytes]] = []
    box = Outbox(lambda frames: sent.append(list(frames)))
    for seq in range(outbox.MOST_MESSAGES + 1):
        box.add(Cancel(seq))
    payload = [b"a", b"b"]
    box.add_with(TrainPart(999, 0, 0), payload)
    assert payload == [], "the frames are not held twice"
    box.add(Cancel(1000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    heard = [message.seq for frames in sent for message in decode_to_worker(frames[0])]  # type: ignore[union-attr]
    assert heard == [*range(outbox.MOST_MESSAGES + 1), 999, 1000]
    assert [len(frames) for frames in sent] == [1, 1, 3, 1]


# --- deadlines ------------------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(
        st.floats(0, 10),  # made at
        st.sampled_from([0.5, 1.0, 4.0]),  # patience
        st.none() | st.floats(0, 6),  # answered after
    ),
    max_size=30,
)


@given(requests)
def test_a_request_expires_exactly_when_it_was_not_answered_in_time(
    made: list[tuple[float, float, float | None]],
) -> None:
    loop = VirtualLoop()  # type: ignore[abstract]
    expired: dict[int, float] = {}

    async def main() -> None:
        def expire(seq: int) -> None:
            assert seq not in expired
            expired[seq] = loop.time()

        deadlines = Deadlines(expire)
        for seq, (at, patience, answered) in enumerate(made):
            loop.call_at(at, deadlines.set, seq, patience)
            if answered is not None and answered < patience:
                loop.call_at(at + answered, deadlines.clear, seq, patience)
        await asyncio.sleep(20)
        deadlines.close()

    loop.run_until_complete(main())
    loop.close()
    late = {seq: at + p for seq, (at, p, answered) in enumerate(made) if answered is None or answered >= p}
    assert expired.keys() == late.keys()
    assert all(expired[seq] == pytest.approx(due) for seq, due in late.items())


def test_deadlines_leave_no_timer() -> None:
    loop = VirtualLoop()  # type: ignore[abstract]

    async def main() -> None:
        never: Callable[[int], None] = lambda seq: pytest.fail(f"{seq} expired")  # noqa: E731
        deadlines = Deadlines(never)
        deadlines.set(1, 5.0)
        deadlines.clear(1, 5.0)
        deadlines.set(2, 5.0)
        deadlines.close()
        deadlines.clear(2, 5.0)

    loop.run_until_complete(main())
    assert loop.waiting() == []
    loop.close()


# --- sockets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 100, LARGE_BYTES - 1, LARGE_BYTES, 3_000_000])
async def test_a_payload_of_any_size_arrives_whole_and_can_be_decoded(size: int) -> None:
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://payload")
    right.connect("inproc://payload")
    heard: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
    receiver, sender = Channel(right, heard.set_result), Channel(left, lambda frames: None)
    receiver.start()
    sender.start()
    group = TrainGroup(1, "Task", [TrainSample(2, bytes(size), b"", b"", [], 0.5)])
    frames = [encode(TrainPart(1, 0, 0)), encode_group(group)]
    sender.send(frames)
    assert frames == [], "what has left is not held"
    async with asyncio.timeout(5):
        message, payload = await heard
    assert decode_to_worker(message) == [TrainPart(1, 0, 0)]
    assert msgspec.msgpack.decode(payload, type=TrainGroup) == group
    del payload
    heard.result().clear()
    receiver.close(linger_ms=0)
    sender.close(linger_ms=0)
    context.destroy(linger=0)


@pytest.mark.parametrize("pieces", [2, 0])
async def test_a_flood_does_not_starve_the_loop(pieces: int) -> None:
    """However much has arrived, other callbacks run between portions of it; garbage begins no work and counts too."""
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://flood")
    right.connect("inproc://flood")
    for _ in range(10 * MAX_DRAIN):
        left.send(encode(Done(1), Done(2)))
    portions = [0]

    def hear(frames: list[bytes]) -> int:
        portions[-1] += 2
        return pieces

    channel = Channel(right, hear)
    channel.start()
    while sum(portions) < 20 * MAX_DRAIN:
        await asyncio.sleep(0)
        portions.append(0)
    assert max(portions) <= MAX_DRAIN * (2 if pieces == 0 else 1)
    channel.close(linger_ms=0)
    context.destroy(linger=0)
