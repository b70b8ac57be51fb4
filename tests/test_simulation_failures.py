"""How systems of this kind have failed their users, where it was about order and time: each a simulated scenario.

Every run is checked against all invariants; a test adds what its failure is about.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollart.config import Config
from rollart.controller import events
from rollart.protocol import Cancel, Generate, Suspend, decode_to_worker
from rollart.simulation import run as run_module
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.faults import Fault, FaultKind
from rollart.simulation.hardware import CPU
from rollart.simulation.network import TO_WORKER, SimNetwork
from rollart.simulation.run import Result, Setup, simulate
from rollart.simulation.scenario import SMALL
from rollart.simulation.workload import Distribution, Family
from rollart.simulation.world import Timings

QUICK = Family(
    turns=Distribution(3, 0.5, low=1, high=6),
    prompt_tokens=Distribution(8),
    observation_tokens=Distribution(4),
    answer_tokens=Distribution(4, 0.8, high=20),
    reset_s=Distribution(0.1, 0.5),
    step_s=Distribution(0.1, 0.5),
)
MINIMAL: dict[str, Any] = {
    "name": "failure",
    "steps": 6,
    "model": {"random": {}},
    "tasks": [
        {
            "name": "Task",
            "environment": "simulated:Family",
            "max_turns": 6,
            "reset_timeout_s": 20.0,
            "step_timeout_s": 20.0,
        }
    ],
    "sampling": {"max_tokens": 20},
    "rollout": {"groups_per_batch": 3, "group_size": 3},
    "trainer": {"step_timeout_s": 60.0},
    "inference": {"workers": 2, "max_model_len": 256, "generate_timeout_s": 60.0, "update_timeout_s": 20.0},
    "environments": {"workers": 2},
    "start_timeout_s": 60.0,
    "heartbeat_s": 1.0,
    "heartbeat_timeout_s": 10.0,
}


def setup_of(
    family: Family = QUICK,
    *,
    token_s: float = 0.02,
    train_s: float = 2.0,
    publish_s: float = 0.2,
    **changes: Any,
) -> Setup:
    """A small run; ``changes`` are merged into the sections of its config."""
    raw = {
        **MINIMAL,
        **{k: {**MINIMAL[k], **v} if isinstance(MINIMAL.get(k), dict) else v for k, v in changes.items()},
    }
    return Setup(
        config=msgspec.convert(raw, Config),
        families={"Task": family},
        timings=Timings(start_s=2.0, pull_s=0.1, load_s=0.05, publish_s=publish_s, save_s=0.0),
        engine=lambda placement: BatchingEngine(
            EngineCosts(CPU, SMALL, step_overhead_s=token_s), token_budget=2048
        ),
        step_s=lambda lengths, scored: train_s,
        delay=lambda worker, size: 0.001,
    )


def outcome(setup: Setup, *faults: Fault, seed: int = 0) -> Result:
    """The run's result; no invariant may be broken."""
    result = simulate(setup, seed=seed, faults=faults, shuffle=True, end_at_s=5000.0)
    assert not result.violations
    return result


def stream(result: Result) -> list[events.Event]:
    return list(events.parse_events(io.BytesIO(result.events), "the run"))


def ends(result: Result) -> Counter[str]:
    """How trajectories ended."""
    moved = [event for event in stream(result) if isinstance(event, events.Moved)]
    return Counter(
        event.reason or event.after for event in moved if event.after in ("consumed", "aborted", "failed")
    )


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str, Any]]:
    """Every message to a worker: (time, worker, message)."""
    found: list[tuple[float, str, Any]] = []
    made = SimNetwork.__init__

    def init(self: SimNetwork, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)

        def tap(direction: str, worker: str, frames: Sequence[bytes]) -> None:
            if direction == TO_WORKER:
                now = run_module.asyncio.get_running_loop().time()
                found.extend((now, worker, message) for message in decode_to_worker(frames[0]))

        self.taps.append(tap)

    monkeypatch.setattr(SimNetwork, "__init__", init)
    return found


# --- versions and staleness -----------------------------------------------------------------------------


@pytest.mark.parametrize("update_at", ["batch", "publish"])
def test_time_in_the_queue_counts_as_age(update_at: str) -> None:
    """2: finished samples waited in a queue and were trained too old."""
    rollout = {"staleness_bound": 1, "update_at": update_at, "redundant_groups": 6}
    result = outcome(setup_of(rollout=rollout, steps=12))
    assert result.outcome == "success"
    assert max(row["staleness_max"] for row in result.rows) <= 1
    assert ends(result)["stale"] > 0, "the surplus waits, gets too old and is aborted"


def test_tokens_of_a_generation_that_spans_an_update_have_both_versions() -> None:
    """3: the version was stamped when the answer came back."""
    long = msgspec.structs.replace(QUICK, answer_tokens=Distribution(18), turns=Distribution(5))
    rollout = {"update_at": "publish", "staleness_bound": 3}
    result = outcome(setup_of(long, token_s=0.1, rollout=rollout))
    spanning = [e for e in stream(result) if isinstance(e, events.Sampled) and len(e.versions) > 1]
    assert spanning, "else this shows nothing; the token-wise check of versions is in every run"


@pytest.mark.parametrize("seed", range(4))
def test_alpha_0_is_exactly_on_policy(seed: int) -> None:
    """5: "on-policy" mode was in fact one step off."""
    result = outcome(setup_of(rollout={"update_at": "publish", "staleness_bound": 0}), seed=seed)
    assert result.outcome == "success"
    assert {row["train_lag_max"] for row in result.rows} == {0}


# --- lost and doubled -----------------------------------------------------------------------------------


def test_a_late_answer_of_a_timed_out_attempt_changes_nothing() -> None:
    """11: a timed-out attempt was started again, then the first attempt's answer came."""
    hang = Fault(12.0, FaultKind.HANG, "environment-0", 25.0)
    result = outcome(setup_of(heartbeat_timeout_s=60.0, steps=20, rollout={"retries": 3}), hang)
    assert result.outcome == "success"
    retried = [e for e in stream(result) if isinstance(e, events.Moved) and e.reason == "env_timeout"]
    assert retried, "the hang outlasts the deadline of requests that wait there"
    assert sum(row.get("late_answers", 0) for row in result.rows) > 0, "and their answers do come"


def test_a_lost_answer_to_a_train_step_never_makes_two_steps() -> None:
    """12: a reply to the optimiser step was lost, the call was retried: two steps."""
    lost = Fault(13.0, FaultKind.PARTITION, "trainer-0", 70.0)
    result = outcome(setup_of(heartbeat_timeout_s=500.0), lost)
    assert result.outcome == "success"
    gone = [e for e in stream(result) if isinstance(e, events.WorkerChanged) and e.state == "gone"]
    assert "did not answer TrainStep" in gone[0].reason, (
        "the trainer is replaced, and goes on from before the step"
    )
    assert result.lineage == list(range(6))


def test_doubled_answers_count_once() -> None:
    doubles = [
        Fault(10.0 + i, FaultKind.DOUBLE, worker)
        for i, worker in enumerate(["inference-0", "environment-1", "trainer-0", "inference-1"] * 3)
    ]
    assert outcome(setup_of(), *doubles).outcome == "success"


def test_all_producers_dead_ends_the_run_with_the_cause() -> None:
    """10: all producers were dead; the trainer polled an empty buffer for hours."""
    crashes = [Fault(15.0, FaultKind.CRASH, f"environment-{i}", 0.0) for i in range(2)]
    result = outcome(setup_of(steps=1000, environments={"restarts": 0}), *crashes)
    assert result.outcome == "error"
    assert "no environment worker is left" in result.cause
    assert result.seconds < 15.0 + 10, "in seconds"
    assert outcome(setup_of(), *crashes).outcome == "success", "they are started again"


def test_one_bad_trajectory_reaches_no_other() -> None:
    """9: one bad trajectory in some hundred ended a run."""
    result = outcome(
        setup_of(steps=12, rollout={"retries": 0}), Fault(12.0, FaultKind.FAIL, "environment-0", 1.0)
    )
    assert result.outcome == "success"
    assert ends(result)["env_error"] == 1


def test_a_wait_names_what_it_waits_for() -> None:
    """8: the batch waited at 127 of 128 for a day with nothing in the log."""
    slow = msgspec.structs.replace(QUICK, step_s=Distribution(4000.0))
    setup = setup_of(slow, tasks=[{**MINIMAL["tasks"][0], "step_timeout_s": 1e6}])
    result = simulate(setup, seed=0, end_at_s=600.0)
    assert "0 of 3 groups complete" in result.waiting_for
    assert "(stepping)" in result.waiting_for


# --- abort and continue ---------------------------------------------------------------------------------


def test_an_answer_that_spans_updates_keeps_its_token_budget() -> None:
    """14: after abort and continue the token budget was wrong."""
    long = msgspec.structs.replace(QUICK, answer_tokens=Distribution(15), turns=Distribution(4))
    result = outcome(setup_of(long, token_s=0.1, rollout={"update_at": "publish", "staleness_bound": 3}))
    lengths = {e.tokens for e in stream(result) if isinstance(e, events.Sampled)}
    assert lengths == {15}


def test_a_slow_judge_does_not_hold_a_group_that_is_complete() -> None:
    """15: abandoned surplus trajectories were waited for because their judge was slow."""
    judged = msgspec.structs.replace(
        QUICK, reward_s=Distribution(0.1, second=Distribution(900.0), second_share=0.2)
    )
    result = outcome(setup_of(judged, rollout={"redundant_members": 3}))
    assert result.outcome == "success"
    scoring = [
        e
        for e in stream(result)
        if isinstance(e, events.Moved) and (e.before, e.reason) == ("scoring", "redundant")
    ]
    assert scoring, "members were cut while they were judged"
    assert result.seconds < 900


def test_a_cancelled_request_leaves_the_engine(heard: list[tuple[float, str, Any]]) -> None:
    """16: a cancel on the client side left the engine decoding."""
    result = outcome(setup_of(token_s=0.1, rollout={"redundant_members": 3, "redundant_groups": 2}))
    assert any(isinstance(message, Cancel) for _, _, message in heard)
    engines = [worker.engine for worker in result.workers if worker.role == "inference"]
    assert [engine.running + engine.waiting for engine in engines] == [0, 0]


# --- weights --------------------------------------------------------------------------------------------


def test_a_weight_transfer_that_hangs_takes_its_worker_out() -> None:
    """22: a weight transfer had no deadline and hung for ever."""
    hang = Fault(11.0, FaultKind.HANG, "inference-0", 1e6)
    result = outcome(setup_of(heartbeat_timeout_s=900.0), hang)
    assert result.outcome == "success"
    gone = [e for e in stream(result) if isinstance(e, events.WorkerChanged) and e.state == "gone"]
    assert "did not answer" in gone[0].reason


@pytest.mark.parametrize("publish_s", [0.0, 50.0])
@pytest.mark.parametrize("train_s", [0.0, 50.0])
@pytest.mark.parametrize("token_s", [0.0, 0.5])
@pytest.mark.parametrize("update_at", ["batch", "publish"])
def test_the_run_ends_under_every_ratio_of_speeds(
    update_at: str, token_s: float, train_s: float, publish_s: float
) -> None:
    """23: at the end of the run one side waited for a version that would never come."""
    setup = setup_of(
        token_s=token_s, train_s=train_s, publish_s=publish_s, steps=4, rollout={"update_at": update_at}
    )
    result = outcome(setup)
    assert result.outcome == "success"
    swaps = [e.version for e in stream(result) if isinstance(e, events.Swapped)]
    assert max(swaps) == 4, "the last version is served before the run ends"


def test_a_restarted_engine_serves_only_verified_weights(heard: list[tuple[float, str, Any]]) -> None:
    """24: a restarted engine answered requests before it had the current weights."""
    result = outcome(setup_of(steps=20), Fault(15.0, FaultKind.CRASH, "inference-1", 3.0))
    assert result.outcome == "success"
    served = [
        e.t
        for e in stream(result)
        if isinstance(e, events.Swapped) and e.worker == "inference-1" and e.t > 15
    ]
    asked = [t for t, worker, m in heard if isinstance(m, Generate) and worker == "inference-1" and t > 16]
    assert served and asked, "it came back, and was used again"
    assert min(asked) >= min(served)


def test_old_weights_that_claim_to_be_new_are_seen() -> None:
    result = outcome(setup_of(), Fault(12.0, FaultKind.OLD_WEIGHTS, "inference-0"))
    gone = [e for e in stream(result) if isinstance(e, events.WorkerChanged) and e.state == "gone"]
    assert "its canary differs" in gone[0].reason
    assert result.outcome == "success", "the other worker goes on"


# --- control and resources ------------------------------------------------------------------------------


def test_control_is_not_queued_behind_data(heard: list[tuple[float, str, Any]]) -> None:
    """27: generate calls filled the worker's slots and the suspend call never got through."""
    long = msgspec.structs.replace(QUICK, answer_tokens=Distribution(20))
    setup = setup_of(
        long,
        token_s=0.3,
        rollout={"groups_per_batch": 8, "group_size": 8, "update_at": "publish", "staleness_bound": 3},
        inference={
            **MINIMAL["inference"],
            "workers": 1,
            "max_num_seqs": 2,
            "max_requests": 100,
            "generate_timeout_s": 4000.0,
        },
        steps=3,
    )
    result = outcome(setup)
    assert result.outcome == "success"
    assert any(isinstance(message, Suspend) for _, _, message in heard)
    swaps = [e for e in stream(result) if isinstance(e, events.Swapped) and e.before >= 0]
    assert max(e.in_flight for e in swaps) > 20, "many requests waited"
    assert max(e.suspend_s for e in swaps) < 1, "none of them held the suspend up for longer than a step"


def test_a_task_that_always_fails_ends_the_run_and_says_so() -> None:
    """34: a sandbox outage produced failing episodes without end."""
    broken = msgspec.structs.replace(QUICK, reset_failure=1.0)
    result = outcome(setup_of(broken))
    assert result.outcome == "error"
    assert "groups in a row ended without enough scored members" in result.cause
    assert "the environment failed" in result.cause


def test_a_batch_without_signal_is_reported() -> None:
    """36: the shipped example's advantages were all zero; nobody was told."""
    hopeless = msgspec.structs.replace(QUICK, success=0.0)
    result = outcome(setup_of(hopeless, rollout={"filter_groups": True, "max_filtered_groups": 20}))
    assert result.outcome == "error"
    assert "the run gets no signal" in result.cause


def test_the_trainer_works_while_the_batch_still_forms() -> None:
    """Blocking get_batch left the trainer idle until the last group was there, and then all were computed on."""

    def run(stream_batch: bool) -> tuple[float, list[events.Event]]:
        setup = setup_of(
            msgspec.structs.replace(QUICK, step_s=Distribution(0.5, 1.2)),
            rollout={"update_at": "publish", "staleness_bound": 0, "groups_per_batch": 8, "group_size": 4},
            trainer={"stream_batch": stream_batch},
            steps=6,
        )
        setup = msgspec.structs.replace(setup, step_s=lambda lengths, scored: 0.1 * len(lengths))
        result = outcome(setup)
        assert result.outcome == "success"
        return result.seconds, stream(result)

    (blocking_s, blocking), (streaming_s, streaming) = run(False), run(True)
    assert streaming_s < 0.9 * blocking_s
    for told in (blocking, streaming):
        trained = [event for event in told if isinstance(event, events.TrainedStep)]
        assert [event.step for event in trained] == list(range(6))
        assert all(len(event.samples) == 32 for event in trained)
