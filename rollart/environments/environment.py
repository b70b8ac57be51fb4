"""The interface of an environment: what a task of one's own implements.

Text in, text out: token ids never reach an environment.  One object plays one episode.  The whole of a
task of one's own, in a file ``coin.py`` beside the config, which names it ``environment: coin:Coin``::

    import random
    from rollart.environments import Environment, Turn

    class Coin(Environment):
        def __init__(self, sides: str = "HT") -> None:
            self.sides = sides

        def reset(self, seed: int, split: str) -> str:
            self.side = random.Random(f"{split} {seed}").choice(self.sides)
            return f"The coin shows {self.side}. Say it: "

        def step(self, action: str) -> Turn:
            return Turn(reward=float(action == self.side), done=True)

``reset``, ``step`` and ``close`` are plain methods, which run in a thread and may block, or ``async def``,
which run on the worker's event loop and must not.

An environment may speak in chat messages instead of text: ``reset`` returns a list of them, and ``Turn`` has
``messages``.  They become tokens by the model's chat template, once: what the policy has seen is never tokenised
again (``rollart.environments.conversation``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChatMessage", "Environment", "Turn", "Unavailable"]

ChatMessage = Mapping[str, Any]
"""``role`` (``system``, ``user``, ``tool`` …) and ``content``, a text; what else the model's template reads."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to an action."""

    text: str = ""
    """What the policy sees next; nobody reads it when the episode is done.  In an episode of messages: a user's."""
    reward: float = 0.0
    """For this action; the episode's rewards are summed."""
    done: bool = False
    """The episode is over."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics; ``success`` (0 or 1) is what evaluations report, else a score of 1 counts."""
    messages: Sequence[ChatMessage] = ()
    """What the policy sees next, instead of ``text``, in an episode that began with messages."""


class Unavailable(Exception):
    """The machinery failed (a sandbox died), not the episode: raise it, and the episode begins again elsewhere."""


class Environment:
    """Base of environments; the task's ``options`` are the constructor's keyword arguments.

    The constructor also runs once when a worker starts, to check the options: begin what is expensive in
    ``reset``.  Any exception but ``Unavailable`` ends the episode as failed, and no other one.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """What the policy may call, as JSON schemas in the form of chat templates; for episodes of messages."""
    reference: str = ""
    """What rewards may compare the answers with (a solution, tests, any text); the policy never sees it.  An
    environment sets it in ``reset``, if it has one, or later."""

    def reset(self, seed: int, split: str) -> str | Sequence[ChatMessage] | Awaitable[Any]:
        """Begin the episode that ``seed`` names, the same one each time, and return the first observation.

        ``split`` is ``train`` or ``eval``: no instance of one may be an instance of the other.  A task with a
        ``dataset`` has a third parameter, ``row``: the instance's row.
        """
        raise NotImplementedError

    def step(self, action: str) -> Turn | Awaitable[Turn]:
        """Carry out the policy's ``action``, the text of its answer without special tokens.

        It is an ``Action``, which finds the tool calls in it.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; called once after its end, whatever the end was."""
