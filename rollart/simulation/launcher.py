"""Starts simulated workers, and kills them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.launch.local import Placement, WorkerExit
from rollart.simulation.network import SimNetwork
from rollart.workers.worker import Worker

__all__ = ["SimLauncher"]

SIGKILL = 9


class SimLauncher:
    """A worker is a task; its death cuts it off before it can say goodbye."""

    def __init__(
        self, network: SimNetwork, make: Callable[[Placement], Worker], on_exit: Callable[[WorkerExit], None]
    ) -> None:
        self.workers: dict[str, Worker] = {}
        """Those that live."""
        self.started: list[Worker] = []
        """All that ever lived."""
        self.down: set[str] = set()
        """Those that can't be started now."""
        self._network = network
        self._make = make
        self._on_exit = on_exit
        self._tasks: dict[str, asyncio.Task[int]] = {}

    async def start(self, placement: Placement) -> None:
        """Start one worker; ``OSError`` while its machine is down."""
        if placement.name in self.down:
            raise OSError("its machine is down")
        worker = self._make(placement)
        self.workers[placement.name] = worker
        self.started.append(worker)
        task = asyncio.get_running_loop().create_task(worker.run(), name=placement.name)
        self._tasks[placement.name] = task
        task.add_done_callback(lambda done: self._done(placement, done))

    def crash(self, name: str) -> None:
        """Kill a worker as SIGKILL does; nothing happens when it is dead already."""
        task = self._tasks.get(name)
        if task is not None:
            self._network.cut(name)
            task.cancel()

    def end(self, name: str) -> None:
        """As ``crash``."""
        self.crash(name)

    async def stop(self, *, grace_s: float) -> None:
        """End all workers: those that have not ended in ``grace_s`` are killed."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        self.kill()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def kill(self) -> None:
        """Kill all."""
        for name in list(self._tasks):
            self.crash(name)

    def tail(self, name: str) -> str:
        """Simulated workers keep no log."""
        return ""

    def _done(self, placement: Placement, task: asyncio.Task[int]) -> None:
        del self._tasks[placement.name]
        self.workers.pop(placement.name, None)
        self._network.thaw(placement.name)  # a new worker of that name is not stopped
        code = -SIGKILL if task.cancelled() else task.result()
        self._on_exit(WorkerExit(placement, code))
