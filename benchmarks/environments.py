"""What a heavy tail costs, and how fast environments step: ``python -m benchmarks.environments [--json FILE]``.

First the same environments, seeds and crashes under the same controller: batch-synchronous (every trajectory waits for
the slowest at every turn) against trajectory-level, without and with redundancy.  5% of the steps take 50 times as
long and 2% crash.  The environment workers are real; generation and training take no time.

Then steps a second and core: a real worker that is asked for each step over the wire, in text and tokens, beside
Gymnasium's own vector API over the same FrozenLake, which does neither.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.parts.environment_run import MODES, batch_seconds, steps_per_second
from benchmarks.parts.report import Row, figure, heading, run_row, write_report

FULL: tuple[str, ...] = ()
PACKAGES = ("pyzmq", "msgspec", "gymnasium", "tokenizers")
TARGET = 3.0
SYNC, BEST = "batch-synchronous", "trajectory-level, redundant"
LAKE = {"id": "FrozenLake-v1", "actions": ["L", "D", "R", "U"]}
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gymnasium's FrozenLake": ("rollart.environments.adapters.gymnasium:Gymnasium", LAKE),
    "RollArt's FrozenLake": ("rollart.environments.frozen_lake:FrozenLake", {"slippery": True}),
}


def measure_batches(steps: int, seeds: int) -> list[Row]:
    """Rows of all modes, seed by seed."""
    rows = []
    for seed in range(seeds):
        for mode in MODES:
            rows.append(asyncio.run(batch_seconds(mode, steps, seed)))
            sys.stderr.write(f"{mode:>30} seed {seed}: {rows[-1]['batch_seconds']:.2f} s a batch\n")
    return rows


def measure_steps(live: int, seconds: float) -> list[Row]:
    """Rows of RollArt's workers and of Gymnasium's vector environments."""
    rows = []
    for name, (environment, options) in ENVIRONMENTS.items():
        rows.append(
            {
                "system": f"rollart, {name}",
                **asyncio.run(steps_per_second(environment, options, live, seconds)),
            }
        )
    for kind, count in (("sync", live), ("async", 8)):
        command = [sys.executable, "-m", "benchmarks.parts.vector_steps", kind, str(count), str(seconds)]
        rows.append({"system": f"gymnasium, {kind} vector", **run_row(command)})
    for row in rows:
        sys.stderr.write(
            f"{row['system']:>40}: {row['steps_per_core_second']:,.0f} steps per core and second\n"
        )
    return rows


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown by name, for the docs."""
    lines = [heading(["", "s a batch", "longest", "retried", "cut", "faster"], text=1)]
    means = {mode: _mean(report["batches"], mode, "batch_seconds") for mode in MODES}
    for mode in MODES:
        rest = [_mean(report["batches"], mode, name) for name in ("longest_seconds", "retried", "cut")]
        ratio = means[SYNC] / means[mode]
        lines.append(f"| {mode} | {' | '.join(figure(v) for v in (means[mode], *rest))} | {figure(ratio)} |")
    steps = [heading(["", "live", "steps/s", "steps/s and core"], text=1)]
    steps += [
        f"| {row['system']} | {row['live']} | {figure(row['steps_per_second'])} "
        f"| {figure(row['steps_per_core_second'])} |"
        for row in report["steps"]
    ]
    aims = [heading(["aim", "found", "target", "holds"], text=1)]
    aims += [
        f"| {aim['aim']} | {figure(aim['found'])} | ≥ {aim['target']:g} | {'yes' if aim['holds'] else 'no'} |"
        for aim in report["targets"]
    ]
    return {"batches": "\n".join(lines), "steps": "\n".join(steps), "targets": "\n".join(aims)}


def targets(batches: list[Row]) -> list[Row]:
    """The aim, what was found, and whether it holds."""
    found = _mean(batches, SYNC, "batch_seconds") / _mean(batches, BEST, "batch_seconds")
    aim = f"batch time, {SYNC} over {BEST}"
    return [{"aim": aim, "found": found, "target": TARGET, "holds": found >= TARGET}]


def _mean(rows: list[Row], mode: str, name: str) -> float:
    values = [float(row[name]) for row in rows if row["mode"] == mode]
    return sum(values) / len(values)


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one seed, fewer batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    steps, seeds, seconds = (3, 1, 3.0) if options.short else (6, 3, 6.0)
    try:
        batches = measure_batches(steps, seeds)
        rows = measure_steps(256, seconds)
    except (subprocess.SubprocessError, RuntimeError, json.JSONDecodeError) as error:
        sys.stderr.write(f"python -m benchmarks.environments: {error}\n")
        return 1
    report = write_report(
        options.json, PACKAGES, form="short" if options.short else "full", batches=batches, steps=rows,
        targets=targets(batches),
    )  # fmt: skip
    sys.stdout.write("\n\n".join(tables(report).values()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
