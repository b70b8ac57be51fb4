"""The virtual loop behaves as asyncio's does, except that its time is a number."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.simulation.loop import Deadlock, VirtualLoop


def run(program: Coroutine[Any, Any, Any], *, seed: int | None = None, end_at: float = 1e9) -> Any:
    loop = VirtualLoop(shuffle=None if seed is None else random.Random(seed), end_at=end_at)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(program)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps() -> None:
    async def program() -> float:
        await asyncio.sleep(86_400)
        return now()

    started = time.monotonic()
    assert run(program()) == 86_400
    assert time.monotonic() - started < 60, "a virtual day must not take a real one"


@given(st.lists(st.floats(0, 1000), max_size=20), st.one_of(st.none(), st.integers(0, 5)))
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float], seed: int | None) -> None:
    async def program() -> list[float]:
        woken: list[float] = []

        async def sleeper(delay: float) -> None:
            await asyncio.sleep(delay)
            assert now() == delay
            woken.append(delay)

        async with asyncio.TaskGroup() as group:
            for delay in delays:
                group.create_task(sleeper(delay))
        return woken

    assert run(program(), seed=seed) == sorted(delays)


def test_timeout_cancels_what_it_surrounds() -> None:
    async def program() -> tuple[float, bool]:
        cancelled = False
        try:
            async with asyncio.timeout(5):
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    cancelled = True
                    raise
        except TimeoutError:
            return now(), cancelled
        raise AssertionError("no timeout")

    assert run(program()) == (5, True)


def test_a_failing_task_ends_its_group() -> None:
    async def program() -> None:
        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError("planted")

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(100))
        assert [str(error) for error in caught.value.exceptions] == ["planted"]
        assert now() == 1

    run(program())


def test_locks_queues_and_gather() -> None:
    async def program() -> list[int]:
        lock, queue = asyncio.Lock(), asyncio.Queue[int](maxsize=1)
        seen: list[int] = []

        async def put(number: int) -> None:
            async with lock:
                await asyncio.sleep(1)
            await queue.put(number)

        async def take() -> None:
            for _ in range(3):
                seen.append(await queue.get())

        await asyncio.gather(put(0), put(1), put(2), take())
        assert now() == 3
        return seen

    assert run(program()) == [0, 1, 2]


def test_what_can_never_end_is_a_deadlock() -> None:
    async def program() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    with pytest.raises(Deadlock, match="nothing is ready and no timer is set"):
        loop.run_until_complete(program())

    async def endless() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="has not ended at 50 s"):
        VirtualLoop(end_at=50).run_until_complete(endless())


def test_an_exception_that_nobody_awaits_reaches_the_handler() -> None:
    heard: list[object] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
        loop.call_later(1, lambda: 1 / 0)
        await asyncio.sleep(2)

    run(program())
    assert [type(error) for error in heard] == [ZeroDivisionError]


def order(seed: int | None) -> list[int]:
    async def program() -> list[int]:
        seen: list[int] = []

        async def worker(number: int) -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append(number)

        await asyncio.gather(*(worker(number) for number in range(6)))
        return seen

    found: list[int] = run(program(), seed=seed)
    return found


def test_shuffled_tasks_take_another_order_and_the_same_for_the_same_seed() -> None:
    plain = order(None)
    assert plain == [*range(6)] * 3
    assert order(1) == order(1)
    assert sorted(order(1)) == sorted(plain)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_cancelled_timers_do_not_pile_up() -> None:
    loop = VirtualLoop()
    for _ in range(10_000):
        loop.call_later(1000, print).cancel()
    assert len(loop._timers) < 1000
    assert loop.waiting() == []
    loop.close()
