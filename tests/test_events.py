"""The event stream's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.controller import events
from rollart.controller.events import EventLog, read_events
from rollart.protocol import VersionRun

EVENTS: list[events.Event] = [
    events.Started(0.0, 1.5, "0.1.0", "name", 1, "batch", 8),
    events.Sampled(0.5, 1, 0, 0, "inference-0", 0, 2, 2, 0, [VersionRun(0, 2)], "length", 0),
    events.TrainedStep(2.0, 0, 0, 1, "", [events.TrainedSample(1, 5, 2, [VersionRun(0, 2)])]),
    events.Ended(3.0, "success", ""),
]


def written(path: Path, *, blocks: int = 2) -> Path:
    """The events in so many blocks."""
    log = EventLog(path.open("xb"))
    for number, event in enumerate(EVENTS, 1):
        log.write(event)
        if number * blocks % len(EVENTS) == 0:
            log.flush()
    log.close()
    return path


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    assert list(read_events(written(tmp_path / "events"))) == EVENTS


def test_a_torn_last_block_ends_the_stream(tmp_path: Path) -> None:
    path = written(tmp_path / "events", blocks=len(EVENTS))
    whole = path.read_bytes()
    for cut in range(len(events.HEADER), len(whole)):
        path.write_bytes(whole[:cut])
        assert list(read_events(path)) == EVENTS[: len(list(read_events(path)))]
    path.write_bytes(whole[:-1])
    assert list(read_events(path)) == EVENTS[:-1]


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "events")
    data = bytearray(path.read_bytes())
    data[len(events.HEADER) + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        list(read_events(path))
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no RollArt event stream"):
        list(read_events(path))
