"""Sokoban: push every box onto a goal.

The policy sees the board, a line a row: ``#`` wall, ``.`` floor, ``$`` box, ``_`` goal, ``*`` box on a goal, ``@``
player, ``+`` player on a goal.  It answers with moves, one or several of ``L``, ``D``, ``R``, ``U``; a move into a
wall, or that would push a box into something, does nothing.  Boards are made backwards, by pulling boxes off their
goals, so that each has a solution, which is known (``Sokoban.solution``).  A solved board is worth 1; a box that
comes to lie in a corner that is no goal, from where nothing moves it, ends the episode with 0.
"""

from __future__ import annotations

import random

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["Sokoban"]

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
SIGNS = {(False, False): ".", (True, False): "_"}
MAX_MOVES_AN_ANSWER = 16


class Sokoban(Environment):
    """Boards of ``size`` × ``size`` cells inside the walls with ``boxes`` boxes, made by ``pulls`` backward moves."""

    def __init__(self, size: int = 5, boxes: int = 2, walls: float = 0.15, pulls: int = 40) -> None:
        if size < 3 or not 1 <= boxes <= size * size // 4:
            raise ValueError(
                f"size is {size} and boxes {boxes}; at least 3 × 3 cells, a quarter of them boxes at most"
            )
        if not 0 <= walls <= 0.4 or pulls < 1:
            raise ValueError(f"walls is {walls} and pulls {pulls}; a share of at most 0.4, and at least 1")
        self.size = size
        self.box_count = boxes
        self.wall_share = walls
        self.pulls = pulls
        self.walls: frozenset[Cell] = frozenset()
        self.goals: frozenset[Cell] = frozenset()
        self.boxes: set[Cell] = set()
        self.player: Cell = (0, 0)
        self.solution = ""
        """Moves that solve the board, as it was at the reset."""

    def reset(self, seed: int, split: str) -> str:
        """Draw the board that ``seed`` and ``split`` name."""
        return draw(self._candidate, random.Random(seed), split)

    def step(self, action: str) -> Turn:
        """Carry out the moves in the answer."""
        for letter in [each for each in action if each in MOVES][:MAX_MOVES_AN_ANSWER]:
            self._move(letter)
            if self.boxes == self.goals:
                return Turn(self._board(), reward=1.0, done=True, info={"success": 1.0})
        if any(self._stuck(box) for box in self.boxes - self.goals):
            return Turn(self._board(), done=True, info={"success": 0.0})
        return Turn(self._board())

    # --- the board ------------------------------------------------------------------------------------

    def _candidate(self, rng: random.Random) -> str | None:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        self.walls = frozenset(cell for cell in cells if rng.random() < self.wall_share)
        floor = [cell for cell in cells if cell not in self.walls]
        if len(floor) < self.box_count + 1:
            return None
        *boxes, self.player = rng.sample(floor, self.box_count + 1)
        self.goals, self.boxes = frozenset(boxes), set(boxes)
        self.solution = self._pull(rng)
        return None if self.boxes & self.goals else self._board()

    def _pull(self, rng: random.Random) -> str:
        """Walk backwards at random, pulling what can be pulled; the moves that lead back."""
        forward: list[str] = []
        for _ in range(self.pulls * 4):
            letter = rng.choice("LDRU")
            down, right = MOVES[letter]
            behind = (self.player[0] - down, self.player[1] - right)
            ahead = (self.player[0] + down, self.player[1] + right)
            if not self._free(behind):
                continue
            if ahead in self.boxes and rng.random() < 0.8:
                self.boxes.remove(ahead)
                self.boxes.add(self.player)
            elif ahead in self.boxes:
                continue  # forward, this move would push the box
            self.player = behind
            forward.append(letter)
            if len(forward) == self.pulls:
                break
        return "".join(reversed(forward))

    def _move(self, letter: str) -> None:
        down, right = MOVES[letter]
        to = (self.player[0] + down, self.player[1] + right)
        beyond = (to[0] + down, to[1] + right)
        if to in self.boxes and self._free(beyond):
            self.boxes.remove(to)
            self.boxes.add(beyond)
        if self._free(to):
            self.player = to

    def _inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in self.walls

    def _free(self, cell: Cell) -> bool:
        return self._inside(cell) and cell not in self.boxes

    def _stuck(self, box: Cell) -> bool:
        row, column = box
        upright = not self._inside((row - 1, column)) or not self._inside((row + 1, column))
        across = not self._inside((row, column - 1)) or not self._inside((row, column + 1))
        return upright and across

    def _board(self) -> str:
        edge = "#" * (self.size + 2)
        rows = ("".join(self._sign((row, column)) for column in range(self.size)) for row in range(self.size))
        return "\n".join([edge, *(f"#{row}#" for row in rows), edge, ""])

    def _sign(self, cell: Cell) -> str:
        if cell in self.walls:
            return "#"
        goal = cell in self.goals
        if cell == self.player:
            return "+" if goal else "@"
        if cell in self.boxes:
            return "*" if goal else "$"
        return "_" if goal else "."
