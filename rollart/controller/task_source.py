"""Which task instance comes next: a seeded draw by the tasks' weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollart.config import Task

__all__ = ["TaskSource"]


class TaskSource:
    """An endless, reproducible sequence of task instances."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._names = [task.name for task in tasks]
        self._weights = [task.weight for task in tasks]
        self._random = random.Random(seed)

    def draw(self) -> tuple[str, int]:
        """A task's name and the seed of its instance."""
        (name,) = self._random.choices(self._names, self._weights)
        return name, self._random.getrandbits(31)
