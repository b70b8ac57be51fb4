"""Serverless rewards: ``python -m benchmarks.rewards [--short] [--json FILE]``.

A bursty trace of reward calls, replayed in real time against warm workers and against the elastic host; many calls at
the same moment; and, simulated at the paper's scale, a run whose reward GPUs are dedicated beside one without them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from benchmarks.parts.report import Row, figure, heading, write_report
from benchmarks.parts.reward_simulated import ASSUMPTIONS, simulated
from benchmarks.parts.reward_trace import Trace, fan_in, replay
from rollart.controller.collector import collecting_rarely

FULL: tuple[str, ...] = ()
PACKAGES = ("aiohttp", "msgspec", "uvloop")
WORKERS = 16
FULL_TRACE = Trace(steps=6, calls=64, rollout_s=9.0, train_s=2.0)
SHORT_TRACE = Trace(steps=3, calls=64, rollout_s=9.0, train_s=2.0)
COUNTS = [2_000, 4_000, 8_000, 16_000]
BUSY_SHARE, LONGER, GROWTH = 0.88, 1.10, 1.5


def targets(report: Row) -> list[Row]:
    """The aims, judged."""
    warm, elastic = report["replayed"]
    few, many = report["fan_in"][0], report["fan_in"][-1]
    rows = [
        (
            "busy share of the paid time, elastic",
            elastic["busy_share"],
            f"≥ {BUSY_SHARE}",
            elastic["busy_share"] >= BUSY_SHARE,
        ),
        (
            "step time over that of warm workers",
            elastic["step_s"] / warm["step_s"],
            f"≤ {LONGER:.2f}",
            elastic["step_s"] / warm["step_s"] <= LONGER,
        ),
        (
            f"of {many['concurrent']:,} calls at once, scored",
            many["scored"],
            f"{many['concurrent']:,}",
            many["scored"] == many["concurrent"],
        ),
        (
            f"time a call at {many['concurrent']:,} over that at {few['concurrent']:,}",
            many["us_per_call"] / few["us_per_call"],
            f"≤ {GROWTH}",
            many["us_per_call"] / few["us_per_call"] <= GROWTH,
        ),
    ]
    return [
        {"aim": aim, "found": found, "target": target, "holds": holds} for aim, found, target, holds in rows
    ]


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    lines = [heading(["aim", "found", "target", "holds"], text=1)]
    lines += [
        f"| {row['aim']} | {_found(row['found'])} | {row['target']} | {'yes' if row['holds'] else 'NO'} |"
        for row in targets(report)
    ]
    columns = [
        "workers",
        "calls",
        "paid s",
        "busy s",
        "busy share",
        "step s",
        "p50 s",
        "p99 s",
        "starts",
        "a start s",
    ]
    replayed = [heading(columns, text=1)]
    for row in report["replayed"]:
        name = f"{row['workers']} warm" if row["warm"] else f"elastic, at most {row['workers']}"
        start = "–" if row["warm"] else f"{row['cold_start_s']:.3f}"
        replayed.append(
            f"| {name} | {row['calls']} | {figure(row['paid_s'])} | {figure(row['busy_s'])} "
            f"| {row['busy_share']:.1%} | {row['step_s']:.2f} | {row['latency_p50_s']:.3f} "
            f"| {row['latency_p99_s']:.3f} | {row['cold_starts']} | {start} |"
        )
    fan = [heading(["calls at once", "seconds", "µs a call"], text=0)]
    fan += [
        f"| {row['concurrent']:,} | {row['seconds']:.2f} | {figure(row['us_per_call'])} |"
        for row in report["fan_in"]
    ]
    columns = [
        "rewards",
        "generation GPUs",
        "reward GPUs",
        "step s",
        "rollout s",
        "busy share",
        "paid GPU-s a step",
    ]
    sim = [heading(columns, text=1)]
    for row in report["simulated"]:
        sim.append(
            f"| {row['rewards']} | {row['generation_gpus']} | {row['reward_gpus'] or '–'} | {row['step_s']:.0f} "
            f"| {row['rollout_s']:.0f} | {row['busy_share']:.1%} | {figure(row['paid_s_per_step'])} |"
        )
    return {
        "targets": "\n".join(lines),
        "replayed": "\n".join(replayed),
        "fan_in": "\n".join(fan),
        "simulated": "\n".join(sim),
    }


def _found(value: float) -> str:
    return f"{value:.3f}" if value < 10 else figure(value)


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a shorter trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    trace = SHORT_TRACE if options.short else FULL_TRACE

    async def measured() -> tuple[list[Row], list[Row]]:
        with collecting_rarely():  # as the controller's process
            rows = [await replay(trace, workers=WORKERS, warm=warm) for warm in (True, False)]
            return rows, await fan_in(COUNTS, workers=2)

    replayed, fan = uvloop.run(measured())
    report = write_report(
        options.json,
        PACKAGES,
        form="short" if options.short else "full",
        replayed=replayed,
        fan_in=fan,
        simulated=simulated(seeds=1 if options.short else 3),
        assumptions=list(ASSUMPTIONS),
    )
    found = tables(report)
    sys.stdout.write("\n\n".join(found.values()) + "\n")
    sys.stdout.writelines(f"- {line}\n" for line in report["assumptions"])
    return 0 if all(row["holds"] for row in targets(report)) else 1


if __name__ == "__main__":
    sys.exit(main())
