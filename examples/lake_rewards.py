"""A reward function for FrozenLake: reaching the goal counts, and each move costs a little."""

from __future__ import annotations

from rollart import register_serverless
from rollart.rewards import Score, TrajectoryView


@register_serverless(timeout_s=5, max_instances=4)
def short_path(trajectory: TrajectoryView, *, move_cost: float = 0.02) -> Score:
    """1 at the goal, minus ``move_cost`` for every move; each turn's share of it is told, too."""
    turns = [turn.reward - move_cost for turn in trajectory.turns]
    return Score(turns=turns, parts={"moves": len(turns)})


def well_formed(trajectory: TrajectoryView) -> float:
    """The share of the answers that are moves."""
    answers = [turn.answer for turn in trajectory.turns]
    return sum(answer in ("L", "D", "R", "U") for answer in answers) / len(answers)
