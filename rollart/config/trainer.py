"""The trainer."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from rollart.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)

__all__ = ["DType", "Decay", "Recompute", "Trainer"]


class DType(enum.StrEnum):
    """Floating-point type of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Decay(enum.StrEnum):
    """What the learning rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """It falls to 0 over the run's optimiser steps."""


class Recompute(enum.StrEnum):
    """What the backward pass computes again instead of having kept it."""

    NONE = "none"
    ATTENTION = "attention"
    """The core attention of each layer."""
    LAYERS = "layers"
    """Every layer, from its input."""


class Trainer(Section, frozen=True, kw_only=True):
    """The Megatron-core trainer."""

    learning_rate: PositiveFloat = 1e-6
    warmup_optimizer_steps: NonNegativeInt = 0
    """The rate rises linearly over so many optimiser steps."""
    learning_rate_decay: Decay = Decay.CONSTANT
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad_norm: PositiveFloat = 1.0
    minibatches: PositiveInt = 1
    """Optimiser steps a train_step makes, each on a share of the groups."""
    stream_batch: bool = False
    """Compute the gradients of groups as they arrive, and make the step when the batch is whole, instead of waiting
    for it: the same gradient, within rounding."""
    micro_batch_sequences: PositiveInt | None = None
    """Trajectories side by side in a forward pass, padded to the longest; by default 16."""
    micro_batch_tokens: PositiveInt | None = None
    """Instead: trajectories are packed one after the other, without padding, up to so many tokens a forward pass; a
    longer trajectory has one of its own."""
    recompute: Recompute = Recompute.NONE
    dtype: DType = DType.FLOAT32
    tensor_parallel: PositiveInt = 1
    """Processes that hold a share of each layer.  The trainer is a group of tensor × pipeline × context × data
    processes."""
    pipeline_parallel: PositiveInt = 1
    """Processes that hold a share of the layers."""
    data_parallel: PositiveInt = 1
    """Processes that hold the same weights and compute a share of the batch."""
    expert_parallel: PositiveInt = 1
    """Of the data-parallel processes, so many hold a share of the experts each."""
    context_parallel: PositiveInt = 1
    """Processes that compute a share of each trajectory's tokens."""
    distributed_optimizer: bool = False
    """Each data-parallel process holds a share of the optimiser's state."""
    threads: PositiveInt = 1
    """CPU threads of torch."""
    verify_share: Share = 1.0
    """Share of the trajectories whose log-probabilities are recomputed under the weights that sampled them."""
    step_timeout_s: PositiveFloat = 3600.0
    """For one request; a trainer that takes longer is ended, and started again."""
    restarts: NonNegativeInt = 8
    """As of ``inference``; what was trained since its last checkpoint is trained again."""
    checkpoint_every: NonNegativeInt = 0
    """train_steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: PositiveInt | None = None
    """Older ones are removed; by default 2 stay."""
    keep_best: bool = False
    """Besides them the best one stays: by the last held-out success where evaluations are made during the run
    (``evaluation.every``), else by the success of the batch."""

    def __post_init__(self) -> None:
        if self.keep_checkpoints is not None and not self.checkpoint_every:
            raise ValueError("keep_checkpoints does nothing while checkpoint_every is 0")
        if self.keep_best and not self.checkpoint_every:
            raise ValueError("keep_best does nothing while checkpoint_every is 0")
        if self.stream_batch and self.minibatches > 1:
            raise ValueError(
                "stream_batch makes one optimiser step of the whole batch: it needs minibatches: 1"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_sequences is not None:
            raise ValueError("give either micro_batch_sequences (padded) or micro_batch_tokens (packed)")
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel ({self.expert_parallel}) must divide data_parallel ({self.data_parallel}): "
                "the experts are divided among data-parallel processes"
            )
        if self.distributed_optimizer and self.data_parallel * self.context_parallel == 1:
            raise ValueError("distributed_optimizer does nothing while data_parallel is 1")
        if self.context_parallel > 1 and self.micro_batch_tokens is not None:
            raise ValueError(
                "context_parallel divides padded trajectories: use micro_batch_sequences with it"
            )

    @property
    def processes(self) -> int:
        """Of the trainer's group."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def sequences(self) -> int:
        """``micro_batch_sequences``."""
        return self.micro_batch_sequences or 16
