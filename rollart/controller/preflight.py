"""What is checked before a run starts anything: packages, and the tasks' environments."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import msgspec

from rollart.config import Config
from rollart.errors import ConfigError

__all__ = ["check_environments", "check_packages"]


def check_packages() -> None:
    """``ConfigError`` when a package that the workers need is not installed."""
    needs = {
        "torch": "all workers",
        "vllm": "the inference workers",
        "megatron.core": "the trainer",
        "tokenizers": "environments",
    }
    missing = [f"{name} (for {who})" for name, who in needs.items() if not _found(name)]
    if missing:
        raise ConfigError(
            f"these packages are not installed: {', '.join(missing)}. Install them with pip install 'rollart[cpu]', "
            "or 'rollart[gpu]' on a machine with GPUs (the README says how to get torch's CPU build)"
        )


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def check_environments(config: Config) -> None:
    """``ConfigError`` when a task's environment can't be loaded with its options, or is not to be found."""
    # In a process of its own: an environment's module may import anything, and this process stays small.
    command = [sys.executable, "-m", "rollart.environments.check"]
    tasks = msgspec.json.encode(config.tasks)
    result = subprocess.run(command, input=tasks, capture_output=True, check=False)
    said = result.stdout.decode(errors="replace").strip().splitlines()
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
    if said:
        raise ConfigError(f"tasks: {said[-1]}")
