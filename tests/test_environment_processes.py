"""Real environment workers under a real controller: what a user's code may cost, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.controller import events
from rollart.controller.preflight import check_environments
from rollart.controller.trajectory import State
from rollart.errors import ConfigError
from rollart.launch.local import LocalLauncher, Placement, WorkerExit
from rollart.processes import MARK
from tests.scripted import Script, ScriptedLauncher, ScriptedRun, config_of

MISBEHAVING = "tests.misbehaving:Misbehaving"


class HybridLauncher(ScriptedLauncher):
    """Environment workers are processes; the others answer by the script."""

    def __init__(self, key_file: Path, script: Script, on_exit: Callable[[WorkerExit], None], path: Path):
        super().__init__(key_file, script, on_exit)
        self.local = LocalLauncher(key_file, path / "logs", path, on_exit=on_exit)

    async def start(self, placement: Placement) -> None:
        await (self.local if placement.role == "environment" else super()).start(placement)

    async def stop(self, *, grace_s: float) -> None:
        await super().stop(grace_s=grace_s)
        await self.local.stop(grace_s=grace_s)

    def kill(self) -> None:
        super().kill()
        self.local.kill()

    def end(self, name: str) -> None:
        (self.local.end if name.startswith("environment") else super().end)(name)

    def tail(self, name: str) -> str:
        return self.local.tail(name)


class ProcessRun(ScriptedRun):
    """A run whose environment workers are real."""

    def __init__(self, path: Path, tasks: list[dict[str, Any]], **changes: Any) -> None:
        changes = {"start_timeout_s": 60.0, "heartbeat_timeout_s": 20.0, "heartbeat_s": 0.5, **changes}
        self.path = path
        self.script = Script()
        super().__init__(config_of(tasks=tasks, **changes), self.script, path)
        self.local: HybridLauncher

        def launch(on_exit: Callable[[WorkerExit], None]) -> HybridLauncher:
            self.local = HybridLauncher(self.folder.key_file, self.script, on_exit, path)
            self.launcher = self.local
            return self.local

        self.controller._launch = launch

    def ends(self, task: str) -> dict[str, str]:
        """The end states of a task's trajectories, each with a detail."""
        of = {e.trajectory for e in self.events if isinstance(e, events.Dispatched) and e.task == task}
        moves = [e for e in self.events if isinstance(e, events.Moved) and e.trajectory in of]
        ends = (State.CONSUMED, State.FAILED)
        return {f"{m.after} {m.reason}".strip(): m.detail for m in moves if m.after in ends}


def marked() -> list[int]:
    """Processes of workers that live, this test's own included."""
    found = []
    for process in psutil.process_iter():
        try:
            if MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


HOW = {
    "raises": ("failed env_error", "raised ValueError: the map has no goal ("),
    "exits": ("failed env_error", "raised SystemExit: 3 ("),
    "hangs": ("failed env_timeout", "did not answer Step within 1 s"),
    "floods": ("failed env_error", "printed more than 1 MiB (environments.max_output_mib)"),
    "returns_nothing": ("failed env_error", "must return rollart.environments.Turn"),
    "returns_megabytes": ("failed env_error", "a text of 50,000,000 characters, which no context of 512"),
    "floods_from_a_process": ("consumed", ""),
    "forks": ("consumed", ""),
    "leaves_children": ("consumed", ""),
    "good": ("consumed", ""),
}


async def test_what_environments_do_to_their_worker_costs_one_trajectory_each(tmp_path: Path) -> None:
    before = set(marked())
    tasks = [
        {
            "name": how, "environment": MISBEHAVING, "options": {"how": how},
            "step_timeout_s": 1.0 if how == "hangs" else 30.0, "max_failed_groups": 1,
        }
        for how in HOW
    ]  # fmt: skip
    run = ProcessRun(
        tmp_path / "run", tasks, steps=10_000, rollout={"retries": 0, "member_refills": 0, "groups_per_batch": 4},
        environments={"max_output_mib": 1.0, "threads": 16},
    )  # fmt: skip
    of: dict[int, str] = {}
    missing = set(HOW)

    def listen(event: events.Event) -> None:
        if isinstance(event, events.Dispatched):
            of[event.trajectory] = event.task
        elif isinstance(event, events.Moved) and event.after in (State.CONSUMED, State.FAILED):
            missing.discard(of[event.trajectory])

    run.controller.events.listen(listen)
    task = asyncio.create_task(run.controller.run())
    async with asyncio.timeout(100):
        while missing and not task.done():
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # groups are counted when their last member has ended
    run.controller.interrupt()
    await task
    assert run.violations == []
    for how, (end, said) in HOW.items():
        ends = run.ends(how)
        assert set(ends) == {end}, (how, ends)
        assert said in ends[end], (how, ends)
    out = {e.task for e in run.events if isinstance(e, events.Quarantined)}
    assert out == {how for how, (end, _) in HOW.items() if end != "consumed"}
    log = tmp_path / "run" / "logs" / "environment-0.log"
    assert log.stat().st_size < 100e6 and b"output were left out" in log.read_bytes()[-10_000_000:]
    assert set(marked()) <= before, "nothing stays"


async def test_a_worker_that_dies_costs_a_retry_and_comes_back(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    tasks = [{"name": "dies", "environment": MISBEHAVING, "options": {"how": "dies", "mark": str(mark)}}]
    run = ProcessRun(tmp_path / "run", tasks, steps=5)
    await asyncio.wait_for(run.controller.run(), 60)
    assert run.violations == [] and mark.exists()
    assert "ended with exit code 7; it is started again in 1 s" in run.output.getvalue()
    assert set(run.ends("dies")) == {"consumed"}


async def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    before = set(marked())
    tasks = [{"name": "t", "environment": MISBEHAVING, "options": {"how": "leaves_children"}}]
    run = ProcessRun(tmp_path / "run", tasks, steps=100_000)
    task = asyncio.create_task(run.controller.run())
    while len(run.script.batches) < 3:
        await asyncio.sleep(0.05)
    (process,) = run.local.local._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while "it is started again" not in run.output.getvalue():
            await asyncio.sleep(0.05)
    assert set(marked()) <= before, "its sleeps are gone with it"
    run.controller.interrupt()
    await asyncio.wait_for(task, 30)
    assert set(marked()) <= before


async def test_512_environments_live_on_one_worker(tmp_path: Path) -> None:
    tasks = [{"name": "t", "environment": "tests.misbehaving:Patient", "max_turns": 4}]
    run = ProcessRun(
        tmp_path / "run", tasks, steps=2, rollout={"groups_per_batch": 64, "group_size": 8},
        environments={"max_sessions": 512},
    )  # fmt: skip
    task = asyncio.create_task(run.controller.run())
    most = 0
    while not task.done():
        await asyncio.sleep(0.02)
        link = (
            run.controller.switchboard.links.get("environment-0")
            if hasattr(run.controller, "switchboard")
            else None
        )
        most = max(most, link.sessions if link is not None else 0)
    await task
    assert run.violations == [] and most == 512
    assert [row["trajectories"] for row in run.rows] == [512, 512]


async def test_a_task_has_workers_of_its_own_interpreter(tmp_path: Path) -> None:
    """Another environment with a package that this one lacks; what they share comes from this one."""
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    (packages,) = (other / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    (packages / "only_there.py").write_text(
        "import sys\nfrom tests.misbehaving import Misbehaving\n"
        "class There(Misbehaving):\n"
        f"    def good(self):\n        assert sys.prefix == {str(other)!r}\n        return super().good()\n"
    )
    tasks: list[dict[str, Any]] = [
        {"name": "here", "environment": MISBEHAVING},
        {"name": "there", "environment": "only_there:There", "interpreter": str(other / "bin" / "python")},
    ]
    run = ProcessRun(tmp_path / "run", tasks, steps=6)
    check_environments(run.controller.config)
    await asyncio.wait_for(run.controller.run(), 60)
    assert run.violations == []
    assert set(run.ends("here")) == set(run.ends("there")) == {"consumed"}
    tasks[1]["interpreter"] = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="task there: there is no interpreter"):
        check_environments(config_of(tasks=tasks))


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_source_that_fails_wholesale_stops_the_run_with_its_reason(tmp_path: Path, how: str) -> None:
    from rollart.errors import RunError

    tasks = [{"name": "t", "environment": MISBEHAVING, "options": {"how": how}, "step_timeout_s": 0.2}]
    limits = {"retries": 0, "member_refills": 0, "max_failed_groups": 5}
    run = ProcessRun(tmp_path / "run", tasks, rollout=limits)
    with pytest.raises(RunError, match=r"5 groups in a row .* The last failure: t: "):
        await asyncio.wait_for(run.controller.run(), 60)
