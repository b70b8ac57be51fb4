"""The trainer dies: another goes on from its last checkpoint, and every batch is trained once in what survives."""

from __future__ import annotations

import pytest

from rollart.controller import events
from rollart.simulation.faults import Fault, FaultKind
from tests.test_simulation_failures import outcome, setup_of, stream


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("update_at", ["batch", "publish"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_since_the_checkpoint_are_trained_again(update_at: str, every: int, seed: int) -> None:
    """4: the version counter restarted after the trainer failed over.  Each sampled token and each step is checked in
    every simulated run: the surviving weights are of every step once, in order."""
    setup = setup_of(steps=16, trainer={"checkpoint_every": every}, rollout={"update_at": update_at})
    deaths = [
        Fault(13.0 + 0.7 * seed, FaultKind.CRASH, "trainer-0", 0.5),
        Fault(31.0 + 1.3 * seed, FaultKind.CRASH, "trainer-0", 6.0),
    ]
    result = outcome(setup, *deaths, seed=seed)
    assert result.outcome == "success" and result.faults["crash"] == 2
    published = [e.version for e in stream(result) if isinstance(e, events.Published)]
    assert published == list(range(17)), "each version once, though some steps were made twice"
    assert result.lineage == list(range(16))


def test_inference_goes_on_within_the_bound_meanwhile() -> None:
    result = outcome(setup_of(steps=10, train_s=4.0), Fault(21.0, FaultKind.CRASH, "trainer-0", 20.0))
    assert result.outcome == "success"
    away = [e.t for e in stream(result) if isinstance(e, events.Sampled) and 21.5 < e.t < 40]
    assert away, "trajectories went on while the trainer was away"
    assert max(row["staleness_max"] for row in result.rows) <= 1


def test_a_trainer_that_never_comes_back_ends_the_run_with_its_reason() -> None:
    setup = setup_of(steps=30, trainer={"restarts": 2})
    result = outcome(setup, Fault(13.0, FaultKind.CRASH, "trainer-0", 0.0))
    assert result.outcome == "error"
    assert "the trainer trainer-0 is lost" in result.cause and "its machine is down" in result.cause


def test_a_trainer_that_hangs_is_ended_and_replaced() -> None:
    result = outcome(setup_of(steps=20), Fault(21.0, FaultKind.HANG, "trainer-0", 1e6))
    assert result.outcome == "success"
