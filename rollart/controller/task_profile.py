"""What each task's turns turn out to be like: the ground on which ``hw_affinity: auto`` proposes a mapping."""

from __future__ import annotations

import msgspec

from rollart.controller.trajectory import Trajectory
from rollart.protocol import Generated

__all__ = ["TaskProfile", "TaskProfiles"]

MEMORY_TURNS = 256
"""An older turn weighs less: by 1/e after so many."""


class TaskProfile(msgspec.Struct):
    """Of one task; means over recent turns."""

    turns: int = 0
    """Seen so far."""
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    hit_share: float = 0.0
    """Of the prompt tokens, those that were in a cache."""
    turn_number: float = 0.0
    """Half of what a trajectory has, about."""

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens a turn that had to be computed."""
        return self.prompt_tokens * (1.0 - self.hit_share)

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens:.0f} prompt tokens ({self.hit_share:.0%} of them cached) and "
            f"{self.answer_tokens:.0f} answer tokens a turn, turn {self.turn_number:.1f} on average"
        )


class TaskProfiles:
    """Of every task of a run."""

    def __init__(self) -> None:
        self.by_task: dict[str, TaskProfile] = {}

    def answered(self, trajectory: Trajectory, generated: Generated, tokens: int) -> None:
        """A turn of ``tokens`` answer tokens; the trajectory does not have them yet."""
        profile = self.by_task.get(trajectory.task)
        if profile is None:
            profile = self.by_task[trajectory.task] = TaskProfile()
        profile.turns += 1
        weight = 1.0 / min(profile.turns, MEMORY_TURNS)
        prompt = trajectory.tokens
        profile.prompt_tokens += weight * (prompt - profile.prompt_tokens)
        profile.answer_tokens += weight * (tokens - profile.answer_tokens)
        profile.hit_share += weight * (min(1.0, generated.cached_tokens / prompt) - profile.hit_share)
        profile.turn_number += weight * (trajectory.turns + 1 - profile.turn_number)

    def answer_tokens(self, task: str) -> float | None:
        """Tokens of an answer that are to be expected; ``None``: there was none yet."""
        profile = self.by_task.get(task)
        return None if profile is None else profile.answer_tokens
