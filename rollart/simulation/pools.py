"""Pools: the small file that says on what a run would run, for a plan of hardware that nobody has measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from rollart.config import Config
from rollart.errors import ConfigError
from rollart.simulation.calibration import shape_of
from rollart.simulation.cluster import Cluster, Pool
from rollart.simulation.hardware import MODELS, ModelShape
from rollart.simulation.site import PoolSite
from rollart.simulation.training import MODEL_FLOPS_UTILIZATION, Parallelism
from rollart.simulation.workload import FAMILIES
from rollart.simulation.world import Timings

__all__ = ["Pools", "load_pools", "pool_site"]

PUSH_BYTES_PER_S = 0.5e9
PULL_BYTES_PER_S = 2.2e9
"""A version into the weight store and out of it, as the paper measured it across clusters."""


class TrainerPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of one class that train."""

    hardware_class: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    utilization: float = MODEL_FLOPS_UTILIZATION
    """Share of the peak that the model's own FLOPs get."""


class WeightTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds."""

    publish_s: float | None = None
    """A version from the trainer to the store; by default by its bytes."""
    pull_s: float | None = None
    """A version from the store to an engine's host; by default by its bytes."""
    load_s: float = 1.0
    """From the host into the engine."""


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    model: str | None = None
    """One of ``hardware.MODELS``; by default the config's own model."""
    generation: list[Pool]
    trainer: TrainerPool
    tasks: dict[str, str]
    """Of each task of the config, the workload family that it is like."""
    weights: WeightTimes = WeightTimes()


def load_pools(path: Path) -> Pools:
    """The file at ``path``; ``ConfigError`` when it is none."""
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the pools {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    try:
        return msgspec.convert(raw, Pools)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def pool_site(pools: Pools, config: Config) -> PoolSite:
    """The site that ``pools`` describe for the run of ``config``; ``ConfigError`` when it can't run there."""
    model = _model(pools, config)
    missing = [task.name for task in config.tasks if task.name not in pools.tasks]
    if missing:
        raise ConfigError(
            f"the pools don't say which workload family task {missing[0]!r} is like; there are {', '.join(FAMILIES)}"
        )
    unknown = [family for family in pools.tasks.values() if family not in FAMILIES]
    if unknown:
        raise ConfigError(f"there is no workload family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    trainer, weights = pools.trainer, pools.weights
    if min(trainer.tensor, trainer.pipeline, trainer.data) < 1:
        raise ConfigError("the trainer's tensor, pipeline and data must each be at least 1")
    size = model.weight_bytes
    cluster = Cluster(
        model=model,
        generation=pools.generation,
        trainer_class=trainer.hardware_class,
        trainer=Parallelism(tensor=trainer.tensor, pipeline=trainer.pipeline, data=trainer.data),
        timings=Timings(
            publish_s=size / PUSH_BYTES_PER_S if weights.publish_s is None else weights.publish_s,
            pull_s=size / PULL_BYTES_PER_S if weights.pull_s is None else weights.pull_s,
            load_s=weights.load_s,
            save_s=0.0,
        ),
        train_updates=config.trainer.minibatches,
        trainer_utilization=trainer.utilization,
    )
    families = {task.name: FAMILIES[pools.tasks[task.name]] for task in config.tasks}
    return PoolSite(config, cluster, families)


def _model(pools: Pools, config: Config) -> ModelShape:
    if pools.model is None:
        return shape_of(config)
    if pools.model not in MODELS:
        raise ConfigError(f"there is no model {pools.model!r} to plan with; there are {', '.join(MODELS)}")
    return MODELS[pools.model]
