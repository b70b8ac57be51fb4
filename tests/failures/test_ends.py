"""However a run ends, it ends whole: exit codes, the cause, a second signal."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from rollart.controller.controller import Outcome
from rollart.errors import RunError
from tests.scripted import Script, ScriptedRun, config_of
from tests.test_end_to_end import started


async def test_an_error_nobody_awaits_ends_the_run(tmp_path: Path) -> None:
    """29: an exception in a background task was swallowed."""
    script = Script()
    script.step_s = lambda: 0.01
    run = ScriptedRun(config_of(steps=1000), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while len(script.batches) < 2:
        await asyncio.sleep(0.01)

    async def broken() -> None:
        raise LookupError("the map is gone")

    lost = asyncio.ensure_future(broken())
    await asyncio.wait({lost})
    del lost
    with pytest.raises((LookupError, RunError), match="the map is gone"):
        await asyncio.wait_for(task, 15)
    assert run.violations == []


async def test_a_second_interrupt_ends_the_workers_at_once(tmp_path: Path) -> None:
    script = Script()
    script.train_s = lambda: 1000.0
    run = ScriptedRun(config_of(steps=1000), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while run.controller.loop is None or run.controller.loop.doing != "train_step":
        await asyncio.sleep(0.01)
    run.controller.interrupt()
    await asyncio.sleep(0)
    run.controller.interrupt()
    assert await asyncio.wait_for(task, 10) is Outcome.INTERRUPTED
    assert all(task.done() for task in run.launcher.tasks.values())


def test_sigterm_while_the_engines_start_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "frozen_lake.yaml", "steps=1000") as run:
        while not (run.folder / "logs").exists() or len(run.family) < 3:
            run.look()
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(30) == 130, run.output
        assert run.survivors(5) == []
    assert not (run.folder / "private").exists()
