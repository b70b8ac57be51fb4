"""The short form of ``benchmarks.chaos``: a real run is trained while its workers and its controller are killed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.chaos import SHORT_FAULTS, SHORT_GAP_S, SHORT_STEPS, run, targets
from benchmarks.parts.chaos_run import plan
from benchmarks.parts.report import metrics_of
from rollart.controller.events import Resumed, read_events
from tests.test_end_to_end import shared_memory


def test_a_run_under_faults_loses_nothing(tmp_path: Path) -> None:
    """Each fault is of another kind; the controller's death leaves no process, and its run is resumed."""
    before = shared_memory()
    faults = plan(0, len(SHORT_FAULTS), gap_s=SHORT_GAP_S, faults=SHORT_FAULTS)
    found = run(tmp_path, 0, SHORT_STEPS, faults, "evaluation.episodes=0")
    assert shared_memory() <= before
    assert found["violations"] == []
    assert Counter(row["fault"] for row in found["faults"]) == Counter(map(str, SHORT_FAULTS))
    assert [aim for aim in targets(found, []) if not aim["holds"]] == []
    folder, output = tmp_path / "run", (tmp_path / "output").read_text()
    assert "is at version" in output and "resuming at step" in output
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(SHORT_STEPS))
    gaps = [row["logprob_gap_mean"] for row in rows]  # a new trainer has no older weights to verify with
    assert all(gap is None or gap < 1e-4 for gap in gaps) and gaps[0] is not None
    assert sum(isinstance(event, Resumed) for event in read_events(folder / "events")) == 1
    again = subprocess.run(
        [sys.executable, "-m", "rollart.controller", "resume", str(folder)], capture_output=True, text=True
    )
    assert again.returncode == 2 and "nothing to resume" in again.stderr
