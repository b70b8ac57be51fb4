"""What a reward function is given, and what it may return.

A reward function takes the view of one finished trajectory (``scope: trajectory``) or of all members of a group
(``scope: group``), and the ``options`` of the config as keyword arguments::

    from rollart.rewards import Score, TrajectoryView

    def polite(trajectory: TrajectoryView, word: str = "please") -> float:
        return float(word in trajectory.answer)

Plain functions and ``async def``; a number, a ``Score``, or for a group a list of either, one for each member.
"""

from __future__ import annotations

import msgspec

__all__ = ["EnvironmentView", "Score", "TrajectoryView", "TurnView", "Unavailable"]


class TurnView(msgspec.Struct, frozen=True):
    """One turn, as texts."""

    observation: str
    """What the policy saw before it answered."""
    answer: str
    """What it answered, as its environment read it: without special tokens."""
    reward: float = 0.0
    """The environment's, for this answer."""


class EnvironmentView(msgspec.Struct, frozen=True):
    """What the environment said of the episode."""

    reward: float = 0.0
    """The sum of its rewards."""
    success: float | None = None
    info: dict[str, float] = {}
    """The newest value of each name in its ``info``."""
    reference: str = ""
    """What it says the answer should be (``Environment.reference``)."""


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """A finished trajectory, ready to be scored."""

    id: int
    """Unique in the run."""
    task: str
    seed: int
    """With ``split`` it names the task instance."""
    split: str
    """``train`` or ``eval``."""
    group: int = -1
    """Members of a group share the instance; -1: alone, as evaluations are."""
    member: int = 0
    turns: list[TurnView] = []
    final_observation: str = ""
    """What the environment said last; the policy never answered it."""
    truncated: str = ""
    """``max_turns`` or ``context`` when the episode was cut."""
    environment: EnvironmentView = EnvironmentView()
    versions: tuple[int, int] = (-1, -1)
    """The lowest and the highest weight version among its sampled tokens."""
    ids: list[int] | None = None
    """Token ids, prompt and observations included; only with ``send_ids``."""
    mask: list[int] | None = None
    """1 where the policy sampled the token, as long as ``ids``."""

    @property
    def answer(self) -> str:
        """The last answer; empty when there is none."""
        return self.turns[-1].answer if self.turns else ""

    @property
    def text(self) -> str:
        """Everything that was said, in order."""
        return "".join(f"{turn.observation}{turn.answer}" for turn in self.turns) + self.final_observation

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as chat messages."""
        said = []
        for turn in self.turns:
            said.append({"role": "user", "content": turn.observation})
            said.append({"role": "assistant", "content": turn.answer})
        return said


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A structured score; ``score`` may be left out when ``turns`` has one for each turn: it is their sum then."""

    score: float | None = None
    """Finite."""
    turns: list[float] | None = None
    """A reward for each turn, as many as the trajectory has."""
    success: float | None = None
    """What the metrics call success, instead of the environment's."""
    parts: dict[str, float] = {}
    """What the score is made of, for the metrics."""


class Unavailable(Exception):
    """The machinery failed (a service is down), not the function: raise it, and the call is tried again."""
