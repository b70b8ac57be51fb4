"""What every section of the config is made of: the Struct they share, and numbers with limits."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "MAX_INT",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "Share",
]

MAX_INT = 2**53
"""The largest integer that every reader of the config can hold."""
PositiveInt = Annotated[int, Meta(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of every part of the config."""
