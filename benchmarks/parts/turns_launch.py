"""Instant workers as processes of this machine, for the controller and for the bare loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from rollart.launch.local import Placement
from rollart.peer import Peer
from rollart.protocol import Role

SIDE_BYTES, SIDE_SHARE = 1_000_000, 0.01

__all__ = ["SIDE_BYTES", "SIDE_SHARE", "InstantLauncher", "SidePayloads", "key_file_of"]


class SidePayloads:
    """A second frame of ``size`` bytes beside a ``share`` of the answers."""

    def __init__(self, size: int = 0, share: float = 0.0) -> None:
        self.size = size
        self.share = share


@contextlib.asynccontextmanager
async def key_file_of(peer: Peer) -> AsyncIterator[Path]:
    """A file that tells workers how to reach ``peer``, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as folder:
        path = Path(folder) / "peer.json"
        peer.write(path)
        yield path


class InstantLauncher:
    """Fills the controller's ``Launcher``."""

    def __init__(self, key_file: Path, side: SidePayloads) -> None:
        self._key_file = key_file
        self._side = side
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, placement: Placement) -> None:
        """Start one worker."""
        side = self._side if placement.role in (Role.INFERENCE, Role.ENVIRONMENT) else SidePayloads()
        self._processes[placement.name] = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.parts.instant_worker", placement.role),
            *("--key-file", str(self._key_file), "--name", placement.name, "--parent", str(os.getpid())),
            *("--side-bytes", str(side.size), "--side-share", str(side.share)),
            start_new_session=True,
        )

    async def stop(self, *, grace_s: float) -> None:
        """End all workers."""
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=grace_s)
        self.kill()
        if ends:
            await asyncio.wait(ends)

    def kill(self) -> None:
        """End all workers at once."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    def end(self, name: str) -> None:
        """End one worker at once."""
        self._processes[name].kill()

    def tail(self, name: str) -> str:
        """Instant workers write to this process's own streams."""
        return f"({name} has no log)"
