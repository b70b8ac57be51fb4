"""The turns exchange over Ray actors, the way Ray-based trainers write it: one row of ``benchmarks.controller``.

An actor that holds the environments, an actor that is the engine, and in the driver a coroutine a trajectory
that awaits their methods; ids are lists.  Both actors answer at once.
"""

from __future__ import annotations

import sys
from typing import Any

import ray  # type: ignore[import-not-found]
import uvloop

from benchmarks.parts.turns_peer import Counter, measure, write_row
from benchmarks.parts.turns_shape import ANSWER_TOKENS, FIRST_TOKENS, OBSERVATION_TOKENS, TURNS

CONCURRENCY = 1000
LIST_ITEM_BYTES = 8


class Engine:
    """Answers with 16 tokens and their log-probabilities."""

    async def generate(self, ids: list[int]) -> tuple[list[int], list[float]]:
        return [7] * ANSWER_TOKENS, [-0.5] * ANSWER_TOKENS


class Environments:
    """Holds every episode."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    async def reset(self, session: str) -> list[int]:
        self._turns[session] = 0
        return [40] * FIRST_TOKENS

    async def step(self, session: str, action: list[int]) -> tuple[list[int], float, bool]:
        turn = self._turns[session] = self._turns[session] + 1
        done = turn >= TURNS
        if done:
            del self._turns[session]
        return [41] * OBSERVATION_TOKENS, 1.0, done


async def _measure(live: int, turns_wanted: int) -> dict[str, object]:
    actor = ray.remote(num_cpus=0, max_concurrency=CONCURRENCY)
    engine: Any = actor(Engine).remote()
    environments: Any = actor(Environments).remote()
    await environments.reset.remote("warm")
    await engine.generate.remote([1])
    counter, held = Counter(), dict[int, list[int]]()

    async def episode(number: int, count: int) -> None:
        session = f"{number}.{count}"
        ids = held[number] = list(await environments.reset.remote(session))
        done = False
        while not done and not counter.enough:
            action, _ = await engine.generate.remote(ids)
            ids += action
            observation, _, done = await environments.step.remote(session, action)
            ids += observation
            counter.turns += 1

    return await measure(
        live,
        turns_wanted,
        counter,
        episode,
        token_bytes=lambda: LIST_ITEM_BYTES * sum(map(len, held.values())),
    )


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    write_row(uvloop.run(_measure(int(sys.argv[1]), int(sys.argv[2]))))
    ray.shutdown()
