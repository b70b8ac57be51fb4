"""Which task instance comes next: a seeded draw by the tasks' weights at that train_step.

An instance of a task with a dataset is a number that counts up: the workers know which row it is, in which epoch.  All
that decides what comes next is plain data (``state``), so that a run goes on exactly where it was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rollart.config import Task

__all__ = ["TaskSource"]


class TaskSource:
    """An endless, reproducible sequence of task instances."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.quarantined: dict[str, str] = {}
        """Tasks that are taken out, and the error of each."""
        self._tasks = {task.name: task for task in tasks}
        self._random = random.Random(seed)
        self._drawn = {task.name: 0 for task in tasks if task.dataset is not None}
        self._ahead: deque[tuple[str, int]] = deque()
        self._failed_in_a_row = dict.fromkeys(self._tasks, 0)

    def draw(self, step: int = 0) -> tuple[str, int]:
        """A task's name and the seed of its instance, or its number in the dataset, at train_step ``step``."""
        while self._ahead:
            instance = self._ahead.popleft()
            if instance[0] not in self.quarantined:
                return instance
        return self._next(step)

    def peek(self, count: int, step: int = 0) -> list[tuple[str, int]]:
        """The instances that ``draw`` will give next; a task that is taken out meanwhile is left out then."""
        while len(self._ahead) < count:
            self._ahead.append(self._next(step))
        return list(islice(self._ahead, count))

    def _next(self, step: int) -> tuple[str, int]:
        names = [name for name in self._tasks if name not in self.quarantined]
        weights = [self._tasks[name].weight_at(step) for name in names]
        if not any(weights):  # those that had a weight are taken out
            weights = [1.0] * len(names)
        (name,) = self._random.choices(names, weights)
        if name not in self._drawn:
            return name, self._random.getrandbits(31)
        self._drawn[name] += 1
        return name, self._drawn[name] - 1

    # --- failures -------------------------------------------------------------------------------------

    def group_succeeded(self, task: str) -> None:
        """A group of ``task`` had enough members."""
        self._failed_in_a_row[task] = 0

    def group_failed(self, task: str, error: str) -> bool:
        """A group of ``task`` ended without a sample, for failures such as ``error``; whether the task is taken out
        now.  The last one never is: the breaker of the whole run speaks for it."""
        self._failed_in_a_row[task] += 1
        if task in self.quarantined or len(self.quarantined) + 1 == len(self._tasks):
            return False
        if self._failed_in_a_row[task] < self._tasks[task].max_failed_groups:
            return False
        self.quarantined[task] = error
        return True

    # --- where it is ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data (JSON can hold it) from which ``restore`` makes a source that goes on the same way."""
        version, words, gauss = self._random.getstate()
        return {
            "random": [version, list(words), gauss],
            "drawn": dict(self._drawn),
            "ahead": [list(instance) for instance in self._ahead],
            "failed_in_a_row": dict(self._failed_in_a_row),
            "quarantined": dict(self.quarantined),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; tasks that are new since then begin, those that are gone are left out."""
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        for mine, theirs in (
            (self._drawn, state["drawn"]),
            (self._failed_in_a_row, state["failed_in_a_row"]),
        ):
            mine.update((name, count) for name, count in theirs.items() if name in mine)
        self._ahead = deque((name, seed) for name, seed in state["ahead"] if name in self._tasks)
        self.quarantined = {
            name: error for name, error in state["quarantined"].items() if name in self._tasks
        }
