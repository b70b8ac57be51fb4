"""Workers as processes of this machine.

Each worker leads a process group of its own: the terminal's Ctrl-C reaches only the controller, and whatever
a worker started (an engine's processes) is gone when the worker is.  A worker's output goes to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rollart.processes import MARK, end_marked

__all__ = ["LocalLauncher", "Placement", "WorkerExit", "import_path"]

TAIL_LINES = 15
ERROR_LINE = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception): .")


class Placement(msgspec.Struct, frozen=True):
    """A worker that the run wants."""

    name: str
    role: str
    hardware_class: str
    environment: Mapping[str, str] = {}
    """Variables for its process, beside this process's own."""
    interpreter: str = ""
    """Its Python, where that is not this process's."""
    tasks: tuple[str, ...] = ()
    """Of an environment worker: the tasks it holds; empty: all."""


class WorkerExit(msgspec.Struct, frozen=True):
    """A worker's process ended."""

    placement: Placement
    code: int
    """As subprocess has it: negative is a signal."""

    def __str__(self) -> str:
        how = (
            f"was killed by {signal.Signals(-self.code).name}"
            if self.code < 0
            else f"ended with exit code {self.code}"
        )
        return f"{self.placement.role} worker {self.placement.name} {how}"


class LocalLauncher:
    """Starts worker processes, says when one ends, and leaves none behind."""

    def __init__(
        self, key_file: Path, log_dir: Path, temporary: Path, *, on_exit: Callable[[WorkerExit], None]
    ) -> None:
        """``temporary`` holds the workers' temporary files and sockets; whoever made it removes it."""
        self._key_file = key_file
        self._log_dir = log_dir
        self._temporary = temporary
        self._on_exit = on_exit
        self._mark = uuid.uuid4().hex
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def start(self, placement: Placement) -> None:
        """Start one worker."""
        log = self._log_dir / f"{placement.name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self.command(placement),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._environment(placement),
            )
        self._processes[placement.name] = process
        watcher = asyncio.get_running_loop().create_task(self._watch(placement, process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def command(self, placement: Placement) -> list[str]:
        """What is run for a worker."""
        return [
            *(placement.interpreter or sys.executable, "-m", "rollart.workers", placement.role),
            *("--key-file", str(self._key_file), "--name", placement.name),
            *("--hardware-class", placement.hardware_class, "--parent", str(os.getpid())),
            *(("--tasks", ",".join(placement.tasks)) if placement.tasks else ()),
        ]

    def _environment(self, placement: Placement) -> dict[str, str]:
        own = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(self._temporary)}
        own[MARK] = self._mark_of(placement)
        if placement.interpreter:
            own |= import_path()
        return {**os.environ, **own, **placement.environment}

    def _mark_of(self, placement: Placement) -> str:
        return f"{self._mark}.{placement.name}"

    async def stop(self, *, grace_s: float) -> None:
        """End all workers: they have ``grace_s`` to end by themselves, then half of it after SIGTERM."""
        for signum, patience_s in ((None, grace_s), (signal.SIGTERM, grace_s / 2), (signal.SIGKILL, 5.0)):
            if not self._watchers:
                return
            if signum is signal.SIGKILL:
                self.kill()
            elif signum is not None:
                for process in self._processes.values():
                    _signal_group(process.pid, signum)
            await asyncio.wait(set(self._watchers), timeout=patience_s)

    def kill(self) -> None:
        """End all workers at once."""
        for name in self._processes:
            self.end(name)

    def end(self, name: str) -> None:
        """End one worker at once, if it is one of these and lives."""
        process = self._processes.get(name)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # what it started is ended by whoever sees its end

    def tail(self, name: str) -> str:
        """The last lines of a worker's log, and the first error in it."""
        return _tail(self._log_dir / f"{name}.log")

    async def _watch(self, placement: Placement, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        # Whatever it started and left behind, also what left its group.
        await asyncio.to_thread(end_marked, f"{MARK}={self._mark_of(placement)}")
        _signal_group(process.pid, signal.SIGKILL)  # where there is no /proc
        del self._processes[placement.name]
        self._on_exit(WorkerExit(placement, code))


def import_path() -> dict[str, str]:
    """The variable by which another interpreter finds a rollart that is a checkout and not installed there; its working
    directory has to be this process's for the user's own modules."""
    checkout = Path(__file__).parent.parent.parent
    if not (checkout / "pyproject.toml").is_file():
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{checkout}{os.pathsep}{before}" if before else str(checkout)}


def _signal_group(group: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def _tail(log: Path) -> str:
    """The log's last lines, after its first error, which is often the cause of all that follows."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(its log {log} can't be read: {error})"
    last = lines[-TAIL_LINES:]
    errors = (line for line in lines[:-TAIL_LINES] if ERROR_LINE.search(line))
    first = next(errors, None)
    return "\n".join(last if first is None else [first, "…", *last])
