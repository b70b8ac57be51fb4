"""What an environment returned, checked: plain values, or ``WrongAnswer`` with a sentence its author can act on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollart.environments.environment import ChatMessage, Turn

__all__ = ["CheckedTurn", "WrongAnswer", "check_first", "check_turn", "text_of"]

MOST_CHARACTERS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens: a text beyond that many a token of the context can't fit, whatever it says."""


class WrongAnswer(Exception):
    """An environment returned what it must not; the message is the whole story."""


class CheckedTurn(NamedTuple):
    """The parts of a ``Turn`` as plain Python values."""

    seen: str | list[ChatMessage]
    reward: float
    done: bool
    info: dict[str, float]


def check_first(answer: object, context_tokens: int) -> str | list[ChatMessage]:
    """The first observation; ``context_tokens`` bounds its size."""
    if isinstance(answer, str):
        return _fitting(answer, context_tokens)
    if isinstance(answer, Sequence) and not isinstance(answer, bytes | bytearray):
        return _messages(answer, "messages", context_tokens)
    raise WrongAnswer(
        f"returned {_kind(answer)}; it must return the first observation, a str or a list of messages"
    )


def check_turn(answer: object, context_tokens: int) -> CheckedTurn:
    """What a step returned; ``context_tokens`` bounds the size of its text."""
    if not isinstance(answer, Turn):
        raise WrongAnswer(
            f"returned {_kind(answer)}; it must return rollart.environments.Turn(text, reward, done, info)"
        )
    if not isinstance(answer.text, str):
        raise WrongAnswer(f"returned a Turn whose text is {_kind(answer.text)}; it must be a str")
    reward = _number(answer.reward, "reward")
    if not isinstance(answer.done, bool):
        raise WrongAnswer(f"returned a Turn whose done is {_kind(answer.done)}; it must be a bool")
    if answer.messages and answer.text:
        raise WrongAnswer("returned a Turn with a text and messages; the policy is shown one of them")
    seen: str | list[ChatMessage] = _fitting(answer.text, context_tokens)
    if answer.messages:
        seen = _messages(answer.messages, "a Turn whose messages", context_tokens)
    if not answer.info:
        return CheckedTurn(seen, reward, answer.done, {})
    if not isinstance(answer.info, Mapping):
        raise WrongAnswer(f"returned a Turn whose info is {_kind(answer.info)}; it must map names to numbers")
    info = {str(name): _number(value, f"info[{name!r}]") for name, value in answer.info.items()}
    return CheckedTurn(seen, reward, answer.done, info)


def _messages(value: Sequence[object], what: str, context_tokens: int) -> list[ChatMessage]:
    if not value:
        raise WrongAnswer("returned an empty list of messages; the policy needs something to go on")
    found: list[ChatMessage] = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise WrongAnswer(
                f"returned {what} hold {_kind(message)}; a message is a dict with a role and a content"
            )
        content = message.get("content")
        if isinstance(content, str):
            _fitting(content, context_tokens)
        elif content is not None and not isinstance(content, Sequence):
            raise WrongAnswer(
                f"returned {what} have {_kind(content)} as a content; it must be a str or a list of parts"
            )
        found.append(message)
    return found


def _fitting(text: str, context_tokens: int) -> str:
    most = MOST_CHARACTERS_PER_TOKEN * context_tokens
    if len(text) > most:
        raise WrongAnswer(
            f"returned a text of {len(text):,} characters, which no context of {context_tokens} tokens can hold: "
            "shorten what it shows, or raise inference.max_model_len"
        )
    return text


def _number(value: object, what: str) -> float:
    if not isinstance(value, float | int | numbers.Real) or not math.isfinite(value):
        raise WrongAnswer(f"returned a Turn whose {what} is {_kind(value)}; it must be a finite number")
    return float(value)


def _kind(value: object) -> str:
    """``value`` for an error: its type, and what it is where that is short."""
    try:
        text = repr(value)
    except Exception:  # the boundary of a foreign repr
        return f"a {type(value).__name__}"
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"


def text_of(seen: str | Sequence[ChatMessage]) -> str:
    """What was shown, as one text: of messages, their contents, a line each."""
    if isinstance(seen, str):
        return seen
    parts: list[str] = []
    for message in seen:
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        elif content is not None:
            parts += [str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part]
    return "\n".join(parts)
