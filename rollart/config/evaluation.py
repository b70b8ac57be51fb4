"""Episodes on the held-out split."""

from __future__ import annotations

from rollart.config.section import (
    NonNegativeInt,
    Section,
)

__all__ = ["Evaluation"]


class Evaluation(Section, frozen=True, kw_only=True):
    """Greedy episodes on the held-out split, before the first update and after the last at least."""

    episodes: NonNegativeInt = 0
    """0: no evaluation."""
    every: NonNegativeInt = 0
    """train_steps between further evaluations; 0: none between."""

    def __post_init__(self) -> None:
        if self.every and not self.episodes:
            raise ValueError("every does nothing while episodes is 0")
