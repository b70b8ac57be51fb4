"""Real vLLM engines declared of two classes, on this CPU: what ``benchmarks.routing --engines`` adds.

Two short runs of ``examples/disaggregated.yaml``: one with each task bound to a class and the second class slowed down,
and the example as it is, with prefill and decode apart.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.parts.report import Row, run_command
from rollart.controller import events
from rollart.controller.events import Event, read_events

__all__ = ["measure_classes"]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "disaggregated.yaml"
SLOWDOWN = 4
RUNS = {
    f"a class each, H20 slowed down {SLOWDOWN} times": [
        f"inference.pools=[{{hardware: H800}}, {{hardware: H20, slowdown: {SLOWDOWN}}}]",
        "inference.hw_affinity={Split: H800, Whole: H20}",
    ],
    "prefill and decode apart": [],
}


def measure_classes(steps: int) -> list[Row]:
    """A row for each run, task and class."""
    rows = []
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as folder:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "rollart.controller", str(EXAMPLE), f"run_dir={run}"]
            run_command([*command, f"steps={steps}", *settings])
            rows += [{"run": name, **row} for row in _rows(list(read_events(run / "events")))]
    return rows


def _rows(found: list[Event]) -> list[Row]:
    classes = {e.worker: e.hardware_class for e in found if isinstance(e, events.WorkerChanged)}
    task = {e.trajectory: e.task for e in found if isinstance(e, events.Dispatched)}
    asked: dict[int, float] = {}
    prompts: dict[int, int] = {}
    took: dict[tuple[str, str, str], list[tuple[float, int, int, int]]] = defaultdict(list)
    for e in found:
        if isinstance(e, events.Moved) and e.after == "generating":
            asked[e.trajectory], prompts[e.trajectory] = e.t, e.tokens
        elif isinstance(e, events.Sampled) and e.trajectory in asked:
            prefill = classes[e.prefilled_by] if e.prefilled_by else ""
            key = task[e.trajectory], prefill, classes[e.worker]
            row = e.t - asked.pop(e.trajectory), e.tokens, e.cached_tokens, prompts[e.trajectory]
            took[key].append(row)
    return [
        {
            "task": name,
            "prefill": prefill or decode,
            "decode": decode,
            "answers": len(rows),
            "median_s": statistics.median(row[0] for row in rows),
            "ms_per_token": 1000 * statistics.median(row[0] / row[1] for row in rows),
            "computed_prompt_tokens": statistics.fmean(row[3] - row[2] for row in rows),
        }
        for (name, prefill, decode), rows in sorted(took.items())
    ]
