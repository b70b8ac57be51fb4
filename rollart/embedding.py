"""RollArt inside a script of your own: ``await rollart.run(rollart.load_config(Path("run.yaml")))``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rollart.config import Config
from rollart.controller.local_run import run_locally
from rollart.controller.run_folder import RunFolder

__all__ = ["run"]


async def run(config: Config, *, stream: TextIO | None = None) -> Path:
    """Carry out ``config`` on this machine; the run folder.  Progress goes to ``stream``, stdout by default.

    ``RunError`` with the first cause when the run fails, ``ConfigError`` when its folder can't be made.
    """
    folder = RunFolder.choose(config)
    await run_locally(config, folder, stream=stream or sys.stdout)
    return folder.path
