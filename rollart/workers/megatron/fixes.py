"""What Megatron-core 0.16.1 has wrong where neither TransformerEngine nor Apex is installed, on CPU and GPU alike."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["fix_megatron"]


def fix_megatron(*, on_cpu: bool) -> None:
    """Mend it; to do so again changes nothing."""
    _fix_experts(on_cpu)
    _fix_distributed_optimizer()


def _fix_experts(on_cpu: bool) -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # it is asked for, but only defined with TransformerEngine
    if on_cpu:
        # The sizes of an all-to-all must be numbers, which it makes of CUDA tensors only.
        token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _fix_distributed_optimizer() -> None:
    """torch's AdamW keeps a step counter beside the moments, which a checkpoint's shards don't have."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "keeps_step", False):
        return

    @functools.wraps(original)
    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    with_step.keeps_step = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
