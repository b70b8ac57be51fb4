"""BatchParts: the groups of a batch that a trainer has so far; they come a few at a time, ahead of the TrainStep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile

from rollart.workers.worker import Deterministic

__all__ = ["BatchParts"]


class BatchParts:
    """Encoded groups by step; those of earlier steps are let go as a later step begins."""

    def __init__(self) -> None:
        self._step = -1
        self._groups: dict[int, bytes] = {}

    def add(self, step_id: int, first: int, groups: Sequence[bytes]) -> None:
        """``groups`` are those from number ``first`` on of the batch of ``step_id``."""
        if step_id < self._step:
            return
        if step_id > self._step:
            self._step, self._groups = step_id, {}
        self._groups.update(enumerate(groups, first))

    def of(self, step_id: int, size: int) -> list[bytes]:
        """The ``size`` groups of the batch, in order; ``Deterministic`` when it is not whole."""
        known = self._groups if step_id == self._step else {}
        whole = [known[number] for number in range(size) if number in known]
        if len(whole) < size or len(known) > size:
            raise Deterministic(f"the batch of step {step_id} has {size} group(s), but {len(known)} came")
        return whole

    def so_far(self, step_id: int) -> list[bytes]:
        """The groups of the batch that are there, in order, up to the first that isn't."""
        known = self._groups if step_id == self._step else {}
        return [known[number] for number in takewhile(known.__contains__, count())]

    def drop(self, step_id: int) -> None:
        """The step was made: its groups are no longer wanted."""
        if step_id == self._step:
            self._groups = {}
