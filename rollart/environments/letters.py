"""Letters: write a named letter again and again.

One turn with a long answer, so that generation dominates and answers are under way when weights change.  The
policy sees a number and a letter, such as ``407q:``, and is rewarded with the share of its answer's
characters that are this letter.  The number only makes instances differ, so that training and evaluation
never share one.
"""

from __future__ import annotations

import random
import string

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import draw

__all__ = ["Letters"]


class Letters(Environment):
    """Asks for one of ``letters``."""

    def __init__(self, letters: str = string.ascii_lowercase) -> None:
        if not letters:
            raise ValueError("letters is empty; name the letters to ask for, such as abc")
        self.letters = letters
        self.letter = ""

    def reset(self, seed: int, split: str) -> str:
        """Draw the number and the letter."""
        prompt = draw(self._candidate, random.Random(seed), split)
        self.letter = prompt[-2]
        return prompt

    def step(self, action: str) -> Turn:
        """Score the answer; an empty one is worth 0."""
        share = action.count(self.letter) / len(action) if action else 0.0
        return Turn(reward=share, done=True)

    def _candidate(self, rng: random.Random) -> str:
        return f"{rng.randrange(1000):03d}{rng.choice(self.letters)}:"
