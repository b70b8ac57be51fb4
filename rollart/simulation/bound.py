"""The least time that a run's steps could have taken, whatever the schedule does within its rules.

Three limits, the largest counts: the trainer's own work; the generation pools' work, all engines busy all the time
at the best batch that admission allows; and the longest chain of a batch (environments, and an answer's tokens one
after the other on an idle engine), which bounded staleness may spread over ``max_train_lag + 1`` steps.  On-policy
schedules do the three one after the other: there generation waits for training.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollart.config import Config
from rollart.controller import events
from rollart.controller.staleness import bound_of
from rollart.controller.trajectory import State
from rollart.simulation.engine_costs import StepCosts
from rollart.simulation.fitting import mean

__all__ = ["Limits", "Resources", "limits_of"]

ENVIRONMENT_STATES = (State.RESETTING, State.STEPPING, State.SCORING)


class Resources(Protocol):
    """What works."""

    @property
    def all_engine_costs(self) -> Sequence[StepCosts]:
        """Of each engine."""

    def train_step_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a train_step on sequences of these lengths."""


class Limits(msgspec.Struct, frozen=True):
    """Seconds a step can't be faster than, by part."""

    trainer_s: float
    generation_s: float
    chain_s: float
    """Of the longest trajectory of a batch, the mean over batches."""
    spread_s: float
    """The same over the steps that it may take."""
    step_s: float
    """All of them together."""


class _Life:
    """What one trajectory needed in its last attempt."""

    __slots__ = ("contexts", "environment_s", "left_at", "prefilled", "sampled")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.environment_s = 0.0
        self.sampled = self.prefilled = 0
        self.contexts = 0.0
        """Σ over sampled tokens of the context before them."""
        self.left_at = 0.0


def limits_of(stream: bytes, resources: Resources, config: Config, *, first_step: int) -> Limits:
    """Of the steps from ``first_step`` on, by a run's event ``stream``."""
    lives: dict[int, _Life] = defaultdict(_Life)
    batches: list[list[_Life]] = []
    for event in events.parse_events(io.BytesIO(stream), "the simulated run"):
        match event:
            case events.Moved():
                life = lives[event.trajectory]
                if event.after == State.PENDING:
                    life.clear()
                elif event.before in ENVIRONMENT_STATES:
                    life.environment_s += event.t - life.left_at
                life.left_at = event.t
                if event.after in (State.ABORTED, State.FAILED):
                    del lives[event.trajectory]
            case events.Sampled():
                life = lives[event.trajectory]
                life.sampled += event.tokens
            case events.TrainedStep() if event.step >= first_step and not event.skipped:
                batch = []
                for sample in event.samples:
                    life = lives.pop(sample.trajectory)
                    life.prefilled = sample.tokens - sample.sampled
                    life.contexts = sample.sampled * sample.tokens / 2
                    batch.append(life)
                batches.append(batch)
            case _:
                pass
    return _limits(batches, resources, config)


def _limits(batches: list[list[_Life]], resources: Resources, config: Config) -> Limits:
    rollout = config.rollout
    lag = bound_of(rollout.schedule, rollout.staleness_bound, rollout.update_at).max_train_lag
    trainer = mean(
        [resources.train_step_s([life.prefilled + life.sampled for life in batch]) for batch in batches]
    )
    fastest = min(costs.step_s(0, 0, 1, 0) for costs in resources.all_engine_costs)
    chain = mean([max(life.environment_s + life.sampled * fastest for life in batch) for batch in batches])
    generation = mean([_generation_s(batch, resources, config) for batch in batches])
    spread = 0.0 if lag is None else chain / (lag + 1)
    step = trainer + max(generation, chain) if lag == 0 else max(trainer, generation, spread)
    return Limits(trainer, generation, chain, spread, step)


def _generation_s(batch: list[_Life], resources: Resources, config: Config) -> float:
    """Seconds of all pools for a batch's tokens: compute and memory traffic each at their own limit."""
    sampled = sum(life.sampled for life in batch)
    prefilled = sum(life.prefilled for life in batch)
    context = sum(life.contexts for life in batch) / max(1, sampled)
    rollout = config.rollout
    admitted = (rollout.staleness_bound + 1) * rollout.most_open_members
    engines = resources.all_engine_costs
    seats = max(1, min(config.inference.max_num_seqs, admitted // len(engines)))
    decode_rate = compute_rate = 0.0
    for costs in engines:
        at_once = max(1, min(seats, int(costs.kv_capacity / max(1.0, context))))
        decode_rate += at_once / costs.step_s(0, 0, at_once, at_once * context)
        compute_rate += 8192 / costs.step_s(8192, 0, 0, 0)
    return max(sampled / decode_rate, (prefilled + sampled) / compute_rate)
