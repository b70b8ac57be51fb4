"""The environment workers."""

from __future__ import annotations

from rollart.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

__all__ = ["Environments"]


class Environments(Section, frozen=True, kw_only=True):
    """The environment workers."""

    workers: PositiveInt = 1
    threads: PositiveInt = 8
    """Environments of one worker that act at the same time."""
    max_sessions: PositiveInt = 4096
    """Episodes a worker holds at once."""
    warm_groups: NonNegativeInt = 0
    """Groups whose environments are reset before the staleness bound admits them, so that nobody waits for it."""
    backoff_s: NonNegativeFloat = 0.2
    """An episode that begins again after an infrastructure failure waits so long, then twice as long, and so on."""
    restarts: NonNegativeInt = 8
    """As of ``inference``."""
    max_output_mib: PositiveFloat = 16.0
    """What one episode may print; more fails it.  It goes to the worker's log."""
