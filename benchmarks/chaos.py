"""Training while workers and the controller are killed and frozen: ``python -m benchmarks.chaos [--minutes 10]``.

The demo, with its real engine, trainer and environments, under faults that a seed draws: each worker killed and frozen
(stopped, which only its silence tells), the engine's own process killed, and the controller killed with SIGKILL and
resumed.  Then calm runs of the same length, whose held-out scores say what the score under faults is worth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.chaos_run import ChaosRun, Fault, Planned, RunFailed, plan
from benchmarks.parts.chaos_verdict import recoveries, verdict
from benchmarks.parts.report import Row, figure, heading, write_report

__all__ = ["SHORT_FAULTS", "SHORT_GAP_S", "SHORT_STEPS", "run", "targets"]

FULL: tuple[str, ...] = ()
PACKAGES = ("vllm", "torch", "megatron-core", "pyzmq", "psutil")
STEPS_A_MINUTE, FAULTS_A_MINUTE, GAP_S = 24, 2.4, 20.0
CALM_SEEDS = 3
SHORT_STEPS, SHORT_GAP_S = 20, 3.0
SHORT_FAULTS = (Fault.FREEZE_ENVIRONMENT, Fault.KILL_ENGINE, Fault.KILL_TRAINER, Fault.KILL_CONTROLLER)
SETTINGS = (
    "heartbeat_timeout_s=10",
    "trainer.checkpoint_every=10",
    *(f"{role}.restarts=1000" for role in ("inference", "trainer", "environments")),
)


def run(folder: Path, seed: int, steps: int, faults: Sequence[Planned], *more: str) -> Row:
    """The verdict on a run of the demo under ``faults``, in an empty ``folder``; ``RunFailed``."""
    folder.mkdir(parents=True, exist_ok=True)
    chaos = ChaosRun(folder, [f"seed={seed}", f"steps={steps}", *SETTINGS, *more])
    try:
        chaos.carry_out(faults)
    finally:
        chaos.close()
    return {"seed": seed, **verdict(chaos.folder), "faults": recoveries(chaos.folder, faults)}


def measure(seed: int, steps: int, faults: Sequence[Planned], calm: int) -> tuple[Row, list[Row]]:
    """The run under faults, and ``calm`` runs of the same length with seeds from ``seed``."""
    with tempfile.TemporaryDirectory(prefix="rollart-chaos-") as root:
        found = run(Path(root) / "chaos", seed, steps, faults)
        sys.stderr.write(f"under {len(found['faults'])} faults: held-out {figure(found['score'])}\n")
        others = []
        for other in range(seed, seed + calm):
            others.append(run(Path(root) / f"calm-{other}", other, steps, ()))
            sys.stderr.write(f"calm, seed {other}: held-out {figure(others[-1]['score'])}\n")
    return found, others


def targets(chaos: Row, calm: Sequence[Row]) -> list[Row]:
    """The aims, what was found, and whether each holds."""
    names = {
        "lost": "trajectories lost",
        "duplicated": "trained twice",
        "stale": "beyond the staleness bound",
        "other": "other broken invariants",
    }
    aims: list[Row] = [
        {"aim": text, "found": chaos[name], "target": "0", "holds": chaos[name] == 0}
        for name, text in names.items()
    ]
    recovered = sum(fault["recovered_s"] is not None for fault in chaos["faults"])
    count = len(chaos["faults"])
    aims.append({"aim": "recovered", "found": recovered, "target": str(count), "holds": recovered == count})
    left = sum(fault["left_over"] for fault in chaos["faults"])
    aims.append(
        {"aim": "processes left by a dead controller", "found": left, "target": "0", "holds": not left}
    )
    if len(calm) > 1:
        scores = [row["score"] for row in calm]
        least = statistics.mean(scores) - 2 * statistics.stdev(scores)
        aim = f"held-out score; two standard deviations below the mean of {len(calm)} calm runs"
        holds = chaos["score"] >= least
        aims.append({"aim": aim, "found": chaos["score"], "target": f"≥ {least:.2f}", "holds": holds})
    return aims


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown by name, for the docs."""
    faults = report["chaos"]["faults"]
    kinds = [heading(["fault", "times", "recovered", "median s", "longest s"], text=1)]
    for kind in dict.fromkeys(str(fault) for fault in Fault):
        times = [row["recovered_s"] for row in faults if row["fault"] == kind]
        known = [each for each in times if each is not None]
        if times:
            middle, longest = (figure(of(known)) if known else "–" for of in (statistics.median, max))
            kinds.append(f"| {kind} | {len(times)} | {len(known)} | {middle} | {longest} |")
    runs = [heading(["run", "seed", "train_steps", "trajectories", "faults", "held-out"], text=1)]
    for name, row in [("under faults", report["chaos"]), *(("calm", row) for row in report["calm"])]:
        figures = (row["seed"], row["steps"], row["trajectories"], len(row["faults"]))
        runs.append(f"| {name} | {' | '.join(map(str, figures))} | {figure(row['score'])} |")
    aims = [heading(["aim", "found", "target", "holds"], text=1)]
    aims += [
        f"| {aim['aim']} | {figure(aim['found'])} | {aim['target']} | {'yes' if aim['holds'] else 'no'} |"
        for aim in report["targets"]
    ]
    return {"faults": "\n".join(kinds), "runs": "\n".join(runs), "targets": "\n".join(aims)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code: 1 when a run fails or an aim is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of training under faults, roughly, on two cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the run")
    parser.add_argument("--short", action="store_true", help="four faults in a few steps, no calm run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: it must be above 0")
    if options.short:
        steps, calm = SHORT_STEPS, 0
        faults = plan(options.seed, len(SHORT_FAULTS), gap_s=SHORT_GAP_S, faults=SHORT_FAULTS)
    else:
        steps, calm = max(20, round(STEPS_A_MINUTE * options.minutes)), CALM_SEEDS
        faults = plan(options.seed, max(len(Fault), round(FAULTS_A_MINUTE * options.minutes)), gap_s=GAP_S)
    try:
        chaos, others = measure(options.seed, steps, faults, calm)
    except RunFailed as error:
        sys.stderr.write(f"python -m benchmarks.chaos: {error}\n")
        return 1
    report = write_report(
        options.json, PACKAGES, form="short" if options.short else "full", seed=options.seed, chaos=chaos,
        calm=others, targets=targets(chaos, others),
    )  # fmt: skip
    sys.stdout.write("\n\n".join(tables(report).values()) + "\n")
    for each in chaos["violations"]:
        sys.stderr.write(f"{each}\n")
    return 0 if all(aim["holds"] for aim in report["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
