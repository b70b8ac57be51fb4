"""The layers' core attention and norm: torch's own, the same code on CPU and GPU.

Megatron's local layers come with an attention that takes no packed sequences and no context parallelism, and a norm
that refuses sequence parallelism.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["CausalAttention", "RMSNorm", "context_order"]


class CausalAttention(torch.nn.Module):
    """Core attention of a layer: causal, grouped queries, no dropout; padded rows, or packed sequences in one."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """query [T, b, heads, d], key and value [T, b, kv heads, d] → [T, b, heads · d]; packed ones have no b."""
        if attention_mask is not None:
            raise ValueError("the core attention is causal and takes no mask: pad on the right instead")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.config.context_parallel_size > 1:
            return self._of_context(q, k, v).permute(2, 0, 1, 3).flatten(2)
        return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """[b, heads, T, d]."""
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """query [T, heads, d] of several sequences → [T, heads · d]: no token sees another sequence."""
        edges = packed.cu_seqlens_q.tolist()
        lengths = [after - first for first, after in pairwise(edges)]
        parts = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        mixed = [self._attend(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1) for part in parts]
        return torch.cat(mixed).flatten(1)

    def _of_context(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The queries of this process's part of the context against the keys of all."""
        size, rank = self.config.context_parallel_size, parallel_state.get_context_parallel_rank()
        keys, values = (_gather_context(x) for x in (key, value))
        total = query.shape[2] * size
        orders = [context_order(total, size, each).to(query.device) for each in range(size)]
        mask = orders[rank][:, None] >= torch.cat(orders)[None]
        return self._attend(query, keys, values, mask)


def context_order(total: int, size: int, rank: int) -> Tensor:
    """Which of ``total`` positions process ``rank`` of ``size`` holds, in its order, int64 [total / size].

    Of 2 · size equal pieces it holds piece ``rank`` and the one as far from the end, so that all have the same work:
    Megatron's order, by which its rotary positions go.
    """
    pieces = torch.arange(total).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class _GatherContext(torch.autograd.Function):
    """[b, heads, T / size, d] of each process → [b, heads, T, d], process after process."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        own: Tensor = gradient.chunk(group.size(), 2)[group.rank()]
        return own


def _gather_context(own: Tensor) -> Tensor:
    gathered: Tensor = _GatherContext.apply(own)  # type: ignore[no-untyped-call]
    return gathered


class RMSNorm(torch.nn.RMSNorm):
    """torch's, whose gradient Megatron adds up where each process norms a part of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
