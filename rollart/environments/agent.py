"""The interface of an agent: code that plays whole episodes by itself, through an OpenAI-compatible endpoint.

Nothing of it needs to be written for RollArt but one function, which a task names ``agent: module:function``::

    from openai import AsyncOpenAI

    async def play(episode):
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        question = f"What is {episode.seed} + 1?"
        answer = await client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": question}]
        )
        return float(str(episode.seed + 1) in answer.choices[0].message.content)

It may be ``async def``, which runs on the worker's event loop and must not block, or a plain function, which has a
thread of its own.  When it raises, its episode has failed (``Unavailable``: it begins again elsewhere).  Once an
episode has ended for another reason (too old, superfluous, out of time), its calls end with HTTP 410: let that
exception pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Episode", "Score"]


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent is given: the task instance, and where its model is."""

    base_url: str
    """Of the endpoint, with ``/v1``."""
    api_key: str = field(repr=False)
    """Names this episode's trajectory: not to be used for another."""
    model: str
    """What to ask for as ``model``."""
    task: str
    seed: int
    """Names the instance: the same one each time."""
    split: str
    """``train`` or ``eval``: no instance of one may be an instance of the other."""
    options: Mapping[str, Any]
    """The task's, from the config."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an agent may return instead of a number."""

    reward: float
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics; ``success`` (0 or 1) is what evaluations report, else a reward of 1 counts."""
