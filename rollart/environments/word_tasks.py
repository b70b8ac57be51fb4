"""Sums and Brackets: two small tasks in plain words, for a small pretrained model.

Text is continued, not chatted with: each prompt shows an example of what is wanted.  Only the answer's first line
counts.
"""

from __future__ import annotations

import random
import re

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["Brackets", "Sums"]

_WORDS = (
    "apple bread chair cloud dance eagle flame grape green horse house juice knife lemon light money mouse music night "
    "ocean paper piano plant queen river sheep smile snake spoon stone storm sugar table tiger train tooth uncle water "
    "wheel zebra"
)


def first_line(text: str) -> str:
    """What is read of an answer."""
    return text.strip().partition("\n")[0].strip()


class Sums(Environment):
    """Two numbers to add, from ``low`` to ``high``; a wrong answer may be mended once, for half the reward."""

    def __init__(self, low: int = 2, high: int = 30) -> None:
        if not 0 <= low < high:
            raise ValueError(f"low ({low}) must be at least 0 and below high ({high})")
        self.low, self.high = low, high
        self.total = 0
        self.tries = 0

    def reset(self, seed: int, split: str) -> str:
        """Draw the numbers."""
        prompt = draw(self._candidate, random.Random(seed), split)
        left, right = re.findall(r"\d+", prompt)[-2:]
        self.total, self.tries = int(left) + int(right), 0
        return prompt

    def step(self, action: str) -> Turn:
        """Compare the first number of the answer with the sum."""
        self.tries += 1
        found = re.match(r"\d+", first_line(action))
        if found is not None and int(found[0]) == self.total:
            return Turn(reward=1.0 / self.tries, done=True, info={"success": 1.0})
        if self.tries == 2:
            return Turn(done=True, info={"success": 0.0})
        return Turn(text="\nThat is wrong. The right sum is")

    def _candidate(self, rng: random.Random) -> str:
        left, right = rng.randint(self.low, self.high), rng.randint(self.low, self.high)
        return f"3 + 4 = 7\n12 + 5 = 17\n{left} + {right} ="


class Brackets(Environment):
    """A word to write in capitals and square brackets; half the reward for either."""

    def __init__(self) -> None:
        self.word = ""

    def reset(self, seed: int, split: str) -> str:
        """Draw the word."""
        prompt = draw(self._candidate, random.Random(seed), split)
        self.word = prompt.rpartition("\n")[2].removesuffix(" ->")
        return prompt

    def step(self, action: str) -> Turn:
        """Compare the answer with what is wanted."""
        answer = first_line(action)
        whole = answer == f"[{self.word.upper()}]"
        part = answer == f"[{self.word}]" or answer == self.word.upper()
        return Turn(reward=1.0 if whole else 0.5 if part else 0.0, done=True, info={"success": float(whole)})

    def _candidate(self, rng: random.Random) -> str:
        example, word = rng.sample(_WORDS.split(), 2)
        return f"{example} -> [{example.upper()}]\n{word} ->"
