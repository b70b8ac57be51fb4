"""What the peers' rows of ``benchmarks.controller`` have in common; needs nothing but Python."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable

from benchmarks.parts.measure import Lag, Usage, percentile, resident_bytes

__all__ = ["Counter", "measure", "write_row"]

MEMORY_SAMPLES = 8


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
    gc.collect()  # as rollart's controller has it: nothing of the start is looked at again, and little else
    gc.freeze()
    gc.disable()
    before = resident_bytes()

    async def go_on(number: int) -> None:
        count = 0
        while not counter.enough:
            await episode(number, count)
            count += 1

    tasks = [asyncio.ensure_future(go_on(number)) for number in range(live)]
    while counter.turns < live:
        await asyncio.sleep(0.01)
    usage, lag, started = Usage(), Lag(), counter.turns
    lag.start()
    held: list[float] = []
    while counter.turns < started + turns_wanted:
        due = started + turns_wanted * (len(held) + 1) // MEMORY_SAMPLES
        while counter.turns < due:
            await asyncio.sleep(0.01)
        held.append((resident_bytes() - before - token_bytes()) / live)
    count, wall_s, cpu_s, thread_s = counter.turns - started, usage.wall_s, usage.cpu_s, usage.thread_s
    lag.stop()
    counter.enough = True
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return {
        "turns_per_second": count / wall_s,
        "cpu_us_per_turn": cpu_s / count * 1e6,
        "loop_cpu_us_per_turn": thread_s / count * 1e6,
        "loop_lag_p50_ms": percentile(lag.samples, 0.5) * 1e3,
        "loop_lag_p99_ms": percentile(lag.samples, 0.99) * 1e3,
        "loop_lag_max_ms": percentile(lag.samples, 1.0) * 1e3,
        "bytes_per_trajectory": max(held),
    }


def write_row(row: dict[str, object]) -> None:
    """For the process that started this one: the row is the last line of standard output."""
    sys.stdout.write("\n" + json.dumps(row) + "\n")
