"""Site: what a plan is made for, a cluster described by pools or a machine that was calibrated, and what it could have
one more of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from rollart.config import Config
from rollart.errors import ConfigError
from rollart.simulation.calibration import (
    Calibration,
    MeasuredCosts,
    calibrated_setup,
    train_step_s,
)
from rollart.simulation.cluster import Cluster, cluster_setup
from rollart.simulation.engine_costs import StepCosts
from rollart.simulation.run import Setup
from rollart.simulation.workload import Family

__all__ = ["CalibratedSite", "PoolSite", "Site"]


class Site(Protocol):
    """Where a run would run."""

    @property
    def config(self) -> Config:
        """Of the run, with as many inference workers as there are engines."""

    @property
    def pools(self) -> list[str]:
        """Of each engine, in the order of the inference workers, its pool's name."""

    @property
    def all_engine_costs(self) -> Sequence[StepCosts]:
        """Of each engine."""

    def train_step_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a train_step on sequences of these lengths."""

    def setup(self) -> Setup:
        """Its simulation; ``ConfigError`` when it can't be."""

    def more(self) -> Iterator[tuple[str, Site]]:
        """What it could have one more of, and itself with that."""

    def notes(self) -> list[str]:
        """What a reader of a plan should know."""


def _with_environment_worker(config: Config) -> Config:
    environments = msgspec.structs.replace(config.environments, workers=config.environments.workers + 1)
    return msgspec.structs.replace(config, environments=environments)


def _with_engines(config: Config, engines: int) -> Config:
    return msgspec.structs.replace(
        config,
        inference=msgspec.structs.replace(
            config.inference, workers=engines, pools=[], hw_affinity={}, disaggregation=None
        ),
    )


class PoolSite:
    """A cluster, its engines and its trainer by published figures."""

    def __init__(self, config: Config, cluster: Cluster, families: Mapping[str, Family]) -> None:
        self.cluster = cluster
        self.config = _with_engines(config, len(cluster.engines))
        self._asked = config.inference.workers
        self._families = families
        context = config.inference.max_model_len
        for pool in cluster.generation:
            capacity = cluster.engine_costs(pool).kv_capacity
            if capacity < context:
                raise ConfigError(
                    f"{cluster.model.name} on {pool.tensor_parallel} {pool.hardware_class} leaves a KV cache of "
                    f"{capacity:,} tokens: a request of inference.max_model_len ({context:,}) doesn't fit"
                )

    @property
    def pools(self) -> list[str]:
        """The hardware class of each engine."""
        return [pool.hardware_class for pool in self.cluster.engines]

    @property
    def all_engine_costs(self) -> Sequence[StepCosts]:
        """Of each engine."""
        return self.cluster.all_engine_costs

    def train_step_s(self, lengths: Sequence[int]) -> float:
        """As of ``Cluster``."""
        return self.cluster.train_step_s(lengths)

    def setup(self) -> Setup:
        """The cluster's, its environments with the threads that the config gives them."""
        setup = cluster_setup(self.cluster, self.config, self._families)
        return msgspec.structs.replace(setup, environment_threads=self.config.environments.threads)

    def more(self) -> Iterator[tuple[str, Site]]:
        """One more engine of each pool, a replica of the trainer, an environment worker."""
        cluster, replace = self.cluster, msgspec.structs.replace
        for number, pool in enumerate(cluster.generation):
            pools = list(cluster.generation)
            pools[number] = replace(pool, gpus=pool.gpus + pool.tensor_parallel)
            gpus = f"{pool.tensor_parallel} {pool.hardware_class}"
            yield f"engine ({gpus})", self._with(replace(cluster, generation=pools))
        plan = cluster.trainer
        replica = f"{plan.tensor * plan.pipeline} {cluster.trainer_class}"
        wider = replace(plan, data=plan.data + 1)
        yield f"trainer replica ({replica})", self._with(replace(cluster, trainer=wider))
        config = _with_environment_worker(self.config)
        yield "environment worker", PoolSite(config, cluster, self._families)

    def notes(self) -> list[str]:
        """What was taken for the config's own."""
        engines = len(self.cluster.engines)
        if self._asked == engines:
            return []
        return [
            f"the pools make {engines} engines: inference.workers is taken as {engines}, not {self._asked}"
        ]

    def _with(self, cluster: Cluster) -> PoolSite:
        return PoolSite(self.config, cluster, self._families)


class CalibratedSite:
    """The machine of a run that was calibrated."""

    def __init__(
        self,
        config: Config,
        calibration: Calibration,
        *,
        slower: Mapping[str, float] | None = None,
        replicas: int = 1,
        cores: int | None = None,
    ) -> None:
        """Arguments as of ``calibrated_setup``."""
        self.config = config
        self._calibration = calibration
        self._slower = dict(slower or {})
        self._replicas = replicas
        self._cores = cores or calibration.machine.cores
        unknown = [name for name in self._slower if name not in {task.name for task in config.tasks}]
        if unknown:
            raise ConfigError(f"the config has no task {unknown[0]!r} whose environment could be slower")
        if config.inference.max_model_len > calibration.engine.kv_tokens:
            raise ConfigError(
                f"a request of inference.max_model_len ({config.inference.max_model_len:,}) doesn't fit in the "
                f"calibrated engine's KV cache of {calibration.engine.kv_tokens:,} tokens"
            )
        self.setup()  # says what doesn't fit together

    @property
    def pools(self) -> list[str]:
        """All in one."""
        return ["generation"] * self.config.inference.workers

    @property
    def all_engine_costs(self) -> Sequence[StepCosts]:
        """Of each engine, alone on the machine."""
        return [MeasuredCosts(self._calibration.engine)] * self.config.inference.workers

    def train_step_s(self, lengths: Sequence[int]) -> float:
        """Alone on the machine."""
        return train_step_s(self._calibration, self.config, self._replicas, lengths)

    def setup(self) -> Setup:
        """As of ``calibrated_setup``."""
        return calibrated_setup(
            self._calibration, self.config, replicas=self._replicas, slower=self._slower, cores=self._cores
        )

    def more(self) -> Iterator[tuple[str, Site]]:
        """One more engine, replica of the trainer, environment worker, and CPU core."""
        engines = _with_engines(self.config, self.config.inference.workers + 1)
        yield "engine", self._with(config=engines)
        yield "trainer replica", self._with(replicas=self._replicas + 1)
        yield "environment worker", self._with(config=_with_environment_worker(self.config))
        yield "CPU core", self._with(cores=self._cores + 1)

    def notes(self) -> list[str]:
        """What the run that was calibrated on can't tell of this one."""
        found = []
        for task in self.config.tasks:
            known = self._calibration.tasks[task.name].max_turns
            if task.max_turns > known:
                found.append(
                    f"task {task.name}: the calibrated run cut its episodes at {known} turns; longer ones aren't known"
                )
        machine = self._calibration.machine
        for name, now, then in (
            ("inference.threads", self.config.inference.threads, machine.engine_threads),
            ("trainer.threads", self.config.trainer.threads, machine.trainer_threads),
        ):
            if now != then:
                found.append(
                    f"{name} was {then} in the calibrated run: what {now} bring to one step isn't known"
                )
        return found

    def _with(
        self, *, config: Config | None = None, replicas: int | None = None, cores: int | None = None
    ) -> CalibratedSite:
        return CalibratedSite(
            config or self.config,
            self._calibration,
            slower=self._slower,
            replicas=replicas or self._replicas,
            cores=cores or self._cores,
        )
