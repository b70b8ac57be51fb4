"""What blocks the event loop is named, and how late the loop was is known."""

from __future__ import annotations

import asyncio
import threading
import time

from rollart.controller.loop_watch import LoopWatch


def blocks(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_task_that_blocks_the_loop_is_named_with_its_place() -> None:
    said: list[str] = []
    before = threading.active_count()
    async with LoopWatch(said.append, blocked_s=0.2) as watch:

        async def guilty() -> None:
            for _ in range(2):
                await asyncio.sleep(0.1)
                blocks(0.6)

        await asyncio.create_task(guilty(), name="the guilty one")
        await asyncio.sleep(0.2)
        assert watch.take_lag() >= 0.4
        assert watch.take_lag() == 0.0
    assert len(said) == 1, "the same place is not told again and again"
    assert "task 'the guilty one'" in said[0] and "blocks (" in said[0] and "guilty (" in said[0]
    assert threading.active_count() <= before + 1, "asyncio's own thread may stay"


async def test_a_callback_that_blocks_is_named_too() -> None:
    said: list[str] = []
    async with LoopWatch(said.append, blocked_s=0.2):
        asyncio.get_running_loop().call_later(0.1, blocks, 0.5)
        await asyncio.sleep(1)
    assert len(said) == 1 and "a callback: blocks (" in said[0]
