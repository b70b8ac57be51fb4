"""Branches: the other conversations of an agent's trajectory.  No I/O.

A trajectory has one token buffer, which is all that most ever need.  An agent may hold several conversations, or go
back in one and go on differently: each is a sequence of its own, and all but the current one wait here.
"""

from __future__ import annotations

from typing import Protocol

from rollart.protocol import TrainSample, VersionRun

__all__ = ["Branches", "Buffers"]


class Buffers(Protocol):
    """What a sequence consists of; the fields are those of ``Trajectory``."""

    ids: bytearray
    mask: bytearray
    logprobs: bytearray
    versions: list[VersionRun]
    tokens: int
    turn_tokens: bytes


class Scored(Buffers, Protocol):
    """What its samples share."""

    id: int
    score: float
    truncated: str


class _Waiting:
    """A sequence that is not the current one."""

    __slots__ = ("ids", "logprobs", "mask", "tokens", "turn_tokens", "versions")

    def __init__(self, of: Buffers | None = None) -> None:
        self.ids = of.ids if of else bytearray()
        self.mask = of.mask if of else bytearray()
        self.logprobs = of.logprobs if of else bytearray()
        self.versions = of.versions if of else []
        self.tokens = of.tokens if of else 0
        self.turn_tokens = of.turn_tokens if of else b""


class Branches:
    """Sequences by their numbers; that of ``current`` is in the trajectory itself."""

    __slots__ = ("_waiting", "current")

    def __init__(self) -> None:
        self.current = 0
        self._waiting: dict[int, _Waiting] = {}

    def take_up(self, trajectory: Buffers, sequence: int) -> None:
        """Make ``sequence`` the trajectory's current one; a number that is not known begins empty."""
        if sequence == self.current:
            return
        self._waiting[self.current] = _Waiting(trajectory)
        wanted = self._waiting.pop(sequence, None) or _Waiting()
        self.current = sequence
        trajectory.ids, trajectory.mask, trajectory.logprobs = wanted.ids, wanted.mask, wanted.logprobs
        trajectory.versions, trajectory.tokens = wanted.versions, wanted.tokens
        trajectory.turn_tokens = wanted.turn_tokens

    @property
    def versions(self) -> list[VersionRun]:
        """Runs over the sampled tokens of all that wait here."""
        return [run for each in self._waiting.values() for run in each.versions]

    @property
    def tokens(self) -> int:
        """Of all that wait here."""
        return sum(each.tokens for each in self._waiting.values())

    def ids_of(self, trajectory: Buffers, sequence: int) -> bytearray:
        """int32 ids."""
        return trajectory.ids if sequence == self.current else self._waiting[sequence].ids

    def samples(self, trajectory: Scored) -> list[TrainSample]:
        """Those of all that wait here and have sampled tokens."""
        samples = []
        for number in sorted(self._waiting):
            each = self._waiting[number]
            if each.versions:
                samples.append(
                    TrainSample(
                        trajectory.id,
                        bytes(each.ids),
                        bytes(each.mask),
                        bytes(each.logprobs),
                        list(each.versions),
                        trajectory.score,
                        each.turn_tokens,
                        b"",
                        bool(trajectory.truncated),
                    )
                )
        return samples

    def let_go(self) -> None:
        """The tokens of all that wait here aren't wanted any more."""
        for each in self._waiting.values():
            each.ids, each.mask, each.logprobs = bytearray(), bytearray(), bytearray()
