"""Mooncake's own servers as processes of this machine: a master, and storage nodes that hold the weights.

Weights live on nodes of their own, since what the owner of a segment holds is lost with its process, and trainers and
inference workers die.  A server that dies is started again: a new master knows no keys, and a new node has none of the
old one's, so whoever pulls finds a version missing and has it published again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rollart.errors import RunError

__all__ = ["MooncakeServers"]

logger = logging.getLogger(__name__)

START_S = 15.0
LEASE_S = 10.0
"""How long the master protects what is being read, which has to be done by then: a bucket, or 64 MiB of them."""
PAUSE_S = 0.5
"""Before a server that died is started again."""


class MooncakeServers:
    """A master and its storage nodes; ``address`` is the master's."""

    def __init__(
        self, log_dir: Path, *, nodes: int, node_bytes: int, host: str = "127.0.0.1", lease_s: float = LEASE_S
    ) -> None:
        """``node_bytes`` is the memory of each node for weights."""
        self._lease_s = lease_s
        self.restarts = 0
        self._log_dir = log_dir
        self._host = host
        self._nodes = nodes
        self._node_bytes = node_bytes
        ports = _free_ports(host, 2 + nodes)
        self._rpc, self._metrics, *self._node_ports = ports
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Where clients reach the master."""
        return f"{self._host}:{self._rpc}"

    async def start(self) -> None:
        """Start all; ``RunError`` when one doesn't come up."""
        await self._start("mooncake-master", self._master())
        await self._answers(self._rpc, "mooncake-master")
        for number, port in enumerate(self._node_ports):
            await self._start(f"mooncake-node-{number}", self._node(port))
            await self._answers(port, f"mooncake-node-{number}")

    async def stop(self) -> None:
        """End all."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nothing in them outlives the run
        for process in self._processes.values():
            await process.wait()
        self._processes.clear()

    def pid(self, name: str) -> int:
        """Of ``mooncake-master`` or ``mooncake-node-N``."""
        return self._processes[name].pid

    # --- processes ------------------------------------------------------------------------------------

    async def _start(self, name: str, command: Sequence[str]) -> None:
        await self._spawn(name, command)
        keeper = asyncio.get_running_loop().create_task(self._keep(name, command), name=f"keeper of {name}")
        self._keepers.append(keeper)

    async def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self._log_dir / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollart.launch.tethered", str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MC_TCP_BIND_ADDRESS": self._host, "MC_LOG_LEVEL": "WARNING"},
            )

    async def _keep(self, name: str, command: Sequence[str]) -> None:
        """Start a server again whenever it dies."""
        while True:
            code = await self._processes[name].wait()
            logger.error("%s ended with code %d and is started again", name, code)
            await asyncio.sleep(PAUSE_S)
            self.restarts += 1
            try:
                await self._spawn(name, command)
            except OSError as error:
                logger.error("%s can't be started: %s", name, error)

    async def _answers(self, port: int, name: str) -> None:
        """Wait until something listens at ``port``."""
        try:
            async with asyncio.timeout(START_S):
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection(self._host, port)
                        writer.close()
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log = self._log_dir / f"{name}.log"
            raise RunError(f"{name} did not come up within {START_S:g} s; see {log}") from None

    def _master(self) -> list[str]:
        return [
            _program("mooncake_master"),
            f"--rpc_address={self._host}",
            f"--rpc_port={self._rpc}",
            f"--metrics_host={self._host}",
            f"--metrics_port={self._metrics}",
            f"--default_kv_lease_ttl={int(self._lease_s * 1000)}ms",
            "--logtostderr",
        ]

    def _node(self, port: int) -> list[str]:
        return [
            _program("mooncake_client"),
            f"--host={self._host}",
            f"--port={port}",
            f"--global_segment_size={self._node_bytes}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--logtostderr",
        ]


def _program(name: str) -> str:
    """The path of one of Mooncake's programs; ``RunError`` when it is not installed."""
    package = importlib.util.find_spec("mooncake")
    found = Path(package.origin).with_name(name) if package is not None and package.origin else None
    if found is None or not found.exists():
        raise RunError(
            f"{name} is not installed: weights.store mooncake needs the package "
            "mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine with GPUs"
        )
    return str(found)


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
