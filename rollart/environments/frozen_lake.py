"""FrozenLake: cross a frozen lake from the start to the goal without falling into a hole.

Every episode has a random map that can be crossed.  The policy sees the whole map before each move, one
character a cell: ``S`` start, ``F`` frozen, ``H`` hole, ``G`` goal, ``P`` the player (in place of its cell's
character).  It answers ``L``, ``D``, ``R`` or ``U``; a move off the map and any other answer leave the
player where it is.  Reaching the goal is worth 1 and ends the episode; a hole ends it with 0.  Training and
evaluation never share a map.
"""

from __future__ import annotations

import random

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["MOVES", "FrozenLake", "solvable"]

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
"""Action → change of row and column, in the order of a turn to the left."""
ACTIONS = tuple(MOVES)


class FrozenLake(Environment):
    """A lake of ``size`` rows and ``columns`` columns (as many as rows, by default), each cell a hole with
    ``hole_probability``.

    ``slippery`` as in Gymnasium: a move goes where it should or to either side, with a third each.
    """

    def __init__(
        self,
        size: int = 4,
        hole_probability: float = 0.2,
        slippery: bool = False,
        columns: int | None = None,
    ) -> None:
        columns = size if columns is None else columns
        if min(size, columns) < 2:
            raise ValueError(f"size is {size} and columns {columns}; a lake has at least 2 × 2 cells")
        if not 0 <= hole_probability < 1:
            raise ValueError(f"hole_probability is {hole_probability}; it must be at least 0 and below 1")
        self.size = size
        self.columns = columns
        self.hole_probability = hole_probability
        self.slippery = slippery
        self.cells = ""
        """The map, row by row."""
        self.player = 0
        """Index of its cell."""
        self._random: random.Random

    def reset(self, seed: int, split: str) -> str:
        """Draw the map that ``seed`` and ``split`` name; the same seed slips the same way, too."""
        self._random = random.Random(seed)
        self.cells = draw(self._candidate, self._random, split)
        self.player = 0
        return self._observation()

    def step(self, action: str) -> Turn:
        """Move the player."""
        letter = action.strip()
        if letter in MOVES:
            self._move(letter)
        cell = self.cells[self.player]
        if cell == "G":
            return Turn(self._observation(), reward=1.0, done=True, info={"success": 1.0})
        if cell == "H":
            return Turn(self._observation(), done=True, info={"success": 0.0})
        return Turn(self._observation())

    def _candidate(self, rng: random.Random) -> str | None:
        count = self.size * self.columns - 2
        inner = ("H" if rng.random() < self.hole_probability else "F" for _ in range(count))
        cells = f"S{''.join(inner)}G"
        return cells if solvable(cells, self.columns) else None

    def _move(self, letter: str) -> None:
        if self.slippery:
            letter = ACTIONS[(ACTIONS.index(letter) + self._random.choice((-1, 0, 1))) % 4]
        self.player = _after(self.player, letter, self.size * self.columns, self.columns)

    def _observation(self) -> str:
        return f"{self.cells[: self.player]}P{self.cells[self.player + 1 :]}"


def solvable(cells: str, columns: int) -> bool:
    """A path leads from the first cell to the goal."""
    reached, frontier = {0}, [0]
    while frontier:
        cell = frontier.pop()
        if cells[cell] == "G":
            return True
        for letter in MOVES:
            after = _after(cell, letter, len(cells), columns)
            if after not in reached and cells[after] != "H":
                reached.add(after)
                frontier.append(after)
    return False


def _after(cell: int, letter: str, count: int, columns: int) -> int:
    """Where a move leads on a lake of ``count`` cells; off the map it leads nowhere."""
    row, column = divmod(cell, columns)
    down, right = MOVES[letter]
    return min(max(row + down, 0), count // columns - 1) * columns + min(max(column + right, 0), columns - 1)
