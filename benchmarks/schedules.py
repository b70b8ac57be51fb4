"""The schedules of the paper side by side, simulated: ``python -m benchmarks.schedules [--json FILE]``.

Every schedule is the shipping controller with other settings, on the same workload, seeds and hardware budget.
Prints the time of a step with its 95% confidence interval over seeds, the throughput, the idle share of each
pool, staleness, what was aborted, how far each is from the least time there could be, and the ratios to rollart
with the paper's beside them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.parts.report import Row, write_report
from rollart.controller.resource_manager import role_and_number
from rollart.simulation.bound import limits_of
from rollart.simulation.cluster import Cluster, cluster_setup
from rollart.simulation.paper import ASSUMPTIONS, SCHEDULES, paper_cluster, paper_config
from rollart.simulation.run import Result, simulate
from rollart.simulation.workload import FAMILIES

WARM_UP = 2
"""Steps at the beginning that don't count: the pipeline fills."""
STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95% quantiles of Student's t by degrees of freedom."""
PAPER_32B = {"sync_plus": 2.05, "one_off": 1.35, "areal": 1.31}
"""Step time over RollArt's, 32B, alpha 1, 128 GPUs (arXiv 2512.22560)."""
PAPER_RANGES = {
    ("sync", "sync_plus"): (1.40, 2.40),
    ("sync_plus", "one_off"): (1.31, 1.47),
    ("one_off", "areal"): (1.03, 1.06),
    ("areal", "rollart"): (1.22, 1.36),
    ("sync", "rollart"): (2.65, 4.58),
}
"""Throughput of the second over the first, over the paper's models."""
MODELS = {"8B": "Qwen3-8B", "14B": "Qwen3-14B", "32B": "Qwen3-32B"}
FULL_SEEDS = 3
FULL_STEPS = 7
SHORT_FORM = ["--models", "32B", "--seeds", "1", "--steps", "4"]
FULL: tuple[str, ...] = ()


def measure(model: str, schedule: str, seed: int, steps: int, changes: Row | None = None) -> Row:
    """One simulated run, as a row; ``changes`` may hold settings of ``cluster``, its ``timings``,
    ``rollout`` and each ``family``."""
    changes = changes or {}
    cluster = paper_cluster(MODELS[model], schedule, **changes.get("cluster", {}))
    timings = msgspec.structs.replace(cluster.timings, **changes.get("timings", {}))
    cluster = msgspec.structs.replace(cluster, timings=timings)
    config = paper_config(cluster, schedule, steps=steps, seed=seed, **changes.get("rollout", {}))
    families = {
        name: msgspec.structs.replace(family, **changes.get("family", {}))
        for name, family in FAMILIES.items()
    }
    started = time.perf_counter()
    result = simulate(cluster_setup(cluster, config, families), seed=seed, check=False)
    if result.outcome != "success" or result.violations:
        raise RuntimeError(
            f"{model} {schedule}, seed {seed}: {result.outcome} {result.cause} {result.violations[:3]}"
        )
    limits = limits_of(result.events, cluster, config, first_step=WARM_UP)
    figures = _figures(result, cluster)
    return {
        "model": model,
        "schedule": schedule,
        "seed": seed,
        **figures,
        "bound_s": limits.step_s,
        "bound_trainer_s": limits.trainer_s,
        "bound_generation_s": limits.generation_s,
        "bound_chain_s": limits.chain_s,
        "bound_ratio": figures["step_s"] / limits.step_s,
        "wall_s": time.perf_counter() - started,
    }


def _figures(result: Result, cluster: Cluster) -> Row:
    """What the metrics and the engines say of the steps after the warm-up."""
    rows = result.rows[WARM_UP:]
    span = rows[-1]["time"] - result.rows[WARM_UP - 1]["time"]
    consumed = sum(row["consumed"] for row in rows)
    lost = [name for row in rows for name in row if name.startswith(("aborted_", "failed_"))]
    aborted = sum(row.get(name, 0) for row in rows for name in set(lost))

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    idle: dict[str, list[float]] = {}
    for worker in result.workers:
        if worker.role == "inference":
            pool = cluster.engines[role_and_number(worker.name)[1]]
            served_s = result.seconds - cluster.timings.start_s
            idle.setdefault(f"idle_{pool.hardware_class}", []).append(1 - worker.engine.busy_s / served_s)
    return {
        "step_s": span / len(rows),
        "trajectories_per_s": consumed / span,
        "idle_trainer": 1 - sum(row["train_step_seconds"] for row in rows) / span,
        **{name: statistics.fmean(shares) for name, shares in idle.items()},
        "get_batch_s": mean("get_batch_seconds"),
        "update_wait_s": mean("update_wait_seconds"),
        "train_step_s": mean("train_step_seconds"),
        "train_lag_mean": mean("train_lag_mean"),
        "train_lag_max": max(row["train_lag_max"] for row in rows),
        "aborted_share": aborted / (aborted + consumed),
    }


# --- over seeds -----------------------------------------------------------------------------------------


def interval(values: list[float]) -> float:
    """Half the width of the 95% confidence interval of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    quantile = STUDENT_95.get(len(values) - 1, 1.96)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def summarise(rows: list[Row]) -> Row:
    """The means of one cell's rows, and the interval of its step time."""
    numbers = [name for name, value in rows[0].items() if isinstance(value, float | int) and name != "seed"]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in numbers}
    return {**rows[0], **mean, "seeds": len(rows), "step_s_ci95": interval([row["step_s"] for row in rows])}


def run_all(cells: list[tuple[Any, ...]], seeds: range, jobs: int) -> list[Row]:
    """``measure(*cell, seed…)`` of every cell and seed, in ``jobs`` processes; a summary of each cell, in order."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [
            [pool.submit(measure, model, schedule, seed, steps, changes) for seed in seeds]
            for model, schedule, steps, changes in cells
        ]
        return [summarise([future.result() for future in futures]) for futures in waiting]


def ratios_of(rows: list[Row], model: str) -> dict[str, float]:
    """Step times over rollart's; for rollart_plus rollart's over its own."""
    step = {row["schedule"]: row["step_s"] for row in rows if row["model"] == model}
    ratios = {name: step[name] / step["rollart"] for name in step if name not in ("rollart", "rollart_plus")}
    if "rollart_plus" in step:
        ratios["rollart_plus"] = step["rollart"] / step["rollart_plus"]
    return ratios


def table(rows: list[Row]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| model | schedule | step s (95%) | trajectories/s | over rollart | paper | idle trainer | idle H800 "
        "| idle H20 | get_batch s | weights s | train s | train_lag mean / max | aborted | time / bound |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        model, schedule = row["model"], row["schedule"]
        step = {other["schedule"]: other["step_s"] for other in rows if other["model"] == model}
        paper = PAPER_32B.get(schedule) if model == "32B" else None
        shares = [
            f"{row[name]:.0%}" if name in row else "–" for name in ("idle_trainer", "idle_H800", "idle_H20")
        ]
        lines.append(
            f"| {model} | {schedule} | {row['step_s']:.0f} ± {row['step_s_ci95']:.0f} "
            f"| {row['trajectories_per_s']:.2f} | {row['step_s'] / step['rollart']:.2f} | {paper or '–'} "
            f"| {' | '.join(shares)} "
            f"| {row['get_batch_s']:.0f} | {row['update_wait_s']:.0f} | {row['train_step_s']:.0f} "
            f"| {row['train_lag_mean']:.2f} / {row['train_lag_max']:.0f} | {row['aborted_share']:.1%} "
            f"| {row['bound_ratio']:.2f} |"
        )
    return "\n".join(lines)


def throughput_table(rows: list[Row]) -> str:
    """Throughput of each schedule over the one before it, with the paper's range."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [
        "| throughput | " + " | ".join(models) + " | paper |",
        "|---|" + "---:|" * (len(models) + 1),
    ]
    rate = {(row["model"], row["schedule"]): row["trajectories_per_s"] for row in rows}
    for (slow, fast), (low, high) in PAPER_RANGES.items():
        found = " | ".join(f"{rate[model, fast] / rate[model, slow]:.2f}" for model in models)
        lines.append(f"| {fast} / {slow} | {found} | {low:.2f}–{high:.2f} |")
    return "\n".join(lines)


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    rows = report["rows"]
    return {"schedules": table(rows), "throughput": throughput_table(rows)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--models", default="8B,14B,32B", help="of 8B, 14B and 32B")
    parser.add_argument("--seeds", type=int, default=FULL_SEEDS, help="so many, from 0")
    parser.add_argument(
        "--steps", type=int, default=FULL_STEPS, help=f"train_steps, the first {WARM_UP} of which don't count"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--short", action="store_true", help=f"the same as {' '.join(SHORT_FORM)}")
    options = parser.parse_args(arguments)
    if options.short:
        options = parser.parse_args(SHORT_FORM, options)
    models = options.models.split(",")
    unknown = [model for model in models if model not in MODELS]
    if unknown or options.seeds < 1 or options.steps <= WARM_UP or options.jobs < 1:
        wrong = (
            f"there is no model {unknown[0]!r}"
            if unknown
            else "seeds and jobs must be at least 1, steps at least 3"
        )
        sys.stderr.write(f"python -m benchmarks.schedules: {wrong}\n")
        return 2
    cells = [(model, schedule, options.steps, None) for model in models for schedule in SCHEDULES]
    rows = run_all(cells, range(options.seeds), options.jobs)
    headline = "32B" if "32B" in models else models[-1]
    plus = next(r for r in rows if r["model"] == headline and r["schedule"] == "rollart_plus")
    report = write_report(
        options.json,
        ("msgspec",),
        form="short" if options.seeds < FULL_SEEDS else "full",
        assumptions=ASSUMPTIONS,
        headline_model=headline,
        ratios=ratios_of(rows, headline),
        paper_ratios=PAPER_32B,
        bound_ratio=plus["bound_ratio"],
        rows=rows,
    )
    sys.stdout.write("Assumptions:\n" + "".join(f"- {each}\n" for each in ASSUMPTIONS) + "\n")
    sys.stdout.write("\n\n".join(tables(report).values()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
