"""Worker processes: what a person learns of a death, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rollart.controller.transport import ZmqTransport
from rollart.launch.local import LocalLauncher, Placement, WorkerExit


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def launcher(tmp_path: Path) -> tuple[LocalLauncher, list[WorkerExit]]:
    exits: list[WorkerExit] = []
    transport = ZmqTransport()
    key_file = tmp_path / "peer.json"
    transport.peer_file.write(key_file)
    transport.close()
    return LocalLauncher(key_file, tmp_path, tmp_path, on_exit=exits.append), exits


async def test_a_death_at_start_tells_its_code_and_last_lines(
    launcher: tuple[LocalLauncher, list[WorkerExit]], tmp_path: Path
) -> None:
    launch, exits = launcher
    (tmp_path / "peer.json").write_text("not json")
    await launch.start(Placement("trainer-0", "trainer", "CPU"))
    async with asyncio.timeout(20):
        while not exits:
            await asyncio.sleep(0.02)
    assert exits[0].code == 2
    assert str(exits[0]) == "trainer worker trainer-0 ended with exit code 2"
    assert "can't read the key file" in launch.tail("trainer-0")
    await launch.stop(grace_s=1)


async def test_stopping_reaps_a_worker_and_all_it_started(
    launcher: tuple[LocalLauncher, list[WorkerExit]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, exits = launcher
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONSTARTUP", "")
    monkeypatch.setattr(sys, "executable", str(_python_that_runs(tmp_path, stubborn)))
    await launch.start(Placement("environment-0", "environment", "CPU"))
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    await launch.stop(grace_s=0.2)
    assert [e.code for e in exits] == [-signal.SIGKILL]
    assert await gone(child, 5)


async def test_a_killed_worker_leaves_no_semaphore(
    launcher: tuple[LocalLauncher, list[WorkerExit]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's resource tracker removes it, if it lives to see the worker's end."""
    launch, exits = launcher
    holder = tmp_path / "holder.py"
    holder.write_text(
        "import multiprocessing, pathlib, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        f"pathlib.Path({str(tmp_path / 'name')!r}).write_text(lock._semlock.name)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(sys, "executable", str(_python_that_runs(tmp_path, holder)))
    await launch.start(Placement("environment-0", "environment", "CPU"))
    while not (tmp_path / "name").exists() or not (tmp_path / "name").read_text():
        await asyncio.sleep(0.02)
    semaphore = Path(f"/dev/shm/sem.{(tmp_path / 'name').read_text().removeprefix('/')}")
    assert semaphore.exists()
    launch.end("environment-0")
    async with asyncio.timeout(10):
        while not exits:
            await asyncio.sleep(0.02)
    assert not semaphore.exists()


def _python_that_runs(folder: Path, script: Path) -> Path:
    """An interpreter that runs ``script`` whatever it is asked to run."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    path.chmod(0o755)
    return path


async def test_a_worker_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """Not even SIGKILL of the controller leaves a worker: here one that is still waiting for its welcome."""
    script = (
        "import asyncio, pathlib, sys\n"
        "from rollart.launch.local import LocalLauncher, Placement\n"
        "from rollart.controller.transport import ZmqTransport\n"
        "async def main():\n"
        f"    folder = pathlib.Path({str(tmp_path)!r})\n"
        "    transport = ZmqTransport()\n"
        "    transport.peer_file.write(folder / 'peer.json')\n"
        "    launcher = LocalLauncher(folder / 'peer.json', folder, folder, on_exit=print)\n"
        "    await launcher.start(Placement('environment-0', 'environment', 'CPU'))\n"
        "    (pid,) = [p.pid for p in launcher._processes.values()]\n"
        "    await asyncio.sleep(2)\n"
        "    sys.stdout.write(f'{pid}\\n'); sys.stdout.flush()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    worker = int(await asyncio.wait_for(process.stdout.readline(), 30))
    assert alive(worker)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert await gone(worker, 10)
