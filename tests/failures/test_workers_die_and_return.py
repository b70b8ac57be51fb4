"""Workers that die, hang or are taken out come back by themselves; one that never works again is removed."""

from __future__ import annotations

from rollart.controller import events
from rollart.simulation.faults import Fault, FaultKind
from tests.test_simulation_failures import MINIMAL, outcome, setup_of, stream


def changes(result: object, worker: str) -> list[str]:
    """The states of ``worker``, in order."""
    return [e.state for e in stream(result) if isinstance(e, events.WorkerChanged) and e.worker == worker]  # type: ignore[arg-type]


def test_the_only_inference_worker_dies_and_the_run_waits_for_its_successor() -> None:
    setup = setup_of(steps=10, inference={**MINIMAL["inference"], "workers": 1})
    result = outcome(setup, Fault(15.0, FaultKind.CRASH, "inference-0", 0.1))
    assert result.outcome == "success"
    assert changes(result, "inference-0")[:5] == ["joining", "ready", "gone", "joining", "ready"]


def test_a_worker_that_hangs_is_ended_and_started_again() -> None:
    setup = setup_of(steps=40)
    for worker in ("inference-0", "environment-0"):
        result = outcome(setup, Fault(15.0, FaultKind.HANG, worker, 1e6))
        assert result.outcome == "success"
        assert changes(result, worker)[:5] == ["joining", "ready", "gone", "joining", "ready"]


def test_a_worker_that_fails_again_and_again_is_removed_with_the_reason() -> None:
    inference = {**MINIMAL["inference"], "restarts": 3}
    result = outcome(
        setup_of(steps=60, inference=inference), Fault(15.0, FaultKind.CRASH, "inference-0", 0.0)
    )
    assert result.outcome == "success", "the other one goes on"
    assert changes(result, "inference-0") == ["joining", "ready", "gone", "removed"]
    (removed,) = [e for e in stream(result) if isinstance(e, events.WorkerChanged) and e.state == "removed"]
    assert "its machine is down" in removed.reason


def test_the_run_ends_when_nothing_is_left_to_wait_for() -> None:
    inference = {**MINIMAL["inference"], "workers": 1, "restarts": 2}
    result = outcome(
        setup_of(steps=1000, inference=inference), Fault(15.0, FaultKind.CRASH, "inference-0", 0.0)
    )
    assert result.outcome == "error"
    assert "no inference worker is left" in result.cause and "its machine is down" in result.cause
    assert result.seconds < 15 + 15
