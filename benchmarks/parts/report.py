"""What a benchmark says: its figures as JSON, and how they look in a table."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.measure import provenance

__all__ = ["DEMO", "Row", "figure", "heading", "metrics_of", "run_command", "run_row", "write_report"]

Row = dict[str, Any]
DEMO = Path(__file__).parent.parent.parent / "examples" / "frozen_lake.yaml"


def run_command(command: Sequence[str]) -> str:
    """What ``command`` writes; ``RuntimeError`` with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = f"{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{said}")
    return done.stdout


def run_row(command: Sequence[str]) -> Row:
    """The object in the last line that ``command`` writes; errors as of ``run_command``."""
    row: Row = json.loads(run_command(command).strip().splitlines()[-1])
    return row


def metrics_of(run: Path) -> list[Row]:
    """The metrics of a run folder, a row a train_step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_report(path: Path | None, packages: Sequence[str], **content: Any) -> Row:
    """``content`` with where and with what it was measured; in the file ``path`` too, unless it is ``None``."""
    report: Row = {**provenance("rollart", *packages), **content}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    return report


def figure(value: float | None) -> str:
    """A number with the digits that say something."""
    if value is None:
        return "–"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def heading(columns: Sequence[str], *, text: int) -> str:
    """The head of a Markdown table whose first ``text`` columns are words."""
    marks = ["---" if number < text else "---:" for number in range(len(columns))]
    return f"| {' | '.join(columns)} |\n|{'|'.join(marks)}|"
