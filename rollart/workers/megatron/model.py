"""A Megatron-core GPTModel for an ``Architecture``, or this process's part of one.

The layers are Megatron's local ones with torch's attention as their core (``attention``), the same code on CPU and
GPU.  Sequences are padded on the right and attention is causal, so that padding never reaches a real token and no
mask is built.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rollart.config import Recompute
from rollart.config import Trainer as TrainerConfig
from rollart.workers.megatron import ON_CPU
from rollart.workers.megatron.architecture import Architecture
from rollart.workers.megatron.attention import CausalAttention, RMSNorm, context_order
from rollart.workers.megatron.micro_batch import MicroBatch
from rollart.workers.megatron.shards import share_dimension

__all__ = ["LanguageModel"]


class LanguageModel:
    """The model and the one way to call it: logits of chosen positions only.

    Most tokens of an agent's trajectory are observations, whose logits nobody needs; the rows that count are
    picked between the last layer and the output layer, which saves the vocabulary-wide work on the others.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype, layout: TrainerConfig) -> None:
        self.architecture = architecture
        self.config = _transformer_config(architecture, dtype, layout)
        self.gpt = _build(architecture, self.config)
        for name, parameter in self.gpt.named_parameters():
            dimension = share_dimension(name)
            # Megatron itself says so only where it draws the weights.
            if dimension is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
        self.module: torch.nn.Module = self.gpt
        if dtype is torch.bfloat16:
            self.module = Float16Module(self.config, self.gpt)
        self._context = layout.context_parallel
        self.length_multiple = layout.tensor_parallel * (2 * self._context if self._context > 1 else 1)
        """Of which the length of a micro-batch's rows must be a multiple."""
        self._rows: Tensor | None = None
        if self.gpt.post_process:
            self._prepare_output(self.gpt.output_layer)

    def _prepare_output(self, layer: Any) -> None:
        if self.config.sequence_parallel:  # ``_pick`` gathers the sequence, so that the layer must not
            layer.sequence_parallel, layer.allreduce_dgrad = False, True
        layer.register_forward_pre_hook(self._pick)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.gpt.parameters()).device
        return device

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The weights of this process under the whole model's names in Megatron.

        A tied output layer is there once, as the embedding, but for a last pipeline stage that has a copy of it.
        """
        for name, parameter in self.gpt.named_parameters():
            yield self._global_name(name), parameter

    def logits(self, module: Any, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """The logits that follow the chosen rows of ``micro``: [1, n, vocabulary].

        ``module`` is the model or a wrapper of it.  Where the context is divided, the micro-batch that comes back
        has only the rows of this process's part.  On a pipeline stage that isn't the last, the hidden states.
        """
        packed = _packed(micro) if micro.packed else None
        tokens, positions = micro.tokens, micro.positions
        if self._context > 1:
            micro, order = self._own_part(micro)
            tokens, positions = tokens[:, order], positions[:, order]
        with self._picking(micro.rows):
            output: Tensor = module(tokens, positions, None, packed_seq_params=packed)
        if self.gpt.post_process and self.config.tensor_model_parallel_size > 1:
            output = gather_from_tensor_model_parallel_region(output)
        return micro, output

    def _own_part(self, micro: MicroBatch) -> tuple[MicroBatch, Tensor]:
        total, width = micro.tokens.shape[1], micro.tokens.shape[0]
        order = context_order(total, self._context, parallel_state.get_context_parallel_rank())
        order = order.to(micro.rows.device)
        place = torch.full((total,), -1, device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        mine = place[micro.rows // width] >= 0
        here = mine.cpu()
        rows = place[micro.rows[mine] // width] * width + micro.rows[mine] % width
        return replace(micro, rows=rows, slots=micro.slots[here], sequences=micro.sequences[here]), order

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
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden.flatten(0, 1).index_select(0, self._rows).unsqueeze(1), *rest

    def _global_name(self, name: str) -> str:
        if not name.startswith("decoder.layers."):
            return name
        first = self.gpt.decoder.layers[0].layer_number - 1
        name = re.sub(
            r"^decoder\.layers\.(\d+)", lambda found: f"decoder.layers.{int(found[1]) + first}", name
        )
        if not self.architecture.experts:
            return name
        here = self.architecture.experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * here
        return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) + first}", name)


def _packed(micro: MicroBatch) -> PackedSeqParams:
    lengths = torch.tensor([0, *micro.lengths], dtype=torch.int32, device=micro.tokens.device)
    edges = lengths.cumsum(0, dtype=torch.int32)
    longest = max(micro.lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _transformer_config(shape: Architecture, dtype: torch.dtype, layout: TrainerConfig) -> TransformerConfig:
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
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        sequence_parallel=layout.tensor_parallel > 1,
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=layout.pipeline_parallel > 1,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_recompute(layout),
        **_experts(shape),
    )


def _recompute(layout: TrainerConfig) -> dict[str, Any]:
    match layout.recompute:
        case Recompute.NONE:
            return {}
        case Recompute.ATTENTION:
            return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        case Recompute.LAYERS:
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(shape: Architecture) -> dict[str, Any]:
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_intermediate_size,
        "moe_router_pre_softmax": not shape.norm_topk,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_router_dtype": "fp32",
    }


def _build(shape: Architecture, config: TransformerConfig) -> GPTModel:
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    model = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm),
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
