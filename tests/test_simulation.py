"""The simulated controller is the shipping one; the same seed gives the same run; planted bugs are seen."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.controller.controller import Controller
from rollart.controller.journal import Journal
from rollart.controller.llm_proxy import LLMProxy
from rollart.controller.rollout import Rollout
from rollart.controller.sample_buffer import Orders, SampleBuffer
from rollart.controller.staleness import Bound
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trajectory import Trajectory
from rollart.protocol import FailureKind, Hello
from rollart.simulation import command_line, fuzz, run
from rollart.simulation.fuzz import Verdict, run_seed, shrink
from rollart.simulation.run import simulate
from rollart.simulation.scenario import draw_scenario

SEEDS = range(60)


def digest(seed: int) -> str:
    scenario = draw_scenario(seed)
    result = simulate(scenario.setup, seed=seed, faults=scenario.faults, shuffle=True)
    return hashlib.sha256(result.events + json.dumps(result.rows).encode()).hexdigest()


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return [run_seed(seed) for seed in SEEDS]


def test_no_invariant_breaks_under_drawn_faults(verdicts: list[Verdict]) -> None:
    assert not {verdict.seed: verdict.wrong for verdict in verdicts if verdict.wrong}


def test_the_seeds_reach_every_kind_of_end_and_fault(verdicts: list[Verdict]) -> None:
    """Else the test above could not fail."""
    assert {verdict.outcome for verdict in verdicts} == {"success", "error"}
    assert sum(verdict.transitions for verdict in verdicts) > 10_000
    assert len({kind for verdict in verdicts for kind in verdict.faults}) >= 10


def test_the_simulated_controller_is_the_shipping_one() -> None:
    assert run.Controller is Controller


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_the_same_seed_gives_the_same_run_byte_for_byte(seed: int) -> None:
    assert digest(seed) == digest(seed)
    assert digest(seed) != digest(seed + 100)


def test_the_run_does_not_depend_on_the_hash_seed() -> None:
    program = "from tests.test_simulation import digest; print([digest(seed) for seed in (1, 5, 9)])"

    def found(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        root = Path(__file__).parent.parent
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return done.stdout

    assert found("1") == found("2") == f"{[digest(seed) for seed in (1, 5, 9)]}\n"


# --- the check can fail: planted bugs -------------------------------------------------------------------


def caught(expected: str, seeds: range = range(40)) -> None:
    """Some seed reports a violation that says ``expected``, and shrinks to one that still does."""
    for seed in seeds:
        verdict = run_seed(seed)
        if any(expected in wrong for wrong in verdict.wrong):
            failure = shrink(seed)
            assert failure.wrong
            assert len(failure.kept) <= len(draw_scenario(seed).faults)
            assert f"--seeds {seed}:{seed + 1}" in failure.command
            return
    pytest.fail(f"no seed of {seeds} reports {expected!r}")


def test_a_dropped_completion_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = Rollout._settled

    def forgetful(self: Rollout, trajectory: Trajectory) -> None:
        if trajectory.id != 3:
            settled(self, trajectory)

    monkeypatch.setattr(Rollout, "_settled", forgetful)
    monkeypatch.setattr(fuzz, "END_AT_S", 1000.0)
    caught("has not ended at")


def test_an_update_while_requests_run_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMProxy, "close", lambda self, engine: None)
    caught("I7 a request was sent to inference-")


def test_training_a_stale_sample_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleBuffer, "sweep", lambda self: Orders())
    monkeypatch.setattr(SampleBuffer, "ready", lambda self: [group for _, _, group in self.complete.values()])
    monkeypatch.setattr(Bound, "floor", lambda self, versions: 0)
    caught("I3 step")


def test_training_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = SampleBuffer.take_batch
    last: list[Any] = []

    def again(self: SampleBuffer) -> Any:
        groups = taken(self)
        if groups and last:
            groups[0] = last[0]
        if groups:
            last[:] = groups
        return groups

    # Else the second time it has no tokens left, and the journal knows that the group has left.
    monkeypatch.setattr(Trajectory, "take_samples", Trajectory.copy_samples)
    monkeypatch.setattr(Journal, "write", lambda self, record: None)
    monkeypatch.setattr(SampleBuffer, "take_batch", again)
    caught("was trained in step")


def test_a_loss_that_fails_the_calls_to_others_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_all(self: Switchboard, link: Link, reason: str) -> None:
        for call in self._pending.values():
            if not call.answer.done():
                said = f"{call.link.name} is lost: {reason}"
                call.answer.set_exception(CallError(FailureKind.INFRASTRUCTURE, said))

    monkeypatch.setattr(Switchboard, "_fail_calls", fail_all)
    caught("I8 trajectory", range(200))


def test_a_worker_that_is_given_up_without_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def greet(self: Switchboard, identity: bytes, hello: Hello) -> None:
        welcome(self, identity, hello)
        if hello.name == "environment-1":
            self._loop.call_later(60.0, self.lose, self.links[hello.name], "a bug")

    welcome = Switchboard._greet
    monkeypatch.setattr(Switchboard, "_greet", greet)
    caught("I8 environment-1 is gone")


def test_a_task_that_is_left_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shut_down = Controller._shut_down

    async def careless(self: Controller, *args: Any) -> None:
        await shut_down(self, *args)
        self.leaked = asyncio.ensure_future(asyncio.sleep(1e6))  # type: ignore[attr-defined]

    monkeypatch.setattr(Controller, "_shut_down", careless)
    caught("I9 task", range(1))


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert command_line.main(["fuzz", "--seeds", "0:3", "--jobs", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert report["seeds"] == 3
    assert report["failures"] == 0
    assert report["transitions"] > 0
    assert isinstance(report["faults"], dict)
    assert "3 seeds, 0 failed" in capsys.readouterr().out


def test_a_failing_seed_is_told_with_what_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LLMProxy, "close", lambda self, engine: None)
    assert command_line.main(["fuzz", "--seeds", "0:8", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "python -m rollart.simulation fuzz --seeds " in said
    command = next(line for line in said.splitlines() if "--seeds" in line).split()
    assert command_line.main(command[3:]) == 1, "the printed command replays the failure"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fuzz", "--seeds", "5:5"], "the range 5:5 has no seed"),
        (["fuzz", "--seeds", "x"], "no range of seeds such as 0:2000"),
        (["fuzz", "--jobs", "0"], "no number of at least 1"),
        (["fuzz", "--seeds", "0:1", "--faults", "99"], "seed 0 has no fault 99"),
        (["fuzz", "--seeds", "0:9", "--faults", "0"], "--faults names faults of one seed"),
        ([], "required: command"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(command_line.main(arguments))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
