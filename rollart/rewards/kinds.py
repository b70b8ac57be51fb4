"""Reward functions for common needs, which name nothing but text.  Others: ``maths``, ``code_tests``, ``judge``.

Options come from the config; what they compare with is the environment's ``reference`` unless they are told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart.rewards.view import Score, TrajectoryView
from rollart.serverless import register_serverless

__all__ = [
    "environment_reward",
    "exact_match",
    "extracted",
    "format_check",
    "group_rank",
    "schema_check",
    "turns_match",
]


def environment_reward(trajectory: TrajectoryView) -> Score:
    """The sum of the environment's rewards, with its turns: to be weighted beside others."""
    environment = trajectory.environment
    return Score(score=environment.reward, turns=[turn.reward for turn in trajectory.turns])


def exact_match(
    trajectory: TrajectoryView,
    *,
    reference: str | None = None,
    extract: str | None = None,
    ignore_case: bool = False,
    strip: bool = True,
) -> Score:
    """1 when the last answer is the reference, else 0.

    ``extract`` is a regular expression: its first group (or all of it) in the answer, the last time it is found,
    is what is compared.
    """
    wanted = trajectory.environment.reference if reference is None else reference
    found = extracted(trajectory.answer, extract)
    if found is not None and strip:
        found, wanted = found.strip(), wanted.strip()
    if found is not None and ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    hit = float(found is not None and found == wanted)
    return Score(score=hit, success=hit)


def extracted(text: str, pattern: str | None) -> str | None:
    """The last match of ``pattern`` in ``text``, its first group if it has any; all of it without a pattern."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0)


def format_check(
    trajectory: TrajectoryView,
    *,
    pattern: str | None = None,
    every_turn: bool = False,
    max_characters: int | None = None,
) -> float:
    """1 when the last answer, or the share of the turns whose answer, matches ``pattern`` as a whole."""
    if pattern is None and max_characters is None:
        raise ValueError("format_check needs pattern or max_characters")
    turns = trajectory.turns if every_turn else trajectory.turns[-1:]

    def fits(answer: str) -> bool:
        if max_characters is not None and len(answer) > max_characters:
            return False
        return pattern is None or re.fullmatch(pattern, answer, re.DOTALL) is not None

    return sum(fits(turn.answer) for turn in turns) / len(turns) if turns else 0.0


def schema_check(
    trajectory: TrajectoryView, *, schema: dict[str, Any] | None = None, extract: str | None = None
) -> Score:
    """1 when the last answer (what ``extract`` finds in it) is JSON that ``schema`` allows; 0.5 when it is only JSON.

    Without ``schema`` the reference is one.  Needs the package jsonschema.
    """
    import jsonschema  # type: ignore[import-untyped]

    wanted = json.loads(trajectory.environment.reference) if schema is None else schema
    validator = jsonschema.validators.validator_for(wanted)
    validator.check_schema(wanted)
    found = extracted(trajectory.answer, extract)
    try:
        value = json.loads(found or "")
    except (ValueError, RecursionError):
        return Score(score=0.0, success=0.0, parts={"json": 0.0, "schema": 0.0})
    valid = validator(wanted).is_valid(value)
    return Score(
        score=1.0 if valid else 0.5, success=float(valid), parts={"json": 1.0, "schema": float(valid)}
    )


def turns_match(trajectory: TrajectoryView, *, pattern: str, penalty: float = 0.0) -> Score:
    """A reward for each turn: 1 when its answer matches ``pattern`` as a whole, else ``-penalty``."""
    compiled = re.compile(pattern, re.DOTALL)
    return Score(
        turns=[1.0 if compiled.fullmatch(turn.answer) else -penalty for turn in trajectory.turns],
        score=None if trajectory.turns else 0.0,
    )


@register_serverless(scope="group")
def group_rank(trajectories: Sequence[TrajectoryView], *, by: str = "environment_reward") -> list[float]:
    """Of a whole group (it declares ``scope: group``): the share of the others that each is better than, ties a half.

    ``by``: ``environment_reward``, or ``brevity``, where fewer characters in the answers are better.
    """
    if by == "environment_reward":
        values = [trajectory.environment.reward for trajectory in trajectories]
    elif by == "brevity":
        values = [-float(sum(len(turn.answer) for turn in t.turns)) for t in trajectories]
    else:
        raise ValueError(f"by is {by!r}; it must be environment_reward or brevity")
    others = len(values) - 1
    if not others:
        return [0.5]
    return [
        (sum(value > other for other in values) + 0.5 * (sum(value == other for other in values) - 1))
        / others
        for value in values
    ]
