"""The policy."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollart.config.section import (
    NonNegativeInt,
    PositiveInt,
    Section,
)

__all__ = ["Model", "RandomModel"]


class RandomModel(Section, frozen=True, kw_only=True):
    """A Qwen3 of this shape with weights drawn from ``seed``, and a tokenizer with one token a character."""

    seed: NonNegativeInt = 0
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, Meta(ge=32, multiple_of=32)] = 32
    """vLLM's attention on CPU takes multiples of 32."""
    max_position_embeddings: PositiveInt = 512
    tie_word_embeddings: bool = False
    characters: str | None = None
    """The tokenizer's characters; by default printable ASCII and the newline."""
    tokens: list[str] = []
    """Texts that are one token each, beside the characters: whole tool calls, say."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.characters is not None and len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat a character")
        if len(set(self.tokens)) != len(self.tokens) or any(len(token) < 2 for token in self.tokens):
            raise ValueError("tokens must be different texts of at least 2 characters")


class Model(Section, frozen=True, kw_only=True):
    """The policy: a Hugging Face folder, or a random model."""

    path: str | None = None
    random: RandomModel | None = None
    chat_template: str | None = None
    """A Jinja file that renders messages, instead of the folder's own template; for environments that use messages."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.random is None):
            raise ValueError("give either path (a Hugging Face folder) or random (a model from a seed)")
