"""The local function host as a process of this machine, for a run whose rewards are ``local``.

It is started again when it dies; the calls in it are tried again by whoever made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollart.config import Config
from rollart.config.rewards import LOCAL, Reward
from rollart.errors import RunError

__all__ = ["LocalFunctions", "local_rewards"]

logger = logging.getLogger(__name__)

START_S = 60.0
PAUSE_S = 0.5
TOKEN_VARIABLE = "ROLLART_FUNCTIONS_TOKEN"


def local_rewards(config: Config) -> list[Reward]:
    """The rewards that want a function host."""
    return [reward for task in config.tasks for reward in task.rewards if reward.where == LOCAL]


def specified(rewards: Sequence[Reward]) -> bytes:
    """The functions of ``rewards`` as the host's ``--file`` has them; where several name one, the largest limits."""
    by_function: dict[str, list[Reward]] = {}
    for reward in rewards:
        by_function.setdefault(reward.function or "", []).append(reward)
    return msgspec.json.encode(
        [
            {
                "function": function,
                "memory_mib": max(reward.memory_mib or 0 for reward in same),
                "limits": {
                    "least": max(reward.min_instances or 0 for reward in same),
                    "most": max(reward.max_instances or 32 for reward in same),
                    "calls_each": max(reward.calls_per_instance or 1 for reward in same),
                    "idle_s": max((r.idle_s for r in same if r.idle_s is not None), default=None),
                },
            }
            for function, same in by_function.items()
        ]
    )


class LocalFunctions:
    """The host's process; ``address`` is where it is now."""

    def __init__(self, rewards: Sequence[Reward], private: Path, log_dir: Path) -> None:
        """``private`` is a folder that only this user can read."""
        self.token = secrets.token_hex(16)
        self.address = ""
        self.restarts = 0
        self._specified = specified(rewards)
        self._file = private / "functions.json"
        self._address_file = private / "functions-address"
        self._log = log_dir / "functions.log"
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it; ``RunError`` when it does not come up."""
        self._file.write_bytes(self._specified)
        await self._spawn()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="function host")

    async def _spawn(self) -> None:
        self._address_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollart.workers", "functions", "--file", str(self._file)),
                *("--address-file", str(self._address_file), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, TOKEN_VARIABLE: self.token},
            )
        deadline = asyncio.get_running_loop().time() + START_S
        while not self._address_file.exists():
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                raise RunError(f"the function host did not come up within {START_S:g} s; see {self._log}")
            await asyncio.sleep(0.02)
        self.address = self._address_file.read_text()

    async def _keep(self) -> None:
        """Start it again whenever it dies."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            logger.error("the function host ended with code %d and is started again", code)
            _kill_group(self._process.pid)
            await asyncio.sleep(PAUSE_S)
            self.restarts += 1
            try:
                await self._spawn()
            except (OSError, RunError) as error:
                logger.error("the function host can't be started: %s", error)

    async def stop(self) -> None:
        """End it, and whatever it started."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(3.0):
                    await process.wait()
            except TimeoutError:
                _kill_group(process.pid)
                await process.wait()
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
