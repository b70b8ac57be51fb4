"""RollArt inside a script of your own: ``await rollart.run(rollart.load_config(Path("run.yaml")))``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rollart.config import Config
from rollart.controller import preflight
from rollart.controller.controller import Outcome
from rollart.controller.local_run import run_locally
from rollart.controller.run_folder import RunFolder
from rollart.errors import RunError

__all__ = ["run"]


async def run(config: Config, *, stream: TextIO | None = None) -> Path:
    """Carry out ``config`` on this machine; the run folder.  Progress goes to ``stream``, stdout by default.

    ``RunError`` with the first cause when the run fails or was interrupted (SIGINT or SIGTERM),
    ``ConfigError`` when it can't begin.
    """
    preflight.check_environments(config)
    config = preflight.resolve_rewards(config)
    preflight.check_packages(config)
    folder = RunFolder.choose(config)
    outcome = await run_locally(config, folder, stream=stream or sys.stdout)
    if outcome is not Outcome.SUCCESS:
        raise RunError(f"the run was {outcome}; what there is of it is in {folder.path}")
    return folder.path
