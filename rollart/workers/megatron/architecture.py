"""What of a Hugging Face config the trainer builds with Megatron-core, and what it refuses.

A model is refused unless every part of it is reproduced exactly: a silently ignored setting would make the
trainer's log-probabilities differ from the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollart.config import Trainer

__all__ = ["SUPPORTED", "Architecture", "UnsupportedModel"]

SUPPORTED = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the models that can be trained."""


class UnsupportedModel(ValueError):
    """The model can't be trained; the message says what is not supported and what is."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder with rotary positions, RMSNorm and SiLU-gated MLPs, one a layer or one an expert."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    """Of each layer; 0: it has one MLP."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_topk: bool = True
    """Whether the weights of a token's experts sum to 1."""

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """The architecture of a ``transformers`` config; ``UnsupportedModel`` where it can't be trained."""
        if config.model_type not in SUPPORTED:
            raise UnsupportedModel(
                f"model_type {config.model_type!r} is not supported by the trainer; "
                f"supported are {', '.join(SUPPORTED)}"
            )
        _check(config)
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_theta=float(_rope(config)["rope_theta"]),
            tied=bool(config.tie_word_embeddings),
            qkv_bias=config.model_type == "qwen2",
            qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
            **_experts(config),
        )

    def check_layout(self, layout: Trainer) -> None:
        """``UnsupportedModel`` when the model can't be divided as ``layout`` says."""
        tensor, pipeline, expert = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
        divided = [
            ("tensor_parallel", tensor, "attention heads", self.heads),
            ("tensor_parallel", tensor, "key-value heads", self.kv_heads),
            ("tensor_parallel", tensor, "tokens of vocabulary", self.vocab_size),
            ("tensor_parallel", tensor, "intermediate size", self.intermediate_size),
            ("pipeline_parallel", pipeline, "layers", self.layers),
            ("expert_parallel", expert, "experts", self.experts),
        ]
        for name, parts, what, number in divided:
            if number % parts or (parts > 1 and not number):
                raise UnsupportedModel(
                    f"trainer.{name} ({parts}) must divide the model's {what}: the {self.model_type} model has {number}"
                )


def _experts(config: Any) -> dict[str, Any]:
    if config.model_type == "mixtral":
        return {
            "experts": config.num_local_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_intermediate_size": config.intermediate_size,
        }
    if config.model_type == "qwen3_moe":
        return {
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_intermediate_size": config.moe_intermediate_size,
            "norm_topk": config.norm_topk_prob,
        }
    return {}


def _rope(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    return dict(parameters) if parameters else {"rope_type": "default", "rope_theta": config.rope_theta}


def _check(config: Any) -> None:
    rope = _rope(config)
    refused = {
        "hidden_act": (config.hidden_act, config.hidden_act == "silu"),
        "rope_type": (rope.get("rope_type", "default"), rope.get("rope_type", "default") == "default"),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", 1.0),
            rope.get("partial_rotary_factor", 1.0) == 1.0,
        ),
        "attention_bias": (
            getattr(config, "attention_bias", False),
            not getattr(config, "attention_bias", False),
        ),
        "mlp_bias": (getattr(config, "mlp_bias", False), not getattr(config, "mlp_bias", False)),
        "layer_types": (
            getattr(config, "layer_types", None),
            all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or []),
        ),
        "sliding_window": (
            getattr(config, "sliding_window", None),
            config.model_type != "mixtral" or config.sliding_window is None,
        ),
        "mlp_only_layers": (
            getattr(config, "mlp_only_layers", None),
            not getattr(config, "mlp_only_layers", None),
        ),
        "decoder_sparse_step": (
            getattr(config, "decoder_sparse_step", 1),
            getattr(config, "decoder_sparse_step", 1) == 1,
        ),
    }
    wrong = [f"{name}: {value!r}" for name, (value, fine) in refused.items() if not fine]
    if wrong:
        raise UnsupportedModel(
            f"the {config.model_type} model has settings that the trainer does not reproduce: "
            f"{'; '.join(wrong)} (it supports silu, default rotary positions over whole heads, "
            "no attention or MLP biases but Qwen2's, full attention in every layer, and experts in all layers or none)"
        )
