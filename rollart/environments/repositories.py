"""Small Python packages with tests, drawn at random: what ``Repair`` puts a mistake into.

Names, numbers and the choice of modules differ from one to the next.  The code has no loop that a changed
operator could make endless, so that the tests can be run where they are made.
"""

from __future__ import annotations

import contextlib
import io
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Repository", "repository"]

NAMES = ("ledger", "orchard", "harbour", "atlas", "relay", "quarry", "beacon", "meadow", "anvil", "lantern")


@dataclass(frozen=True, slots=True)
class Repository:
    """Texts by path."""

    files: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)

    @property
    def test_count(self) -> int:
        """Test functions in it."""
        return sum(text.count("\ndef test_") for text in self.tests.values())

    def passes(self, changed: Mapping[str, str] = {}) -> bool:
        """Run the tests here, without pytest, with some modules ``changed``; the texts are this module's own."""
        modules: dict[str, dict[str, object]] = {}
        for path, text in {**self.files, **changed}.items():
            if not path.endswith("__init__.py"):
                namespace: dict[str, object] = {}
                exec(compile(text, path, "exec"), namespace)
                modules[path.removesuffix(".py").rpartition("/")[2]] = namespace
        return all(_test(text, modules) for text in self.tests.values())


def _test(text: str, modules: Mapping[str, dict[str, object]]) -> bool:
    imported = [line for line in text.splitlines() if line.startswith("from ")]
    namespace: dict[str, object] = {}
    for line in imported:
        words = line.split()
        module = modules[words[1].rpartition(".")[2]]
        namespace.update((name.strip(","), module[name.strip(",")]) for name in words[3:])
    body = "\n".join(line for line in text.splitlines() if line not in imported)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(body, namespace)
            for name, value in list(namespace.items()):
                if name.startswith("test_") and callable(value):
                    value()
    except Exception:  # the boundary of code with a mistake in it
        return False
    return True


def repository(rng: random.Random) -> Repository:
    """A package of two modules, and a test file for each."""
    package = rng.choice(NAMES)
    made = Repository({f"{package}/__init__.py": f'"""The {package} package."""\n'}, {})
    for make in rng.sample(MODULES, 2):
        name, code, test = make(rng)
        made.files[f"{package}/{name}.py"] = code
        made.tests[f"tests/test_{name}.py"] = f"from {package}.{name} import {test}"
    return made


def _word(rng: random.Random, length: int = 5) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(length))


def _intervals(rng: random.Random) -> tuple[str, str, str]:
    a, b, c = rng.randint(1, 5), rng.randint(6, 12), rng.randint(14, 30)
    code = f'''"""Closed intervals of whole numbers, as pairs."""


def length(interval):
    """How many numbers are in it."""
    low, high = interval
    return high - low + 1


def overlap(one, other):
    """Whether they share a number."""
    return one[0] <= other[1] and other[0] <= one[1]


def merge(intervals):
    """The same numbers in as few intervals as possible, in order."""
    merged = []
    for low, high in sorted(intervals):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def clamp(number, low={a}, high={c}):
    """The nearest number in the interval."""
    if number < low:
        return low
    if number > high:
        return high
    return number
'''
    test = f"""length, overlap, merge, clamp


def test_length():
    assert length(({a}, {b})) == {b - a + 1}
    assert length(({b}, {b})) == 1


def test_overlap():
    assert overlap(({a}, {b}), ({b}, {c}))
    assert not overlap(({a}, {b}), ({b + 1}, {c}))
    assert not overlap(({b + 1}, {c}), ({a}, {b}))


def test_merge():
    assert merge([({b + 1}, {c}), ({a}, {b})]) == [({a}, {c})]
    assert merge([({a}, {b}), ({b + 2}, {c})]) == [({a}, {b}), ({b + 2}, {c})]


def test_clamp():
    assert [clamp({a - 1}), clamp({b}), clamp({c + 7})] == [{a}, {b}, {c}]
"""
    return "intervals", code, test


def _accounts(rng: random.Random) -> tuple[str, str, str]:
    fee, limit, start = rng.randint(1, 5), rng.randint(20, 90), rng.randint(100, 400)
    code = f'''"""Accounts with a fee for each payment and a limit for each."""

FEE = {fee}
LIMIT = {limit}


class Account:
    def __init__(self, balance=0):
        self.balance = balance
        self.payments = 0

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("nothing to deposit")
        self.balance = self.balance + amount

    def pay(self, amount):
        """Whether the payment was made."""
        if amount > LIMIT or self.balance < amount + FEE:
            return False
        self.balance = self.balance - amount - FEE
        self.payments = self.payments + 1
        return True


def total(accounts):
    """Of those that owe nothing."""
    return sum(account.balance for account in accounts if account.balance >= 0)
'''
    test = f"""Account, total, FEE, LIMIT


def test_constants():
    assert (FEE, LIMIT) == ({fee}, {limit})


def test_deposit():
    account = Account({start})
    account.deposit(1)
    assert account.balance == {start + 1}
    try:
        account.deposit(0)
    except ValueError:
        return
    assert False


def test_pay():
    account = Account({start})
    assert account.pay({limit})
    assert account.balance == {start - limit - fee} and account.payments == 1
    assert not account.pay({limit + 1})
    assert not Account({limit + fee - 1}).pay({limit})
    assert Account({limit + fee}).pay({limit})


def test_total():
    assert total([Account(5), Account(-3), Account({start}), Account()]) == {start + 5}
    assert Account().balance == 0
"""
    return "accounts", code, test


def _texts(rng: random.Random) -> tuple[str, str, str]:
    width, word = rng.randint(8, 14), _word(rng)
    code = f'''"""Texts: wrapped, counted, shifted."""

WIDTH = {width}


def wrap(text, width=WIDTH):
    """Lines of whole words, each at most ``width`` long where its words are."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] = lines[-1] + " " + word
        else:
            lines.append(word)
    return lines


def most_common(text):
    """The character that is there most often, the first of them."""
    best, often = "", 0
    for character in text:
        count = text.count(character)
        if count > often:
            best, often = character, count
    return best


def shift(text, by):
    """Each small letter ``by`` places further in the alphabet."""
    return "".join(chr((ord(c) - 97 + by) % 26 + 97) if c.islower() else c for c in text)
'''
    shifted = "".join(chr((ord(c) - 97 + 3) % 26 + 97) for c in word)
    exact = "a" * (width - 3)
    test = f'''wrap, most_common, shift


def test_wrap():
    assert wrap("{exact} bb cc") == ["{exact} bb", "cc"]
    assert wrap("{exact} bbb") == ["{exact}", "bbb"]


def test_most_common():
    assert most_common("abcbcab") == "b"
    assert most_common("xy") == "x"


def test_shift():
    assert shift("{word} Z", 3) == "{shifted} Z"
    assert shift(shift("{word}", 20), 6) == "{word}"
'''
    return "texts", code, test


def _grids(rng: random.Random) -> tuple[str, str, str]:
    rows, columns = rng.randint(3, 5), rng.randint(3, 6)
    grid = [[rng.randint(0, 9) for _ in range(columns)] for _ in range(rows)]
    row, column = rng.randrange(1, rows - 1), rng.randrange(1, columns - 1)
    around = sum(grid[r][c] for r in range(row - 1, row + 2) for c in range(column - 1, column + 2))
    code = '''"""Grids of numbers, as lists of rows."""


def transpose(grid):
    """Rows become columns."""
    return [[row[i] for row in grid] for i in range(len(grid[0]))]


def around(grid, row, column):
    """Sum of the eight neighbours, those outside left out."""
    total = 0
    for r in range(row - 1, row + 2):
        for c in range(column - 1, column + 2):
            inside = 0 <= r < len(grid) and 0 <= c < len(grid[0])
            if inside and (r != row or c != column):
                total = total + grid[r][c]
    return total


def border(grid):
    """Sum of the cells at the border."""
    inner = sum(sum(row[1:-1]) for row in grid[1:-1])
    return sum(sum(row) for row in grid) - inner
'''
    inner = sum(sum(line[1:-1]) for line in grid[1:-1])
    corner = grid[0][1] + grid[1][0] + grid[1][1]
    last = grid[-1][-2] + grid[-2][-1] + grid[-2][-2]
    test = f"""transpose, around, border

GRID = {grid}


def test_transpose():
    assert transpose(transpose(GRID)) == GRID
    assert transpose(GRID)[0] == [row[0] for row in GRID]


def test_around():
    assert around(GRID, {row}, {column}) == {around - grid[row][column]}
    assert around(GRID, 0, 0) == {corner}
    assert around(GRID, {rows - 1}, {columns - 1}) == {last}


def test_border():
    assert border(GRID) == {sum(map(sum, grid)) - inner}
"""
    return "grids", code, test


MODULES: list[Callable[[random.Random], tuple[str, str, str]]] = [_intervals, _accounts, _texts, _grids]
"""Each makes a module's name, its code, and its tests after ``from PACKAGE.NAME import``."""
