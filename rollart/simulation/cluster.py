"""Clusters: pools of GPUs, what runs on each, and how a run's simulated workers are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollart.config import Config
from rollart.controller.resource_manager import role_and_number
from rollart.errors import ConfigError
from rollart.launch.local import Placement
from rollart.protocol import Role
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.hardware import ETHERNET_200, HARDWARE, HardwareClass, ModelShape
from rollart.simulation.run import Setup
from rollart.simulation.training import MODEL_FLOPS_UTILIZATION, Parallelism, TrainingCosts
from rollart.simulation.workload import Family
from rollart.simulation.world import Timings

__all__ = ["Cluster", "Pool", "cluster_setup"]

LATENCY_S = {Role.INFERENCE: 0.0005, Role.TRAINER: 0.0005, Role.ENVIRONMENT: 0.002}
"""One way, between the controller and a worker; environments are in another cluster."""
JITTER = 0.3
"""Of the logarithm of a message's delay: an assumption."""


class Pool(msgspec.Struct, frozen=True):
    """GPUs of one class that generate, divided into engines of ``tensor_parallel`` each."""

    hardware_class: str
    gpus: int
    tensor_parallel: int = 1

    @property
    def engines(self) -> int:
        """How many engines fit."""
        return self.gpus // self.tensor_parallel

    @property
    def hardware(self) -> HardwareClass:
        """The published figures of its class."""
        return HARDWARE[self.hardware_class]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has."""

    model: ModelShape
    generation: list[Pool]
    trainer_class: str
    trainer: Parallelism
    timings: Timings
    train_updates: int = 1
    """Optimiser steps a train_step."""
    trainer_utilization: float = MODEL_FLOPS_UTILIZATION
    """Share of the peak that the trainer's own FLOPs get."""

    def __post_init__(self) -> None:
        for name in (self.trainer_class, *(pool.hardware_class for pool in self.generation)):
            if name not in HARDWARE:
                raise ConfigError(f"hardware class {name!r} is not one of {', '.join(HARDWARE)}")
        for pool in self.generation:
            if pool.gpus < 1 or pool.tensor_parallel < 1 or pool.gpus % pool.tensor_parallel:
                raise ConfigError(
                    f"{pool.gpus} {pool.hardware_class} can't be divided into engines of {pool.tensor_parallel}"
                )
        if not self.engines:
            raise ConfigError("there is no generation pool: nothing could sample")
        try:
            self.training_costs()
            for pool in self.generation:
                self.engine_costs(pool)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def engines(self) -> list[Pool]:
        """The pool of each engine, in the order of the inference workers."""
        return [pool for pool in self.generation for _ in range(pool.engines)]

    @property
    def all_engine_costs(self) -> list[EngineCosts]:
        """Of each engine, in the order of the inference workers."""
        return [costs for pool in self.generation for costs in [self.engine_costs(pool)] * pool.engines]

    def engine_costs(self, pool: Pool) -> EngineCosts:
        """What a step of an engine of ``pool`` costs."""
        return EngineCosts(pool.hardware, self.model, tensor_parallel=pool.tensor_parallel)

    def training_costs(self) -> TrainingCosts:
        """What training costs."""
        return TrainingCosts(
            HARDWARE[self.trainer_class], self.model, self.trainer, utilization=self.trainer_utilization
        )

    def train_step_s(self, lengths: Sequence[int], scored: Sequence[int] = ()) -> float:
        """Seconds of a train_step on trajectories of these lengths, with the log-probabilities of all before it,
        whatever would be ``scored``."""
        costs, tokens = self.training_costs(), sum(lengths)
        mean = sum(length * length for length in lengths) / tokens
        return costs.train_step_s(tokens, mean, updates=self.train_updates) + costs.forward_s(tokens, mean)


def cluster_setup(cluster: Cluster, config: Config, families: Mapping[str, Family]) -> Setup:
    """The simulation of ``config`` on ``cluster``; ``ConfigError`` when the two don't fit together."""
    costs = cluster.all_engine_costs
    if config.inference.workers != len(costs):
        raise ConfigError(
            f"inference.workers is {config.inference.workers}, the pools make {len(costs)} engines"
        )
    unknown = [task.name for task in config.tasks if task.name not in families]
    if unknown:
        raise ConfigError(f"task {unknown[0]!r} has no workload model; there are {', '.join(families)}")

    def engine(placement: Placement) -> BatchingEngine:
        _, number = role_and_number(placement.name)
        return BatchingEngine(costs[number], max_requests=config.inference.max_num_seqs)

    return Setup(
        config=config,
        families=families,
        timings=cluster.timings,
        engine=engine,
        step_s=cluster.train_step_s,
        delay=_delay_s,
        jitter=JITTER,
    )


def _delay_s(worker: str, size: int) -> float:
    """Over the controller's Ethernet."""
    role, _ = role_and_number(worker)
    return LATENCY_S[role] + ETHERNET_200.seconds(size)
