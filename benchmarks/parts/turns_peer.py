"""What the peers' rows of ``benchmarks.controller`` have in common; needs no package but Python's."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from benchmarks.parts.measure import measure_turns, resident_bytes
from rollart.controller.collector import collecting_rarely

__all__ = ["Counter", "measure", "write_row"]


class Counter:
    """Turns so far, and whether it is enough."""

    def __init__(self) -> None:
        self.turns = 0
        self.enough = False


async def measure(
    live: int,
    turns_wanted: int,
    counter: Counter,
    episode: Callable[[int, int], Awaitable[object]],
    *,
    token_bytes: Callable[[], int],
) -> dict[str, object]:
    """A row: ``turns_wanted`` turns with ``live`` coroutines that run ``episode(number, count)`` one after another."""
    before = resident_bytes()

    async def go_on(number: int) -> None:
        count = 0
        while not counter.enough:
            await episode(number, count)
            count += 1

    with collecting_rarely():  # as rollart's controller has it
        tasks = [asyncio.ensure_future(go_on(number)) for number in range(live)]
        row = await measure_turns(
            lambda: counter.turns,
            warm=live,
            wanted=turns_wanted,
            bytes_per_trajectory=lambda: (resident_bytes() - before - token_bytes()) / live,
        )
    counter.enough = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return row


def write_row(row: dict[str, object]) -> None:
    """For the process that started this one: the row is the last line of standard output."""
    sys.stdout.write("\n" + json.dumps(row) + "\n")
