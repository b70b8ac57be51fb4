"""Reward functions: the interface, and the kinds that are built in."""

from __future__ import annotations

from rollart.rewards.kinds import (
    environment_reward,
    exact_match,
    format_check,
    group_rank,
    schema_check,
    turns_match,
)
from rollart.rewards.view import EnvironmentView, Score, TrajectoryView, TurnView, Unavailable

__all__ = [
    "EnvironmentView",
    "Score",
    "TrajectoryView",
    "TurnView",
    "Unavailable",
    "environment_reward",
    "exact_match",
    "format_check",
    "group_rank",
    "schema_check",
    "turns_match",
]
