"""What a benchmark needs to measure its own process, and to say where and with what it measured."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["measure_turns", "median_s", "percentile", "provenance", "resident_bytes"]

PAGE_BYTES = resource.getpagesize()
LAG_EVERY_S = 0.002
MEMORY_SAMPLES = 8


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median_s(step: Callable[[], object], repeats: int) -> float:
    """The median of a few times, after one that warms up."""
    step()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


class Lag:
    """How late the event loop calls a timer, in seconds, sampled while it is running.

    A loop that is stuck takes no samples: for each that comes late those that would have come meanwhile are filled in,
    so that a percentile is one of time and not of luck.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to sample, on the running loop."""
        self._due = time.perf_counter() + LAG_EVERY_S
        self._timer = asyncio.get_running_loop().call_later(LAG_EVERY_S, self._called)

    def stop(self) -> None:
        """No more samples."""
        if self._timer is not None:
            self._timer.cancel()

    def _called(self) -> None:
        late = max(0.0, time.perf_counter() - self._due)
        while late >= 0:
            self.samples.append(late)
            late -= LAG_EVERY_S
        self.start()


class Usage:
    """Wall time and CPU time of this process since it was made: of all threads, and of the one that asks."""

    def __init__(self) -> None:
        self._wall, self._cpu, self._thread = time.perf_counter(), time.process_time(), time.thread_time()

    @property
    def wall_s(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._wall

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all threads."""
        return time.process_time() - self._cpu

    @property
    def thread_s(self) -> float:
        """CPU seconds of this thread, the event loop's."""
        return time.thread_time() - self._thread


async def measure_turns(
    turns: Callable[[], int], *, warm: int, wanted: int, bytes_per_trajectory: Callable[[], float]
) -> dict[str, object]:
    """The figures of ``wanted`` turns after the first ``warm``, by the count that ``turns`` gives."""

    async def until(count: int) -> None:
        while turns() < count:
            await asyncio.sleep(0.01)

    await until(warm)
    usage, lag, started = Usage(), Lag(), turns()
    lag.start()
    held = []
    for part in range(1, MEMORY_SAMPLES + 1):
        await until(started + wanted * part // MEMORY_SAMPLES)
        held.append(bytes_per_trajectory())
    count, wall_s, cpu_s, thread_s = turns() - started, usage.wall_s, usage.cpu_s, usage.thread_s
    lag.stop()
    return {
        "turns_per_second": count / wall_s,
        "cpu_us_per_turn": cpu_s / count * 1e6,
        "loop_cpu_us_per_turn": thread_s / count * 1e6,
        "loop_lag_p50_ms": percentile(lag.samples, 0.5) * 1e3,
        "loop_lag_p99_ms": percentile(lag.samples, 0.99) * 1e3,
        "loop_lag_max_ms": percentile(lag.samples, 1.0) * 1e3,
        "bytes_per_trajectory": max(held),
    }


def machine() -> dict[str, str | int]:
    """The machine, in what decides speed."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * PAGE_BYTES / 2**30),
        "system": f"{platform.system()} {platform.release()}",
    }


def provenance(*packages: str) -> dict[str, object]:
    """``machine``, ``versions`` of Python and ``packages``, and the ``commit`` of the source."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"machine": machine(), "versions": versions, "commit": _commit()}


def _commit() -> str:
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
