"""RollArt inside a script of your own: ``await rollart.run(rollart.load_config(Path("run.yaml")))``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rollart.config import Config
from rollart.controller import preflight
from rollart.controller.controller import Outcome
from rollart.controller.local_run import run_locally
from rollart.controller.run_folder import RunFolder
from rollart.declare import Cluster
from rollart.errors import RunError

__all__ = ["run"]


async def run(config: Config, *, stream: TextIO | None = None, clusters: Sequence[Cluster] = ()) -> Path:
    """Carry out ``config`` on this machine; the run folder.  Progress goes to ``stream``, stdout by default.

    ``clusters`` add what they declare to the config, and are bound to the run's workers while it goes on.

    ``RunError`` with the first cause when the run fails or was interrupted (SIGINT or SIGTERM),
    ``ConfigError`` when it can't begin.
    """
    for cluster in clusters:
        config = cluster.apply(config)
    preflight.check_layout(config)
    preflight.check_environments(config)
    config = preflight.resolve_rewards(config)
    preflight.check_packages(config)
    folder = RunFolder.choose(config)
    outcome = await run_locally(config, folder, stream=stream or sys.stdout, clusters=clusters)
    if outcome is not Outcome.SUCCESS:
        raise RunError(f"the run was {outcome}; what there is of it is in {folder.path}")
    return folder.path
