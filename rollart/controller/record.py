"""Record: what was said in a trajectory, as text, kept only where a reward function is to read it."""

from __future__ import annotations

from rollart.protocol import Observation
from rollart.rewards.view import TurnView

__all__ = ["Record"]


class Record:
    """The texts of one attempt, as its environment worker read and wrote them: nothing is decoded here."""

    __slots__ = ("info", "last", "reference", "started", "turns")

    def __init__(self) -> None:
        self.started = False
        self.last = ""
        """The newest observation."""
        self.turns: list[TurnView] = []
        self.reference = ""
        self.info: dict[str, float] = {}

    def observed(self, seen: Observation) -> None:
        """The environment answered a reset or a step."""
        if self.started:
            self.turns.append(TurnView(self.last, seen.answer, seen.reward))
        self.started = True
        self.last = seen.text
        self.reference = seen.reference or self.reference
        self.info.update(seen.info)
