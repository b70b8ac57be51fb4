"""What travels to a reward function and back: JSON, versioned, for functions in any language (docs/rewards.md).

A reader ignores fields that it does not know; a change that an old reader can't bear has another ``SCHEMA``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from rollart.rewards.view import Score, TrajectoryView

__all__ = [
    "SCHEMA",
    "Envelope",
    "Meter",
    "Reply",
    "Request",
    "Result",
    "WrongScore",
    "decode_reply",
    "encode",
    "result_of",
]

SCHEMA = "rollart.reward/1"


class WrongScore(Exception):
    """What a function returned is no score; the message is the whole story."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    schema: str = SCHEMA
    key: str
    """The same for every attempt of this call: whoever sees it twice may answer from memory."""
    function: str
    """The function's import path, or whatever the config calls it."""
    scope: str = "trajectory"
    """``trajectory``: each is scored by itself.  ``group``: they are one group, scored together."""
    deadline_s: float
    """Nobody reads an answer that takes longer."""
    options: dict[str, Any] = {}
    trajectories: list[TrajectoryView]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A ``Request`` whose trajectories are nobody's business here."""

    schema: str
    function: str
    key: str = ""
    deadline_s: float = 30.0


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one trajectory: ``error``, or else a score."""

    score: float | None = None
    turns: list[float] | None = None
    success: float | None = None
    parts: dict[str, float] = {}
    error: str = ""
    """Why there is no score; the same call would fail again."""


class Meter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the call took where it ran, in seconds; who can't know leaves it out."""

    busy_s: float = 0.0
    queue_s: float = 0.0
    cold_start_s: float = 0.0
    """Above 0 when an instance was started for this call."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: as many ``results`` as the request has trajectories, in their order."""

    schema: str = SCHEMA
    results: list[Result]
    meter: Meter = Meter()


_encoder = msgspec.json.Encoder()
_reply = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """As JSON."""
    return _encoder.encode(message)


def decode_reply(body: bytes) -> Reply:
    """``msgspec.DecodeError`` or ``msgspec.ValidationError`` when ``body`` is no reply."""
    reply = _reply.decode(body)
    if reply.schema != SCHEMA:
        raise msgspec.ValidationError(f"the schema is {reply.schema!r}, not {SCHEMA!r}")
    return reply


def result_of(returned: object, trajectory: TrajectoryView) -> Result:
    """What a function returned for ``trajectory``, checked; ``WrongScore`` when it is no score."""
    if isinstance(returned, Score):
        score = Result(
            score=returned.score, turns=returned.turns, success=returned.success, parts=returned.parts
        )
    elif _is_number(returned):
        score = Result(score=float(returned))  # type: ignore[arg-type]
    else:
        raise WrongScore(f"returned {type(returned).__name__}; it must return a number or a Score")
    return checked(score, trajectory)


def checked(result: Result, trajectory: TrajectoryView) -> Result:
    """``result`` with its score, all of it finite; ``WrongScore`` otherwise."""
    score, turns = result.score, result.turns
    if turns is not None:
        if len(turns) != len(trajectory.turns):
            raise WrongScore(
                f"has rewards for {len(turns)} turns; the trajectory has {len(trajectory.turns)}"
            )
        if score is None and turns:
            score = math.fsum(_finite(turn, "a turn's reward") for turn in turns)
    if score is None:
        raise WrongScore("has no score")
    return Result(
        score=_finite(score, "the score"),
        turns=None if turns is None else [_finite(turn, "a turn's reward") for turn in turns],
        success=None if result.success is None else _finite(result.success, "success"),
        parts={str(name): _finite(value, f"part {name!r}") for name, value in result.parts.items()},
    )


def results_of(returned: object, trajectories: Sequence[TrajectoryView]) -> list[Result]:
    """What a function returned for a group; ``WrongScore`` when it is not one score for each member."""
    if not isinstance(returned, list | tuple) or len(returned) != len(trajectories):
        length = f" of {len(returned)}" if isinstance(returned, list | tuple) else ""
        raise WrongScore(
            f"returned {type(returned).__name__}{length}; for a group it must return a list of {len(trajectories)} "
            "scores"
        )
    return [result_of(each, trajectory) for each, trajectory in zip(returned, trajectories, strict=True)]


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) or hasattr(value, "__float__")


def _finite(value: object, what: str) -> float:
    number = float(value) if _is_number(value) else math.nan  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise WrongScore(f"{what} is {value!r}; it must be a finite number")
    return number
