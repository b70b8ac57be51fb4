"""The simulator's command line: ``fuzz``, ``calibrate`` and ``plan``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TextIO

import msgspec

from rollart.errors import RollArtError
from rollart.simulation import planner_commands
from rollart.simulation.fuzz import Report, fuzz
from rollart.simulation.scenario import draw_scenario

__all__ = ["main"]


PROGRESS_EVERY = 200


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One sentence, exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = _Parser(
        prog="python -m rollart.simulation", description="The shipping controller in virtual time."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_fuzz(commands)
    planner_commands.add_calibrate(commands)
    planner_commands.add_plan(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options, sys.stdout))
    except RollArtError as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return error.exit_code


def _add_fuzz(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("fuzz", help="run seeded fault schedules and check the invariants")
    parser.add_argument("--seeds", type=_seeds, default=range(200), metavar="FROM:TO", help="default 0:200")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--faults", type=_numbers, metavar="N,N,…", help="only these of a seed's faults, or 'none'"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="don't permute the tasks that are ready")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.set_defaults(run=_fuzz)


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    try:
        found = range(int(first), int(last)) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds such as 0:2000") from None
    if not found or found.start < 0:
        raise argparse.ArgumentTypeError(f"the range {text} has no seed that is 0 or more")
    return found


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    if text == "none":
        return []
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,2") from None


def _check_faults(options: argparse.Namespace) -> str:
    """What is wrong with ``--faults``; empty when nothing is."""
    if options.faults is None:
        return ""
    if len(options.seeds) != 1:
        return "--faults names faults of one seed: give one, as in --seeds 7:8"
    seed = options.seeds[0]
    known = len(draw_scenario(seed).faults)
    unknown = [number for number in options.faults if not 0 <= number < known]
    return f"seed {seed} has no fault {unknown[0]}: it has {known}, from 0" if unknown else ""


def _fuzz(options: argparse.Namespace, out: TextIO) -> int:
    if wrong := _check_faults(options):
        sys.stderr.write(f"python -m rollart.simulation fuzz: {wrong}\n")
        return 2
    report, done = Report(), 0
    for found in fuzz(options.seeds, jobs=options.jobs, shuffle=not options.no_shuffle, kept=options.faults):
        if isinstance(found, Report):
            report = found
        else:
            done += 1
            if found.wrong:
                out.write(f"seed {found.seed} fails: {found.wrong[0]}\n")
            if done % PROGRESS_EVERY == 0 and done < len(options.seeds):
                out.write(f"{done} of {len(options.seeds)} seeds\n")
            out.flush()
    for failure in report.failed:
        out.write(f"\nseed {failure.seed}: {'; '.join(failure.schedule) or 'no faults'}\n")
        out.writelines(f"  {wrong}\n" for wrong in failure.wrong[:10])
        out.write(f"  {failure.command}\n")
    faults = ", ".join(f"{kind} {count}" for kind, count in report.faults.items()) or "none"
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in sorted(report.outcomes.items()))
    out.write(
        f"{report.seeds} seeds, {report.failures} failed ({outcomes}); {report.transitions:,} transitions, "
        f"{report.callbacks:,} callbacks, {report.simulated_s:,.0f} s simulated in {report.wall_s:.0f} s\n"
        f"faults: {faults}\n"
    )
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 1 if report.failures else 0
