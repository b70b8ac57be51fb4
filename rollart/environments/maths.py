"""Maths with a Python tool: a problem in words, a sandbox to compute in, one number as the answer.

The policy may run code as often as its turns allow, each time the first Python block of its answer (three backticks
and ``python``), and sees what it prints.  A line ``Answer: 42`` ends the episode: 1 for the right number, else 0.  The
generator computes each answer by itself, beside the words.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction

from rollart.environments.environment import Environment, Turn
from rollart.environments.sandbox import Limits, Sandbox
from rollart.environments.splits import draw

__all__ = ["KINDS", "Maths"]

CODE = re.compile(r"```python\n(.*?)(?:```|$)", re.DOTALL)
ANSWER = re.compile(r"Answer:\s*(-?[\d.,]*\d(?:\s*/\s*\d+)?)", re.IGNORECASE)
HOW = "Run code in a ```python block and read what it prints, or finish with a line such as Answer: 42.\n"
Problem = tuple[str, int]


class Maths(Environment):
    """Problems of the kinds ``kinds`` (all of them by default); ``wall_s`` bounds each run of code."""

    sandboxed = True

    def __init__(self, kinds: list[str] | None = None, wall_s: float = 5.0, tool: bool = True) -> None:
        unknown = [kind for kind in kinds or () if kind not in KINDS]
        if unknown:
            raise ValueError(f"kinds has {unknown[0]!r}; there are {', '.join(KINDS)}")
        self._kinds = kinds or list(KINDS)
        self._wall_s = wall_s
        self._tool = tool
        self._sandbox: Sandbox | None = None
        self.answer = 0

    def reset(self, seed: int, split: str) -> str:
        """Draw the problem that ``seed`` and ``split`` name."""
        problem = draw(self._candidate, random.Random(seed), split)
        return f"{problem}\n{HOW if self._tool else 'Finish with a line such as Answer: 42.'}\n"

    def step(self, action: str) -> Turn:
        """Judge the answer, or run the code."""
        said = ANSWER.search(CODE.sub("", action))
        if said is not None:
            right = _number(said[1]) == self.answer
            return Turn(reward=float(right), done=True, info={"success": float(right)})
        code = CODE.search(action)
        if code is None or not self._tool:
            return Turn("Write a line such as Answer: 42.\n")
        return Turn(f"{self._run(code[1])}\n")

    def close(self) -> None:
        """Remove the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _run(self, code: str) -> str:
        if self._sandbox is None:
            self._sandbox = Sandbox(Limits(wall_s=self._wall_s, memory_mib=512, output_characters=2_000))
        (self._sandbox.folder / "answer.py").write_text(code)
        done = self._sandbox.run(["python3", "answer.py"])
        return f"{done.output.rstrip()}\n[stopped: {done.stopped}]" if done.stopped else done.output.rstrip()

    def _candidate(self, rng: random.Random) -> str:
        words, self.answer = KINDS[rng.choice(self._kinds)](rng)
        return words


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


# --- problems -----------------------------------------------------------------------------------------------


def _sum_of_multiples(rng: random.Random) -> Problem:
    a, b, below = rng.randint(3, 12), rng.randint(3, 12), rng.randint(100, 5000)
    answer = sum(n for n in range(1, below) if n % a == 0 or n % b == 0)
    return f"What is the sum of the positive integers below {below} that are multiples of {a} or {b}?", answer


def _remainder(rng: random.Random) -> Problem:
    base, power, modulus = rng.randint(2, 50), rng.randint(20, 900), rng.randint(7, 997)
    return f"What is the remainder of {base} to the power {power}, divided by {modulus}?", pow(
        base, power, modulus
    )


def _divisors(rng: random.Random) -> Problem:
    number = math.prod(rng.choice((2, 3, 5, 7, 11)) for _ in range(rng.randint(4, 9)))
    answer = (
        sum(number % n == 0 for n in range(1, number + 1)) if number < 50_000 else _count_divisors(number)
    )
    return f"How many positive divisors does {number} have?", answer


def _count_divisors(number: int) -> int:
    count, prime = 1, 2
    while number > 1:
        power = 0
        while number % prime == 0:
            number, power = number // prime, power + 1
        count *= power + 1
        prime += 1
    return count


def _paths(rng: random.Random) -> Problem:
    rows, columns = rng.randint(3, 12), rng.randint(3, 12)
    words = (
        f"A grid has {rows} rows and {columns} columns of points. How many paths lead from one corner to the opposite "
        "one, moving only right or down?"
    )
    return words, math.comb(rows + columns - 2, rows - 1)


def _shopping(rng: random.Random) -> Problem:
    pens, books, price, off = (
        rng.randint(3, 30),
        rng.randint(2, 20),
        rng.randint(2, 9),
        rng.choice((10, 20, 25, 50)),
    )
    book_price = 4 * rng.randint(5, 15)
    total = Fraction((pens * price + books * book_price) * (100 - off), 100) * 100
    words = (
        f"A pen costs {price} dollars and a book {book_price} dollars. Someone buys {pens} pens and {books} books and "
        f"gets {off}% off the whole. How many cents does that cost?"
    )
    return words, int(total)


def _digits(rng: random.Random) -> Problem:
    base, power = rng.randint(2, 30), rng.randint(15, 200)
    return f"What is the sum of the decimal digits of {base} to the power {power}?", sum(
        map(int, str(base**power))
    )


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "sum_of_multiples": _sum_of_multiples,
    "remainder": _remainder,
    "divisors": _divisors,
    "paths": _paths,
    "shopping": _shopping,
    "digits": _digits,
}
"""Generators of problems, each in words with its answer."""
