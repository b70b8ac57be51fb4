"""kill -9 of the controller of a real run, and ``--resume``: engines, trainer and environments are the real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from rollart.controller import events
from rollart.simulation import order
from tests.test_end_to_end import Run, shared_memory, started


def resumed(run: Run) -> Run:
    """The same run under a new controller."""
    with run.log.open("ab") as output:
        run.process = subprocess.Popen(
            [sys.executable, "-m", "rollart.controller", "--resume", str(run.folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    run.family = []
    return run


def test_a_killed_controllers_run_is_resumed_and_loses_nothing(tmp_path: Path) -> None:
    """The trainer is killed first, so that the journal, the checkpoint and both kinds of recovery are used."""
    before = shared_memory()
    settings = ["steps=8", "evaluation.episodes=0", "trainer.checkpoint_every=2", "heartbeat_timeout_s=10"]
    with started(tmp_path, "frozen_lake.yaml", *settings) as run:
        run.wait_for_steps(3)
        run.look()
        (trainer,) = [p for p in run.family if p.is_running() and "trainer" in p.cmdline()[3:4]]
        trainer.kill()
        run.wait_for_steps(6)
        run.look()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert run.survivors(15) == []
        resumed(run)
        assert run.process.wait(240) == 0, run.output
        assert run.survivors(5) == []
        again = subprocess.run(
            [sys.executable, "-m", "rollart.controller", "resume", str(run.folder)],
            capture_output=True,
            text=True,
        )
    assert again.returncode == 2 and "nothing to resume" in again.stderr
    assert shared_memory() <= before
    run.check_events()
    assert [row["step"] for row in run.rows] == list(range(8))
    assert "is at version" in run.output and "resuming at step" in run.output
    gaps = [row["logprob_gap_mean"] for row in run.rows]  # a new trainer has no older weights to verify with
    assert all(gap is None or gap < 1e-4 for gap in gaps) and gaps[0] is not None
    kept = [event for event in run.events if isinstance(event, events.Resumed)]
    assert len(kept) == 1
    from rollart.controller.configuration import load_config

    stream = (run.folder / "events").read_bytes()
    assert order.violations(load_config(run.folder / "config.yaml"), stream, list(range(8))) == []
