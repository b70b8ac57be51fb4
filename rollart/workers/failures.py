"""Why a worker can't serve a request, where that is not its infrastructure's fault."""

from __future__ import annotations

__all__ = ["Deterministic", "Lost"]


class Lost(Exception):
    """What a request needs is not in the store any more."""


class Deterministic(Exception):
    """A request failed in a way that the same request would fail again."""
