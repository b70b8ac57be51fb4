"""How the engines sample."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollart.config.section import (
    PositiveInt,
    Section,
)

__all__ = ["Sampling"]


class Sampling(Section, frozen=True, kw_only=True):
    """How the engine samples; only what the trainer can reproduce exactly is accepted."""

    temperature: Annotated[float, Meta(ge=0.01, le=2)] = 1.0
    """vLLM's range: it raises a lower one to 0.01."""
    max_tokens: PositiveInt = 1
    """Tokens an answer (one turn) has at most."""
    allowed_token_ids: list[int | str] = []
    """The only tokens that may be sampled, as ids or as entries of the tokenizer's vocabulary; empty: all."""
    stop_token_ids: list[int | str] = []
    """Tokens that end an answer, besides the model's end-of-sequence tokens; they stay in the answer."""
    ignore_eos: bool = False
