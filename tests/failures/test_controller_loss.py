"""What a worker that joined by hand does when its controller is gone: it ends, or waits for the one that resumes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rollart.config import RandomModel
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import Link, LinkState, Switchboard
from rollart.controller.transport import ZmqTransport
from rollart.protocol import Welcome
from rollart.random_model import write_model_folder
from tests.scripted import config_of

LAKE = {"name": "lake", "environment": "rollart.environments.frozen_lake:FrozenLake"}
NAME = "environment-by-hand"


class Head:
    """As much of a controller as takes a worker in."""

    def __init__(self, folder: Path) -> None:
        self.key_file = folder / "peer.json"
        self.store = folder / "store"
        self.store.mkdir()
        model = folder / "model"
        if not model.exists():
            write_model_folder(RandomModel(), model)
        config = msgspec.msgpack.encode(config_of(tasks=[LAKE]))
        welcome = Welcome(
            config, str(folder), str(model), str(self.store), "", "", 0.1, controller_timeout_s=1.0
        )
        self.ready, self.gone = asyncio.Event(), asyncio.Event()
        self.bugs: list[BaseException] = []
        self.transport = ZmqTransport()
        run = RunContext(write=lambda _: None, bug=self.bugs.append)
        self.switchboard = Switchboard(self.transport, welcome, run=run, on_change=self._changed)

    def _changed(self, link: Link, reason: str) -> None:
        assert link.name == NAME
        {LinkState.READY: self.ready, LinkState.GONE: self.gone}.get(link.state, asyncio.Event()).set()

    async def take_in(self) -> None:
        """Say where it is, and wait for the worker."""
        self.transport.peer_file.write(self.key_file)
        self.switchboard.start()
        async with asyncio.timeout(30):
            await self.ready.wait()

    async def die(self) -> None:
        """Without a word."""
        await self.switchboard.close()
        self.key_file.unlink()
        assert self.bugs == []


@asynccontextmanager
async def worker(key_file: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "rollart.workers", "environment", "--name", NAME]
    process = await asyncio.create_subprocess_exec(
        *command, "--key-file", str(key_file), *arguments, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def lead(folder: Path) -> tuple[Head, asyncio.Task[None]]:
    head = Head(folder)
    taking = asyncio.create_task(head.take_in())
    await asyncio.sleep(0)
    return head, taking


async def test_a_waiting_worker_joins_the_next_controller(tmp_path: Path) -> None:
    head, taking = await lead(tmp_path)
    async with worker(head.key_file, "--on-controller-loss", "wait") as process:
        await taking
        await head.die()
        async with asyncio.timeout(20):
            while head.store.exists():  # the worker's last act for it
                await asyncio.sleep(0.05)
        head, taking = await lead(tmp_path)
        await taking
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
            await head.gone.wait()
        assert head.store.exists(), "a worker that leaves by a signal takes nothing with it"
        await head.die()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_worker_without_a_controller_ends(tmp_path: Path, waits: bool) -> None:
    """By itself, or, if it waits, by a signal."""
    head, taking = await lead(tmp_path)
    arguments = ("--on-controller-loss", "wait") if waits else ()
    async with worker(head.key_file, *arguments) as process:
        await taking
        await head.die()
        async with asyncio.timeout(20):
            while head.store.exists():
                await asyncio.sleep(0.05)
            if waits:
                await asyncio.sleep(1.5)
                assert process.returncode is None
                process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
