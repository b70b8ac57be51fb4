"""The controller is killed at any point and its run resumed: no prompt is skipped, none is trained twice.

Each simulated run checks the order of the tasks, each token, and that the final weights are of every step once
(``rollart.simulation.order``); the fuzz kills controllers too.
"""

from __future__ import annotations

import pytest

from rollart.controller import events
from rollart.simulation.faults import Fault, FaultKind
from rollart.simulation.run import Result
from tests.test_simulation_failures import outcome, setup_of, stream


def killed(at_s: float, write: int = 0) -> Fault:
    return Fault(at_s, FaultKind.KILL_CONTROLLER, "controller", write)


@pytest.mark.parametrize("update_at", ["batch", "publish"])
@pytest.mark.parametrize("write", [0, 1, 2, 3, 5, 8, 13, 21])
def test_a_resumed_run_skips_and_doubles_nothing(update_at: str, write: int) -> None:
    """26: the data cursor ran ahead of training; what was in flight was lost at resume."""
    setup = setup_of(steps=10, rollout={"update_at": update_at}, trainer={"checkpoint_every": 4})
    result = outcome(setup, killed(9.0 + write * 0.3, write), killed(24.0, write), seed=write)
    assert result.outcome == "success" and result.faults["kill_controller"] == 2
    assert [row["step"] for row in result.rows] == list(range(10))
    assert result.lineage == list(range(10))


def most_open(result: Result) -> int:
    """Groups that were open at one time after the run was resumed."""
    group_of: dict[int, int] = {}
    opened: set[int] = set()
    most, resumed = 0, False
    for event in stream(result):
        match event:
            case events.Resumed():
                resumed = True
                opened = {group_of[kept.trajectory] for kept in event.kept if kept.trajectory in group_of}
            case events.Dispatched():
                group_of[event.trajectory] = event.group
                opened.add(event.group)
            case events.GroupEnded():
                opened.discard(event.group)
            case _:
                pass
        most = max(most, len(opened)) if resumed else 0
    return most


@pytest.mark.parametrize("at_s", [12.0, 17.3, 23.9])
def test_after_a_resume_the_headroom_is_what_the_bound_gives(at_s: float) -> None:
    """1: after a resume the count of accepted trajectories restarted at zero while the version did not."""
    result = outcome(setup_of(steps=12, rollout={"staleness_bound": 1}), killed(at_s))
    assert result.outcome == "success"
    batches = 2 + 1  # alpha + 1, and the one in training
    assert most_open(result) <= batches * 3
    assert max(row["staleness_max"] for row in result.rows) <= 1


def test_scored_trajectories_within_the_bound_are_kept() -> None:
    result = outcome(setup_of(steps=10), killed(14.1))
    (resumed,) = [e for e in stream(result) if isinstance(e, events.Resumed)]
    assert resumed.kept
    trained = {s.trajectory for e in stream(result) if isinstance(e, events.TrainedStep) for s in e.samples}
    assert any(kept.trajectory in trained for kept in resumed.kept)


def test_a_trainer_that_dies_after_the_resume_is_restored_from_the_same_journal() -> None:
    result = outcome(setup_of(steps=12), killed(16.0), Fault(30.0, FaultKind.CRASH, "trainer-0", 0.5))
    assert result.outcome == "success" and result.lineage == list(range(12))
