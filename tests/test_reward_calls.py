"""Calls to reward functions in virtual time: attempts, hedges, the circuit, cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from rollart.config.rewards import Reward
from rollart.controller.reward_calls import OPENS_AFTER, Caller, CallError, FailureKind, Stats
from rollart.rewards.payload import Reply, Request, Result
from rollart.rewards.view import TrajectoryView
from rollart.simulation.loop import VirtualLoop

DOWN = CallError(FailureKind.INFRASTRUCTURE, "connection refused")
REQUEST = Request(
    key="k",
    function="m:f",
    deadline_s=1,
    trajectories=[TrajectoryView(id=0, task="T", seed=0, split="train")],
)


class Scripted:
    """A backend: (number of the call) → what happens."""

    def __init__(self, act: Callable[[int], Awaitable[float]]) -> None:
        self.act = act
        self.calls = 0
        self.live = self.most_live = self.cancelled = 0

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        self.calls += 1
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        try:
            return Reply(results=[Result(score=await self.act(self.calls))])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1

    async def close(self) -> None: ...


def virtual(main: Callable[[], Awaitable[Any]]) -> float:
    """Run ``main`` in virtual time; the seconds it took."""
    loop = VirtualLoop()  # type: ignore[abstract]

    async def run() -> None:
        await main()

    loop.run_until_complete(run())
    assert loop.waiting() == []
    return loop.time()


def caller(act: Callable[[int], Awaitable[float]], **settings: Any) -> tuple[Caller, Scripted, Stats]:
    backend, stats = Scripted(act), Stats()
    return (
        Caller(msgspec.convert({"function": "m:f", **settings}, Reward), backend, random.Random(0), stats),
        backend,
        stats,
    )


def test_infrastructure_failures_are_tried_again_with_growing_pauses_and_errors_are_not() -> None:
    async def third_time(call: int) -> float:
        if call < 3:
            raise DOWN
        return 0.5

    async def main() -> None:
        calls, backend, stats = caller(third_time)
        assert (await calls.call(REQUEST)).results[0].score == 0.5
        assert backend.calls == 3
        assert stats.counts == {"calls": 3, "failed_infrastructure": 2, "retried": 2, "cold_starts": 0}

    assert 0.375 <= virtual(main) <= 0.75

    async def wrong(call: int) -> float:
        raise CallError(FailureKind.ERROR, "no such rubric")

    async def once() -> None:
        calls, backend, _ = caller(wrong)
        with pytest.raises(CallError, match="no such rubric"):
            await calls.call(REQUEST)
        assert backend.calls == 1

    assert virtual(once) == 0


def test_an_attempt_has_its_time_and_no_more() -> None:
    async def never(call: int) -> float:
        await asyncio.sleep(1e6)
        return 0.0

    async def main() -> None:
        calls, backend, stats = caller(never, timeout_s=2.0, retries=1)
        with pytest.raises(CallError) as failed:
            await calls.call(REQUEST)
        assert failed.value.kind is FailureKind.TIMEOUT
        assert backend.cancelled == 2 and stats.counts["failed_timeout"] == 2

    assert 4.1 < virtual(main) < 4.3


def test_places_are_bounded_and_a_cancelled_call_stops_at_once() -> None:
    async def slow(call: int) -> float:
        await asyncio.sleep(10)
        return 1.0

    async def main() -> None:
        calls, backend, _ = caller(slow, concurrency=4)
        tasks = [asyncio.ensure_future(calls.call(REQUEST)) for _ in range(10)]
        await asyncio.sleep(1)
        assert backend.live == 4
        for task in tasks[:6]:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert backend.cancelled == 4 and backend.live == 4
        await asyncio.gather(*tasks, return_exceptions=True)
        assert backend.calls == 8 and backend.most_live == 4

    assert virtual(main) == 11


def test_a_slow_call_is_joined_by_a_second_and_the_first_answer_counts() -> None:
    async def first_hangs(call: int) -> float:
        await asyncio.sleep(1000 if call == 1 else 1)
        return float(call)

    async def main() -> None:
        calls, backend, stats = caller(first_hangs, hedge_after_s=3.0, timeout_s=2000.0)
        assert (await calls.call(REQUEST)).results[0].score == 2.0
        assert stats.counts["hedged"] == 1 and backend.cancelled == 1 and backend.live == 0

    assert virtual(main) == 4


def test_a_hedge_that_fails_leaves_the_first_call_alone() -> None:
    async def second_fails(call: int) -> float:
        if call == 2:
            raise DOWN
        await asyncio.sleep(5)
        return 1.0

    async def main() -> None:
        calls, backend, _ = caller(second_fails, hedge_after_s=3.0)
        assert (await calls.call(REQUEST)).results[0].score == 1.0
        assert backend.calls == 2

    assert virtual(main) == 5


def test_the_circuit_opens_after_failures_in_a_row_and_one_call_probes() -> None:
    down_until = 20.0

    async def outage(call: int) -> float:
        if asyncio.get_running_loop().time() < down_until:
            raise DOWN
        return 1.0

    async def main() -> None:
        calls, _, stats = caller(outage, on_failure="retry", retry_for_s=100.0, retries=0)
        replies = await asyncio.gather(*(calls.call(REQUEST) for _ in range(200)))
        assert len(replies) == 200 and stats.counts["failed_circuit_open"] > 0
        failed = stats.counts["failed_infrastructure"]
        assert OPENS_AFTER <= failed < 200 + 20, "the endpoint is left alone while it is down"

    assert down_until < virtual(main) < down_until + 75


def test_retrying_ends_when_its_time_is_up() -> None:
    async def down(call: int) -> float:
        raise DOWN

    async def main() -> None:
        calls, _, _ = caller(down, on_failure="retry", retry_for_s=50.0, retries=0)
        with pytest.raises(CallError):
            await calls.call(REQUEST)

    assert 20 < virtual(main) <= 50
