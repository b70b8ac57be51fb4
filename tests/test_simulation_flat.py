"""I10, flatness: what the controller holds does not grow with the length of a run."""

from __future__ import annotations

import gc
import io
import tracemalloc

import msgspec
import pytest

from rollart.controller import events
from rollart.controller.deadlines import Deadlines
from rollart.controller.invariants import Invariants
from rollart.simulation import run
from rollart.simulation.output import MemoryOutput
from rollart.simulation.run import simulate
from rollart.simulation.scenario import draw_scenario

STEPS, FIRST, LAST = 80, 20, 78
WHERE = [tracemalloc.Filter(True, "*/rollart/*"), tracemalloc.Filter(True, "*/asyncio/*")]
OUTPUT = [tracemalloc.Filter(False, name) for name in ("*/simulation/*", "*/controller/progress.py")]
"""What is held because the simulation keeps it."""


class Nowhere(io.BytesIO):
    def write(self, data: object) -> int:
        return len(data)  # type: ignore[arg-type]


class NoOutput(MemoryOutput):
    def open_events(self, *, more: bool = False) -> io.BytesIO:
        return Nowhere()

    def open_metrics(self, *, more: bool = False) -> io.StringIO:
        return io.TextIOWrapper(Nowhere())  # type: ignore[return-value]


class Sizes(Invariants):
    """Listens to the events in the place of the checker, which remembers every trajectory."""

    taken: dict[int, int]

    def __init__(self) -> None:
        super().__init__()
        Sizes.taken = {}

    def feed(self, event: events.Event) -> None:
        if isinstance(event, events.TrainedStep) and event.step in (FIRST, LAST):
            gc.collect()
            held = tracemalloc.take_snapshot().filter_traces(WHERE).filter_traces(OUTPUT)
            self.taken[event.step] = sum(trace.size for trace in held.traces)


def growth(monkeypatch: pytest.MonkeyPatch, seed: int) -> int:
    """Bytes that a run holds more towards its end than at its beginning."""
    monkeypatch.setattr(run, "MemoryOutput", NoOutput)
    monkeypatch.setattr(run, "Invariants", Sizes)
    setup = draw_scenario(seed).setup
    config = msgspec.structs.replace(setup.config, steps=STEPS)
    tracemalloc.start(1)
    try:
        result = simulate(msgspec.structs.replace(setup, config=config), seed=seed, check=False)
    finally:
        tracemalloc.stop()
    assert result.outcome == "success"
    return Sizes.taken[LAST] - Sizes.taken[FIRST]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_long_run_holds_no_more_than_a_short_one(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert growth(monkeypatch, seed) < 16_384


def test_what_is_kept_for_each_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadlines, "clear", lambda self, seq, timeout_s: None)
    assert growth(monkeypatch, 3) > 32_768
