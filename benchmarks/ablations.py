"""One thing changed at a time, simulated: ``python -m benchmarks.ablations [NAME …] [--figures FOLDER] [--json FILE]``.

Each ablation prints a table with the paper's number beside ours where it gives one, and draws a figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.parts.report import Row, write_report
from benchmarks.schedules import run_all
from rollart.simulation.paper import PULL_S, PUSH_S
from rollart.simulation.workload import Distribution

STEPS = 7
FULL_SEEDS = 2
SHORT_FORM = ["latency", "--seeds", "1"]
FULL = ("--figures", "docs/figures")
GROUPS = 32
"""Half the paper's batch: what is compared are ratios, and the sweeps are long."""


class Point(msgspec.Struct):
    """One cell of a sweep."""

    line: str
    """Which line of the figure it is on."""
    x: float
    schedule: str
    changes: Row


class Ablation(msgspec.Struct):
    """A sweep."""

    title: str
    x: str
    paper: str
    points: list[Point]


def _rollout(**settings: Any) -> Row:
    return {"rollout": {"groups_per_batch": GROUPS, **settings}}


def latency() -> Ablation:
    """Each turn's environment takes N(10 s, σ): in lock step all wait for the slowest."""
    points = []
    for deviation in (1.0, 4.0, 7.0, 10.0):
        family = {"step_s": Distribution(10.0, deviation=deviation, low=0.1)}
        for line, schedule in (("batch-level", "sync"), ("trajectory-level", "sync_plus")):
            points.append(Point(line, deviation, schedule, {**_rollout(), "family": family}))
    return Ablation(
        "Trajectory-level against batch-level rollout, environment latency N(10 s, σ)",
        "σ in s",
        "batch-level / trajectory-level: 1.23 at σ = 1 s, 2.27 at σ = 10 s",
        points,
    )


def redundancy() -> Ablation:
    """More groups, or members, than needed; the first to finish count."""
    points = []
    for share in (0.0, 0.125, 0.25, 0.375, 0.5):
        points.append(Point("groups", share, "rollart", _rollout(redundant_groups=round(share * GROUPS))))
        points.append(Point("members", share, "rollart", _rollout(redundant_members=round(share * 8))))
    return Ablation("Redundancy", "share started beyond what is needed", "up to 1.62 times faster", points)


def staleness() -> Ablation:
    """alpha, with both meanings of it."""
    points = [
        Point("publish", alpha, "rollart_plus", _rollout(staleness_bound=alpha))
        for alpha in (0, 1, 2, 3, 4, 6, 8)
    ]
    points += [
        Point("batch", alpha, "rollart", _rollout(staleness_bound=alpha)) for alpha in (1, 2, 3, 4, 6, 8)
    ]
    return Ablation(
        "The staleness bound", "alpha", "alpha 1 to 6: at most 1.22 times faster than alpha 1", points
    )


def weights() -> Ablation:
    """Push and pull in the background, or all of it while generation is suspended."""
    points = []
    for number, (short, name) in enumerate((("8B", "Qwen3-8B"), ("14B", "Qwen3-14B"), ("32B", "Qwen3-32B"))):
        blocking = {"publish_s": 0.0, "pull_s": 0.0, "load_s": PUSH_S[name] + PULL_S[name]}
        points.append(Point("background", number, "rollart", {**_rollout(), "model": short}))
        points.append(
            Point("blocking", number, "rollart", {**_rollout(), "model": short, "timings": blocking})
        )
    return Ablation("Weight transfer", "model: 8B, 14B, 32B", "blocking / background: 1.10 to 1.16", points)


def failures() -> Ablation:
    """Resets that fail as infrastructure does, after their time; each is tried again elsewhere."""
    points = [
        Point(schedule, rate, schedule, {**_rollout(retries=8), "family": {"reset_failure": rate}})
        for rate in (0.0, 0.05, 0.1, 0.2)
        for schedule in ("sync_plus", "rollart")
    ]
    return Ablation("Failing environments", "share of resets that fail", "–", points)


def pools() -> Ablation:
    """Generation pools of about equal cost (H20 : H800 = 1 : 2.85), without affinity."""
    shapes = {"64 H800 + 24 H20": (64, 24), "72 H800": (72, 0)}
    points = [
        Point(name, number, "rollart", {**_rollout(), "cluster": {"h800": h800, "h20": h20}})
        for number, (name, (h800, h20)) in enumerate(shapes.items())
    ]
    return Ablation(
        "Pools of equal cost, no affinity", "pool", "with affinity 1.12 to 1.37 over 72 H800", points
    )


ABLATIONS: dict[str, Callable[[], Ablation]] = {
    each.__name__: each for each in (latency, redundancy, staleness, weights, failures, pools)
}


def measure_all(ablation: Ablation, seeds: int, jobs: int) -> list[Row]:
    """A row a point, in order."""
    cells = [
        (point.changes.get("model", "8B"), point.schedule, STEPS, point.changes) for point in ablation.points
    ]
    rows = run_all(cells, range(seeds), jobs)
    return [{**row, "line": p.line, "x": p.x} for row, p in zip(rows, ablation.points, strict=True)]


def table(ablation: Ablation, rows: list[Row]) -> str:
    """A Markdown table: a line of the figure each, the step time and its ratio to the line's first."""
    lines = [
        f"### {ablation.title}",
        "",
        f"The paper: {ablation.paper}.",
        "",
        f"| | {ablation.x} | step s (95%) | first / this | trajectories/s | get_batch s | weights s | aborted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    first: dict[str, float] = {}
    for row in rows:
        base = first.setdefault(row["line"], row["step_s"])
        lines.append(
            f"| {row['line']} | {row['x']:g} | {row['step_s']:.0f} ± {row['step_s_ci95']:.0f} "
            f"| {base / row['step_s']:.2f} | {row['trajectories_per_s']:.2f} | {row['get_batch_s']:.0f} "
            f"| {row['update_wait_s']:.0f} | {row['aborted_share']:.1%} |"
        )
    by_x = {(row["line"], row["x"]): row["step_s"] for row in rows}
    names = list(first)
    shared = [x for line, x in by_x if line == names[0] and len(names) == 2 and (names[1], x) in by_x]
    if shared:
        ratios = ", ".join(f"{by_x[names[0], x] / by_x[names[1], x]:.2f} at {x:g}" for x in shared)
        lines += ["", f"{names[0]} / {names[1]}: {ratios}."]
    return "\n".join(lines)


def draw(ablation: Ablation, rows: list[Row], path: Path) -> None:
    """The figure: step time over x, with its confidence interval."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "rollart"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for line in dict.fromkeys(row["line"] for row in rows):
        part = [row for row in rows if row["line"] == line]
        axes.errorbar(
            [row["x"] for row in part],
            [row["step_s"] for row in part],
            yerr=[row["step_s_ci95"] for row in part],
            marker="o",
            capsize=3,
            label=line,
        )
    axes.set(title=ablation.title, xlabel=ablation.x, ylabel="seconds a step", ylim=(0, None))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    return {name: table(ABLATIONS[name](), rows) for name, rows in report["ablations"].items()}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ABLATIONS)}; by default all")
    parser.add_argument("--seeds", type=int, default=FULL_SEEDS, help="so many, from 0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw ablation_NAME.svg there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--short", action="store_true", help=f"the same as {' '.join(SHORT_FORM)}")
    options = parser.parse_args(arguments)
    if options.short:
        options = parser.parse_args(SHORT_FORM, options)
    unknown = [name for name in options.names if name not in ABLATIONS]
    if unknown or options.seeds < 1 or options.jobs < 1:
        wrong = (
            f"there is no ablation {unknown[0]!r}; there are {', '.join(ABLATIONS)}"
            if unknown
            else "at least 1 seed"
        )
        sys.stderr.write(f"python -m benchmarks.ablations: {wrong}\n")
        return 2
    found: dict[str, list[Row]] = {}
    for name in options.names or ABLATIONS:
        ablation = ABLATIONS[name]()
        rows = measure_all(ablation, options.seeds, options.jobs)
        sys.stdout.write(table(ablation, rows) + "\n\n")
        sys.stdout.flush()
        found[name] = rows
        if options.figures:
            draw(ablation, rows, options.figures / f"ablation_{name}.svg")
    form = "short" if options.seeds < FULL_SEEDS or options.names else "full"
    write_report(options.json, ("msgspec",), form=form, ablations=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
