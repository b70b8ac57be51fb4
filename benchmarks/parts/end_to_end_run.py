"""One real run of ``benchmarks.end_to_end``, in a process of its own: its run folder is what it leaves."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
import uvloop

from benchmarks.parts.report import DEMO
from rollart.config import Config, Evaluation, Rollout
from rollart.controller.configuration import load_config
from rollart.controller.local_run import run_locally
from rollart.controller.run_folder import RunFolder
from rollart.launch.local import LocalLauncher, Placement
from rollart.protocol import Role
from rollart.simulation.paper import SCHEDULES

__all__ = ["CALIBRATION", "run_config"]

SLOW = "benchmarks.parts.slow_lake:SlowLake"
CALIBRATION = "calibration"
"""The demo as it is, with quick environments: what the simulator is calibrated on."""
CORES = {Role.INFERENCE: 0, Role.TRAINER: 1}
EPISODES = 200


class PinnedLauncher(LocalLauncher):
    """Gives the engine and the trainer a core each; whatever else there is runs where it finds room."""

    def command(self, placement: Placement) -> list[str]:
        """As of ``LocalLauncher``."""
        core = CORES.get(Role(placement.role))
        command = super().command(placement)
        if core is None:
            return command
        cores = sorted(os.sched_getaffinity(0))
        pinned = cores[core % len(cores)]
        code = f"import os, sys; os.sched_setaffinity(0, {{{pinned}}}); os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-c", code, *command]


def run_config(mode: str, steps: int, folder: Path | None = None) -> Config:
    """The demo's config in ``mode``, one of the schedules or ``CALIBRATION``."""
    replace = msgspec.structs.replace
    config = load_config(DEMO)
    settings = SCHEDULES["rollart" if mode == CALIBRATION else mode]
    rollout = msgspec.to_builtins(replace(config.rollout, redundant_members=0, redundant_groups=0))
    tasks = config.tasks if mode == CALIBRATION else [replace(t, environment=SLOW) for t in config.tasks]
    return replace(
        config,
        name=mode,
        run_dir=None if folder is None else str(folder),
        steps=steps,
        tasks=tasks,
        rollout=msgspec.convert({**rollout, **settings}, Rollout),
        evaluation=Evaluation(episodes=0 if mode == CALIBRATION else EPISODES),
    )


def main() -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=[CALIBRATION, *SCHEDULES])
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    config = run_config(options.mode, options.steps, options.folder)
    uvloop.run(run_locally(config, RunFolder.choose(config), stream=sys.stdout, launcher=PinnedLauncher))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
