"""Megatron's gradient buffers, Adam and schedule, applied as a whole or not at all.

Weight decay skips one-dimensional parameters, which Megatron does only through its scheduler.  The rate of
optimiser step k (from 1) is ``learning_rate · min(1, k / warmup)``.  Adam's state exists from the start, so
that a step can be undone and a checkpoint taken at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from rollart.config import Decay
from rollart.config import Trainer as TrainerConfig
from rollart.workers.megatron.model import LanguageModel

__all__ = ["Optimizer", "OptimizerSnapshot"]

_FOREVER = 2**62
"""Steps of a schedule without an end."""

OptimizerSnapshot = tuple[int, list[dict[str, Tensor]], list[Tensor]]
"""Scheduler steps, Adam's state by parameter, and the optimiser's own parameters."""


class Optimizer:
    """Owns the gradients of ``model`` and changes its weights."""

    def __init__(self, model: LanguageModel, config: TrainerConfig, *, steps: int) -> None:
        """``steps``: the run's optimiser steps, over which a rate that decays reaches 0."""
        self._config = config
        self._half_applied = False
        bf16 = model.config.bf16
        shared = config.distributed_optimizer
        self.module = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=shared),
            model.module,
        )
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad_norm,
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=shared,
        )
        self.megatron = get_megatron_optimizer(
            options, [self.module], config_overrides=get_standard_config_overrides(options)
        )
        self.parts: list[Any] = [
            part
            for part in getattr(self.megatron, "chained_optimizers", [self.megatron])
            if not getattr(part, "is_stub_optimizer", False)
        ]
        """With experts there are two: theirs and the rest's."""
        model.config.grad_scale_func = self.megatron.scale_loss
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.learning_rate,
            min_lr=0.0,
            lr_warmup_steps=config.warmup_optimizer_steps,
            lr_decay_steps=_FOREVER if config.learning_rate_decay is Decay.CONSTANT else steps,
            lr_decay_style=config.learning_rate_decay.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=_FOREVER,
            wd_incr_style="constant",
        )
        self.start_state()

    @property
    def learning_rate(self) -> float:
        """The rate of the last optimiser step."""
        return float(self.megatron.param_groups[0]["lr"])

    def zero_gradients(self) -> None:
        """Forget the gradients so far."""
        self.module.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the accumulated gradient before clipping; nothing is applied."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    @torch.no_grad()
    def apply(self, norm: float) -> None:
        """Clip the gradient, whose norm is ``norm``, and make one optimiser step."""
        self._half_applied = True
        self.scheduler.step(1)
        for part in self.parts:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self._config.clip_grad_norm, norm)
        self.megatron.step_with_ready_grads()
        self._half_applied = False

    def require_whole(self) -> None:
        """``RuntimeError`` when an ``apply`` failed half-way and was not undone."""
        if self._half_applied:
            raise RuntimeError(
                "an optimiser step failed half-way, so the weights are of no version: "
                "restart the trainer from its last checkpoint"
            )

    def start_state(self) -> None:
        """Give every parameter that has none Adam's initial state, with a step counter of its own."""
        for adam, parameter in self._owned():
            values = adam.state[parameter]
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in values:
                    values[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if "step" not in values:
                values["step"] = torch.tensor(0.0)

    def load_state(self, state: Any) -> None:
        """Take over a state that Megatron loaded from a checkpoint.

        Megatron stores Adam's step once for all parameters, and not at all while it is 0; its distributed optimiser
        gives all parameters one and the same step tensor, which each of them would count up.
        """
        for each in state.values() if 0 in state else [state]:
            adam = each.get("optimizer", each)
            if "state" in adam:
                adam["state"].setdefault("common_step", torch.tensor(0.0))
        self.megatron.load_state_dict(state)
        for adam, parameter in self._owned():
            adam.state[parameter]["step"] = adam.state[parameter]["step"].clone()

    def snapshot(self) -> OptimizerSnapshot:
        """A copy of everything that ``apply`` changes, except the model's own weights."""
        owned = list(self._owned())
        states = [{key: value.clone() for key, value in adam.state[each].items()} for adam, each in owned]
        return self.scheduler.num_steps, states, [each.detach().clone() for _, each in owned]

    @torch.no_grad()
    def restore(self, snapshot: OptimizerSnapshot) -> None:
        """Back to ``snapshot``."""
        steps, states, values = snapshot
        for (adam, parameter), saved, value in zip(self._owned(), states, values, strict=True):
            for key, tensor in saved.items():
                adam.state[parameter][key].copy_(tensor)
            parameter.copy_(value)
        self.scheduler.num_steps = steps
        self.scheduler.step(0)
        self._half_applied = False

    def _owned(self) -> Iterator[tuple[Any, Tensor]]:
        """Adam and each parameter it changes: of the distributed optimiser, this process's share."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield part.optimizer, parameter
