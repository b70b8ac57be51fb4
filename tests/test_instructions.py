"""The controller's work for a turn, in instructions: whoever makes it grow says so, by storing the new count."""

from __future__ import annotations

import json
import platform

import pytest

from benchmarks import instructions
from benchmarks.parts.report import Row


@pytest.fixture(scope="module")
def found() -> Row:
    return instructions.measure()


def test_a_turn_takes_as_many_instructions_as_stored(found: Row) -> None:
    stored = json.loads(instructions.STORED.read_text())
    ours, theirs = platform.python_version_tuple()[:2], stored["versions"]["python"].split(".")[:2]
    # Each version of Python has instructions of its own: the counts of another are only near.
    tolerance = instructions.NOTABLE if list(ours) == theirs else 0.5
    assert found["per_turn"] == pytest.approx(stored["per_turn"], rel=tolerance), (
        f"a turn took {stored['per_turn']:.0f} instructions and takes {found['per_turn']:.0f}; what moved:\n"
        + "\n".join(instructions.moved(stored, found))
        + "\nIf it is meant: python -m benchmarks.all instructions"
    )


def test_what_moved_is_named(found: Row) -> None:
    name = next(iter(found["functions"]))
    slower = {**found, "functions": {**found["functions"], name: found["functions"][name] + 100}}
    assert instructions.moved(found, slower)[0].startswith(f"{name}: ")
    assert instructions.moved(found, found) == []


def test_the_count_is_the_same_each_time(found: Row) -> None:
    assert instructions.measure() == found
