"""What of a Hugging Face config the trainer builds with Megatron-core, and what it refuses.

A model is refused unless every part of it is reproduced exactly: a silently ignored setting would make the
trainer's log-probabilities differ from the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SUPPORTED", "Architecture", "UnsupportedModel"]

SUPPORTED = ("llama", "qwen2", "qwen3")
"""``model_type`` of the dense models that can be trained."""


class UnsupportedModel(ValueError):
    """The model can't be trained; the message says what is not supported and what is."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a dense decoder with rotary positions, RMSNorm and a SiLU-gated MLP."""

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

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """The architecture of a ``transformers`` config; ``UnsupportedModel`` where it can't be trained."""
        if config.model_type not in SUPPORTED:
            raise UnsupportedModel(
                f"model_type {config.model_type!r} is not supported by the trainer; "
                f"supported are the dense models {', '.join(SUPPORTED)}"
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
            qk_norm=config.model_type == "qwen3",
        )


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
    }
    wrong = [f"{name}: {value!r}" for name, (value, fine) in refused.items() if not fine]
    if wrong:
        raise UnsupportedModel(
            f"the {config.model_type} model has settings that the trainer does not reproduce: "
            f"{'; '.join(wrong)} (it supports silu, default rotary positions over whole heads, "
            "no attention or MLP biases but Qwen2's, and full attention in every layer)"
        )
