"""A Megatron-core GPTModel for an ``Architecture``.

The layers are Megatron's local ones with torch's scaled-dot-product attention as their core, the same code
on CPU and GPU.  Sequences are padded on the right and attention is causal, so that padding never reaches a
real token and no mask is built.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rollart.workers.megatron import ON_CPU
from rollart.workers.megatron.architecture import Architecture

__all__ = ["LanguageModel"]


class CausalAttention(torch.nn.Module):
    """Core attention of a layer: causal, grouped queries, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
    ) -> Tensor:
        """query [T, b, heads, d], key and value [T, b, kv heads, d] → [T, b, heads · d]."""
        if attention_mask is not None:
            raise ValueError("the core attention is causal and takes no mask: pad on the right instead")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class LanguageModel:
    """The model and the one way to call it: logits of chosen positions only.

    Most tokens of an agent's trajectory are observations, whose logits nobody needs; the rows that count are
    picked between the last layer and the output layer, which saves the vocabulary-wide work on the others.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.config = _transformer_config(architecture, dtype)
        self.gpt = _build(architecture, self.config)
        self.module: torch.nn.Module = self.gpt
        if dtype is torch.bfloat16:
            self.module = Float16Module(self.config, self.gpt)
        self._rows: Tensor | None = None
        self.gpt.output_layer.register_forward_pre_hook(self._pick)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.gpt.parameters()).device
        return device

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The weights under Megatron's names; a tied output layer is there once, as the embedding."""
        named: Iterator[tuple[str, torch.nn.Parameter]] = self.gpt.named_parameters()
        return named

    def logits(self, module: Any, tokens: Tensor, rows: Tensor) -> Tensor:
        """Logits that follow chosen positions.

        ``module`` is the model or a wrapper of it; ``tokens`` int64 [b, T]; ``rows`` int64 [n], each
        position · b + sequence.  → float32 [n, vocabulary].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with self._picking(rows):
            logits: Tensor = module(tokens, positions, None)
        return logits[0].float()

    @contextmanager
    def _picking(self, rows: Tensor) -> Iterator[None]:
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _pick(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        assert self._rows is not None, "the model is called through LanguageModel.logits"
        return hidden.flatten(0, 1).index_select(0, self._rows).unsqueeze(1), *rest


def _transformer_config(shape: Architecture, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        finalize_model_grads_func=finalize_model_grads,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _build(shape: Architecture, config: TransformerConfig) -> GPTModel:
    spec = copy.deepcopy(get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm"))
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
        parallel_output=True,
    )
    return model if ON_CPU else model.cuda()
