"""A run of the demo under faults: real workers, and the controller, are killed and frozen while it trains."""

from __future__ import annotations

import contextlib
import enum
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.parts.report import DEMO, metrics_of

__all__ = ["ChaosRun", "Fault", "Planned", "RunFailed", "plan"]

LOOK_S = 0.2
ENGINE = "EngineCore"
"""In the name of vLLM's own process, a child of its inference worker."""
IDLE = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
NOTICE_S = 20.0
"""For the workers to end after their controller."""


class Fault(enum.StrEnum):
    """What is done to whom."""

    KILL_ENVIRONMENT = "kill environment-1"
    FREEZE_ENVIRONMENT = "freeze environment-0"
    KILL_INFERENCE = "kill inference-0"
    FREEZE_INFERENCE = "freeze inference-0"
    KILL_ENGINE = "kill inference-0's engine"
    KILL_TRAINER = "kill trainer-0"
    FREEZE_TRAINER = "freeze trainer-0"
    KILL_CONTROLLER = "kill controller"

    @property
    def victim(self) -> str:
        """The worker's name, or ``controller``."""
        return self.split()[1].removesuffix("'s")

    @property
    def freezes(self) -> bool:
        """SIGSTOP instead of SIGKILL."""
        return self.startswith("freeze")


class Planned(msgspec.Struct):
    """A fault, ``after_s`` after the one before; what is known of it once it was carried out."""

    fault: Fault
    after_s: float
    unix_time: float = 0.0
    """When; 0 where the run ended before."""
    left_over: int = 0
    """Processes of a killed controller's run that were there after ``NOTICE_S``."""


class RunFailed(RuntimeError):
    """The run did not end with success."""


def plan(seed: int, count: int, *, gap_s: float, faults: Sequence[Fault] = tuple(Fault)) -> list[Planned]:
    """``count`` faults, dealt from shuffled decks of ``faults``, at exponential distances of ``gap_s`` in the mean."""
    draw = random.Random(f"chaos/{seed}")
    dealt: list[Fault] = []
    while len(dealt) < count:
        dealt += draw.sample(faults, len(faults))
    return [Planned(fault, draw.expovariate(1 / gap_s)) for fault in dealt[:count]]


class ChaosRun:
    """``python -m rollart.controller`` on the demo's config, resumed as often as it is killed."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder / "run"
        self.log = folder / "output"
        self._frozen: list[psutil.Process] = []
        self._start("run", str(DEMO), f"run_dir={self.folder}", *overrides)

    def _start(self, *arguments: str) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollart.controller", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def steps(self) -> int:
        """Trained so far."""
        return len(metrics_of(self.folder)) if (self.folder / "metrics.jsonl").exists() else 0

    def carry_out(self, faults: Sequence[Planned]) -> None:
        """Wait for the end, with ``faults`` on the way; ``RunFailed`` when it is none of success.

        The first begins to count with the first train_step, since a worker that dies before all serve for the first
        time ends the run.  One whose victim is just being restarted waits for it.
        """
        waiting = list(faults)
        due: float | None = None
        while (code := self.process.poll()) is None:
            time.sleep(LOOK_S)
            if due is None and self.steps and waiting:
                due = time.monotonic() + waiting[0].after_s
            if due is None or time.monotonic() < due or not self._inject(waiting[0]):
                continue
            waiting.pop(0)
            due = time.monotonic() + waiting[0].after_s if waiting else None
        if self.process.wait() != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise RunFailed(f"the run in {self.folder} ended with exit code {code}: {tail}")

    def _inject(self, planned: Planned) -> bool:
        """Carry out a fault; whether its victim was there."""
        fault = planned.fault
        if fault is Fault.KILL_CONTROLLER:
            if not (self.folder / "private" / "peer.json").exists():
                return False  # it is only just starting
            planned.unix_time = time.time()
            planned.left_over = self._kill_controller()
            self._start("--resume", str(self.folder))
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._processes_of(fault):
                process.send_signal(signal.SIGSTOP if fault.freezes else signal.SIGKILL)
                planned.unix_time = time.time()
                if fault.freezes:
                    self._frozen.append(process)
                return True
        return False

    def _processes_of(self, fault: Fault) -> Iterator[psutil.Process]:
        for worker in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = worker.cmdline()
                if fault.victim not in command or worker.status() in IDLE:
                    continue
                if fault is not Fault.KILL_ENGINE:
                    yield worker
                    continue
                for child in worker.children(recursive=True):
                    if ENGINE in " ".join([child.name(), *child.cmdline()]):
                        yield child

    def _kill_controller(self) -> int:
        """SIGKILL; the processes that have not followed it in time, which are killed."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for process in self._frozen:  # who is stopped can't notice
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen.clear()
        _, left = psutil.wait_procs(family, timeout=NOTICE_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)

    def close(self) -> None:
        """End what is still running, and all that it started."""
        if self.process.poll() is None:
            self._kill_controller()
