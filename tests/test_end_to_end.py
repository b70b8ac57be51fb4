"""Whole runs with all real workers: vLLM engines, the Megatron-core trainer, environments, the command line."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.controller import events
from rollart.controller.events import Event, read_events
from rollart.controller.invariants import Invariants

EXAMPLES = Path(__file__).parent.parent / "examples"
GAP = 1e-4
"""Nats between the engine's and the trainer's log-probability of a token, mean over a batch, in float32."""


class Run:
    """``python -m rollart.controller`` in a folder of its own."""

    def __init__(self, folder: Path, config: str, *overrides: str) -> None:
        self.folder = folder / "run"
        self.log = folder / "output"
        command = [
            sys.executable,
            "-m",
            "rollart.controller",
            str(EXAMPLES / config),
            f"run_dir={self.folder}",
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen([*command, *overrides], stdout=output, stderr=subprocess.STDOUT)
        self.family: list[psutil.Process] = []
        """Every process of the run that was seen."""

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.folder / "events"))

    def look(self) -> None:
        """Note the processes there are now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family = list({*self.family, *psutil.Process(self.process.pid).children(recursive=True)})

    def wait_for_steps(self, count: int) -> None:
        while len(self.rows) < count:
            assert self.process.poll() is None, self.output
            self.look()
            time.sleep(0.2)

    def kill(self, program: str) -> None:
        """SIGKILL to the run's process of ``program``."""
        (found,) = [p for p in self.family if p.is_running() and Path(p.cmdline()[0]).name == program]
        found.kill()

    def survivors(self, within_s: float) -> list[psutil.Process]:
        """Processes of the run that are left after so long."""
        _, left = psutil.wait_procs(self.family, timeout=within_s)
        return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def check_events(self) -> None:
        invariants = Invariants()
        for event in self.events:
            invariants.feed(event)
        assert invariants.violations == []


@contextlib.contextmanager
def started(folder: Path, config: str, *overrides: str) -> Iterator[Run]:
    run = Run(folder, config, *overrides)
    try:
        yield run
    finally:
        run.look()
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        run.survivors(10)


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("rollart-*"))


def test_the_demo_trains_on_real_parts_and_keeps_the_invariants(tmp_path: Path) -> None:
    """The demo's config, a few steps of it: the paper's order, redundancy on, evaluations, files at the end."""
    before = shared_memory()
    with started(
        tmp_path, "frozen_lake.yaml", "steps=6", "evaluation.episodes=20", "trainer.verify_share=1"
    ) as run:
        run.wait_for_steps(1)
        assert run.process.wait(300) == 0, run.output
        assert run.survivors(5) == []
    assert shared_memory() <= before
    run.check_events()
    assert [row["step"] for row in run.rows] == list(range(6))
    for row in run.rows:
        assert row["logprob_gap_mean"] < GAP and row["logprob_gap_tokens"] == row["tokens"]
        assert row["staleness_max"] <= 1 and row["train_lag_max"] <= 2
    assert "eval_success_before" in run.rows[0] and "eval_success" in run.rows[-1]
    swaps = [e for e in run.events if isinstance(e, events.Swapped)]
    assert [e.version for e in swaps] == list(range(7)) and all(e.canary_gap < 1e-3 for e in swaps)
    assert any(e.in_flight for e in swaps), "weights change while trajectories are in flight"
    assert run.events[-1].outcome == "success"  # type: ignore[union-attr]
    assert not (run.folder / "private").exists()
    assert [p.name for p in (run.folder / "checkpoints").iterdir()] == ["step-000006"]
    _check_weights(run.folder / "weights")


def _check_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size >= len(tokenizer)


def test_long_answers_span_updates_with_the_same_gap_and_ctrl_c_ends_in_order(tmp_path: Path) -> None:
    """Temperature 0.8, a token mask, two engines that swap by themselves, gradients of groups as they arrive; then a
    person has seen enough."""
    before = shared_memory()
    overrides = "steps=1000", "inference.workers=2", "trainer.stream_batch=true"
    with started(tmp_path, "letters.yaml", *overrides) as run:
        run.wait_for_steps(6)
        run.look()
        run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert run.process.wait(30) == 130, run.output
        assert time.monotonic() - began < 10
        assert run.survivors(5) == []
    assert shared_memory() <= before
    assert "interrupted" in run.output.splitlines()[-1]
    run.check_events()
    rows = run.rows
    assert sum(row["generations_spanning_updates"] for row in rows) > 0
    trained = sum(row["trajectories_of_several_versions"] for row in rows)
    assert trained > 0, "and such generations are trained on"
    assert all(row["logprob_gap_mean"] < GAP for row in rows)
    assert {e.worker for e in run.events if isinstance(e, events.Swapped)} == {"inference-0", "inference-1"}


def test_an_openai_agent_is_trained_on_real_parts(tmp_path: Path) -> None:
    """The example as it is, a few steps of it: tool calls through the real client to weight updates."""
    with started(tmp_path, "agent.yaml", "steps=3", "evaluation.episodes=8", "rollout.group_size=4") as run:
        run.wait_for_steps(1)
        assert run.process.wait(300) == 0, run.output
        assert run.survivors(5) == []
    run.check_events()
    for row in run.rows:
        assert row["logprob_gap_mean"] < GAP and row["logprob_gap_tokens"] == row["tokens"]
        assert row["train_lag_max"] <= 2
        assert row["grad_norm"] > 0 or row["zero_signal_groups"] == 8
        assert not {"calls_rendered_anew", "conversations_begun", "calls_refused"} & set(row)
    assert sum(row["sequences"] for row in run.rows) == sum(row["trajectories"] for row in run.rows)
    assert max(row["turns_mean"] for row in run.rows) > 1
    assert [e.version for e in run.events if isinstance(e, events.Swapped)] == [0, 1, 2, 3]
    assert "eval_success_before" in run.rows[0] and run.rows[-1]["eval_version"] == 3


def test_a_run_outlives_its_stores_servers_and_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    before = shared_memory()
    settings = ["steps=1000", "evaluation.episodes=0", "weights.store=mooncake", "weights.node_gib=0.25"]
    with started(tmp_path, "frozen_lake.yaml", *settings) as run:
        for steps, program in ((2, "mooncake_client"), (5, "mooncake_master")):
            run.wait_for_steps(steps)
            run.kill(program)
        run.wait_for_steps(9)
        run.process.kill()
        run.process.wait()
        assert run.survivors(15) == []
    assert shared_memory() <= before
    swaps = [event for event in read_events(run.folder / "events") if isinstance(event, events.Swapped)]
    assert [swap.version for swap in swaps] == list(range(len(swaps)))
    log = (run.folder / "logs" / "controller.log").read_text()
    for server in ("mooncake-node-0", "mooncake-master"):
        assert f"{server} ended with code -9 and is started again" in log


def test_a_worker_that_dies_at_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, though the engine is still starting then: it is ended too."""
    (tmp_path / "fragile.py").write_text(
        "import sys\n"
        "from rollart.environments import Environment\n"
        "class Fragile(Environment):\n"
        "    def __init__(self):\n"
        "        if any('workers' in word for word in sys.orig_argv):\n"
        "            raise LookupError('the map archive is gone')\n"
    )
    monkeypatch.chdir(tmp_path)
    overrides = ["tasks.0.environment=fragile:Fragile", "tasks.0.options={}"]
    with started(tmp_path, "frozen_lake.yaml", *overrides) as run:
        while run.process.poll() is None:
            run.look()
            time.sleep(0.1)
        assert run.process.returncode == 1
        assert run.survivors(5) == []
    assert "environment worker environment-" in run.output and "ended with exit code 1" in run.output
    assert "the map archive is gone" in run.output


def test_wrong_environments_are_told_before_anything_starts(tmp_path: Path) -> None:
    for override, hint in (
        ("tasks.0.environment=rollart.environments.frozen_lake:FrozenLak", "did you mean FrozenLake?"),
        ("tasks.0.options.sise=3", "did you mean size?"),
        ("tasks.0.options.size=1", "size is 1"),
    ):
        with started(tmp_path, "frozen_lake.yaml", override) as run:
            assert run.process.wait(60) == 2
        assert hint in run.output and run.output.count("\n") == 1
        assert not run.folder.exists()


def test_prefill_and_decode_apart_and_the_prefiller_killed(tmp_path: Path) -> None:
    with started(tmp_path, "disaggregated.yaml", "steps=6") as run:
        run.wait_for_steps(3)
        (prefiller,) = [p for p in run.family if p.is_running() and "inference-0" in p.cmdline()]
        prefiller.kill()
        assert run.process.wait(240) == 0, run.output
        assert run.survivors(5) == []
    run.check_events()
    found = run.events
    gone = next(e.t for e in found if isinstance(e, events.WorkerChanged) and e.state == "gone")
    task = {e.trajectory: e.task for e in found if isinstance(e, events.Dispatched)}
    sampled = [e for e in found if isinstance(e, events.Sampled)]
    apart = [e for e in sampled if e.prefilled_by]
    assert apart
    assert {(task[e.trajectory], e.prefilled_by, e.worker) for e in apart} == {
        ("Split", "inference-0", "inference-1")
    }
    assert all(
        e.cached_tokens >= 4 for e in apart
    )  # of a prompt of 5: the last position gives the first token
    assert any(e.t > gone for e in sampled)
    assert not any(e.t > gone + 1 for e in apart)
    bound = {(e.task, e.phase, e.wanted, e.hardware_class) for e in found if isinstance(e, events.Bound)}
    assert ("Split", "prefill", "H800", "H800") in bound
    assert ("Split", "decode", "H20", "H20") in bound
    assert ("Whole", "both", "H20", "H20") in bound
    assert max(row["logprob_gap_mean"] for row in run.rows) < GAP


def test_reward_functions_score_a_real_run_from_the_local_host(tmp_path: Path) -> None:
    settings = ["steps=3", "evaluation.episodes=20", "trainer.verify_share=1"]
    with started(tmp_path, "frozen_lake_rewards.yaml", *settings) as run:
        run.wait_for_steps(1)
        assert run.process.wait(300) == 0, run.output
        assert run.survivors(5) == []
    run.check_events()
    for row in run.rows:
        moves = row["reward/FrozenLake/part/moves_mean"]
        assert 1 <= moves <= 10 and row["reward/FrozenLake/part/well_formed_mean"] == 1.0
        assert row["reward/FrozenLake/calls"] > 0 and row["reward/FrozenLake/busy_seconds"] > 0
        assert row["reward_mean"] <= 1.1 and row["logprob_gap_mean"] < GAP
    log = (run.folder / "logs" / "functions.log").read_text()
    assert "serving examples.lake_rewards:short_path at http://127.0.0.1:" in log
    config = (run.folder / "config.yaml").read_text()
    assert "max_instances: 4" in config, "what the function declares is part of the resolved config"
