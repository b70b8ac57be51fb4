"""A whole run, and what its sections must agree on."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rollart.config.algorithm import Algorithm, Loss
from rollart.config.endpoint import Endpoint
from rollart.config.environments import Environments
from rollart.config.evaluation import Evaluation
from rollart.config.health import Health
from rollart.config.inference import Inference
from rollart.config.model import Model
from rollart.config.rewards import Scope
from rollart.config.rollout import Rollout, Schedule
from rollart.config.routing import check_routing
from rollart.config.sampling import Sampling
from rollart.config.section import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rollart.config.tasks import Task
from rollart.config.trainer import Trainer
from rollart.config.weights import Weights

__all__ = ["Config"]


_OF_THE_BATCH = {"loss_mean", "loss_mean_tokens"}

"""What of ``algorithm`` counts for all tasks."""


class Config(Section, frozen=True, kw_only=True):
    """A run."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
    """Names the run folder, ``runs/NAME``."""
    run_dir: str | None = None
    """The run folder, instead of ``runs/NAME``."""
    seed: NonNegativeInt = 0
    """Seeds the order of tasks and the environments."""
    steps: PositiveInt
    """train_steps the run makes."""
    model: Model
    tasks: Annotated[list[Task], Meta(min_length=1)]
    sampling: Sampling = Sampling()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    health: Health = Health()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    weights: Weights = Weights()
    environments: Environments = Environments()
    evaluation: Evaluation = Evaluation()
    endpoint: Endpoint = Endpoint()
    start_timeout_s: PositiveFloat = 600.0
    """For a worker from its start to its readiness."""
    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 30.0
    """A worker, or the controller, that is silent for so long counts as lost."""

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"task names must differ: {', '.join(sorted(repeated))} is there twice")
        for step in sorted({step for task in self.tasks for step in task.curriculum}):
            if not any(task.weight_at(step) for task in self.tasks):
                raise ValueError(f"at step {step} the curriculum gives every task the weight 0")
        if len(self.tasks) == 1 and (self.tasks[0].curriculum or self.tasks[0].weight != 1.0):
            name = "curriculum" if self.tasks[0].curriculum else "weight"
            raise ValueError(f"task {self.tasks[0].name}: {name} does nothing, since there is no other task")
        for task in self.tasks:
            if (task.context_tokens or 0) > self.inference.max_model_len:
                raise ValueError(
                    f"task {task.name}: context_tokens ({task.context_tokens}) is beyond inference.max_model_len "
                    f"({self.inference.max_model_len})"
                )
            if (task.sampling.max_tokens or 0) >= (task.context_tokens or self.inference.max_model_len):
                raise ValueError(
                    f"task {task.name}: sampling.max_tokens ({task.sampling.max_tokens}) leaves no room for a prompt"
                )
        if self.heartbeat_timeout_s <= 2 * self.heartbeat_s:
            raise ValueError("heartbeat_timeout_s must be more than twice heartbeat_s")
        if self.model.random and self.inference.max_model_len > self.model.random.max_position_embeddings:
            raise ValueError(
                f"inference.max_model_len ({self.inference.max_model_len}) is beyond "
                f"model.random.max_position_embeddings ({self.model.random.max_position_embeddings})"
            )
        agents = [task.name for task in self.tasks if task.is_agent]
        if not agents and self.endpoint != Endpoint():
            raise ValueError("endpoint does nothing: no task has an agent")
        if agents and self.rollout.schedule is Schedule.SYNC:
            raise ValueError(
                f"rollout.schedule sync takes every turn of all trajectories together, which task {agents[0]} can't: "
                "its agent decides by itself when it calls"
            )
        if self.sampling.max_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"inference.max_model_len ({self.inference.max_model_len})"
            )

        for each in [self.algorithm, *(task.algorithm for task in self.tasks if task.algorithm)]:
            if self.trainer.stream_batch and each.needs_whole_batch:
                raise ValueError(
                    f"trainer.stream_batch can't be with algorithm.advantage: {each.advantage}, which is normalised "
                    "over the whole batch"
                )
            if self.trainer.context_parallel > 1 and each.loss in (Loss.GSPO, Loss.TOPR):
                raise ValueError(
                    f"algorithm.loss: {each.loss} needs the ratio of whole trajectories, which "
                    "trainer.context_parallel divides"
                )
        for task in self.tasks:
            own = task.algorithm
            if own is not None and (own.loss_mean, own.loss_mean_tokens) != (
                self.algorithm.loss_mean,
                self.algorithm.loss_mean_tokens,
            ):
                raise ValueError(
                    f"task {task.name} has algorithm.loss_mean: {own.loss_mean}, but the run has "
                    f"{self.algorithm.loss_mean}: a batch has one mean, so write the run's into the task's section too"
                )
        if all(task.algorithm for task in self.tasks) and self.algorithm.given().keys() - _OF_THE_BATCH:
            raise ValueError(
                "algorithm does nothing where every task has its own: leave only loss_mean and loss_mean_tokens in it"
            )
        if agents and len(agents) == len(self.tasks) and self.environments.warm_groups:
            raise ValueError(
                "environments.warm_groups does nothing: every task has an agent, which resets nothing"
            )
        self._check_split_limits()
        self._check_measured()
        check_routing(
            self.inference.all_pools, self.inference.hw_affinity, self.inference.disaggregation, names
        )
        if self.trainer.minibatches > self.rollout.groups_per_batch:
            raise ValueError(
                f"trainer.minibatches ({self.trainer.minibatches}) must be at most rollout.groups_per_batch "
                f"({self.rollout.groups_per_batch}): a minibatch is a share of the groups"
            )
        places = self.environments.workers * self.environments.max_sessions
        if self.rollout.schedule is Schedule.SYNC and places < self.rollout.most_open_members:
            raise ValueError(
                f"rollout.schedule sync takes every turn together, so all {self.rollout.most_open_members} "
                f"trajectories of a batch need a place: environments.workers × max_sessions is {places}"
            )
        grouped = [task.name for task in self.tasks for reward in task.rewards if reward.scope is Scope.GROUP]
        if self.rollout.schedule is Schedule.SYNC and grouped:
            raise ValueError(
                f"task {grouped[0]}: a reward of scope group waits for the group's members, and rollout.schedule sync "
                "for the reward"
            )
        if self.evaluation.episodes and self.environments.max_sessions < 2:
            raise ValueError(
                "environments.max_sessions (1) leaves no place for evaluations beside training: make it at least 2"
            )
        if self.trainer.warmup_optimizer_steps >= self.optimizer_steps:
            raise ValueError(
                f"trainer.warmup_optimizer_steps ({self.trainer.warmup_optimizer_steps}) must be below the run's "
                f"{self.optimizer_steps} optimiser steps (steps × trainer.minibatches)"
            )

    def _check_split_limits(self) -> None:
        """``ValueError`` where no request could ever be long enough to be split."""
        limits = self.inference.disaggregation
        if limits is None:
            return
        longest = max(self.sampling_of(task).max_tokens for task in self.tasks)
        if limits.min_prompt_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"inference.disaggregation.min_prompt_tokens ({limits.min_prompt_tokens}) is never reached: "
                f"inference.max_model_len is {self.inference.max_model_len}"
            )
        if limits.min_answer_tokens > longest:
            raise ValueError(
                f"inference.disaggregation.min_answer_tokens ({limits.min_answer_tokens}) is never reached: "
                f"sampling.max_tokens is {longest}"
            )

    def _check_measured(self) -> None:
        """``ValueError`` where ``health`` limits a number that this run never has."""
        algorithms = [self.algorithm_of(task.name) for task in self.tasks]
        needs = {
            "kl_reference": ("algorithm.kl_coefficient", any(a.kl_coefficient for a in algorithms)),
            "correction_mean": ("algorithm.correction", any(a.corrects for a in algorithms)),
            "correction_zero_share": ("algorithm.correction", any(a.corrects for a in algorithms)),
            "logprob_gap_mean": ("trainer.verify_share above 0", self.trainer.verify_share > 0),
            "logprob_gap_max": ("trainer.verify_share above 0", self.trainer.verify_share > 0),
        }
        for name, _ in self.health.limits():
            setting, measured = needs.get(name, ("", True))
            if not measured:
                raise ValueError(f"health.{name} does nothing: it is only measured with {setting}")

    def sampling_of(self, task: Task) -> Sampling:
        """``sampling`` with what ``task`` has otherwise."""
        own = {field: getattr(task.sampling, field) for field in task.sampling.__struct_fields__}
        changed = {field: value for field, value in own.items() if value is not None}
        return msgspec.structs.replace(self.sampling, **changed) if changed else self.sampling

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, at most: a batch of few groups makes fewer."""
        return self.steps * self.trainer.minibatches

    def algorithm_of(self, task: str) -> Algorithm:
        """The algorithm that trains on ``task``'s trajectories; ``KeyError`` when there is no such task."""
        return self.task(task).algorithm or self.algorithm

    def task(self, name: str) -> Task:
        """The task of that name; ``KeyError`` when there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(name)
