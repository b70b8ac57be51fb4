"""The turns exchange by the shipping controller: one row of ``benchmarks.controller``."""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from pathlib import Path

from benchmarks.parts import turns
from benchmarks.parts.measure import measure_turns, resident_bytes
from benchmarks.parts.turns_launch import InstantLauncher, SidePayloads, key_file_of
from rollart.controller import events
from rollart.controller.collector import collecting_rarely
from rollart.controller.controller import Controller
from rollart.controller.progress import Progress
from rollart.controller.run_folder import RunFolder
from rollart.controller.trajectory import Trajectory
from rollart.controller.transport import ZmqTransport
from rollart.random_model import vocabulary_size, write_model_folder

__all__ = ["measure"]

CANCELS = 1000


class _Counts:
    """Turns, and how long suspends took, heard from the event stream."""

    def __init__(self) -> None:
        self.turns = 0
        self.bytes_before = 0
        """Resident when the first trajectory was made."""
        self.suspends: list[float] = []

    def listen(self, event: events.Event) -> None:
        if type(event) is events.Sampled:
            self.turns += 1
        elif type(event) is events.Dispatched and not self.bytes_before:
            self.bytes_before = resident_bytes()
        elif type(event) is events.Swapped and event.before >= 0:
            self.suspends.append(event.suspend_s)


async def measure(live: int, *, turns_wanted: int, side: SidePayloads) -> dict[str, object]:
    """A row: ``turns_wanted`` turns with about ``live`` trajectories in flight."""
    config = turns.turns_config(live)
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as root:
        folder = RunFolder(Path(root) / "run")
        folder.create(config)
        assert config.model.random is not None
        write_model_folder(config.model.random, folder.model)
        transport = ZmqTransport()
        async with key_file_of(transport.peer_file) as key_file:
            controller = Controller(
                config,
                folder,
                transport,
                launch=lambda on_exit: InstantLauncher(key_file, side),
                progress=Progress(io.StringIO(), config.steps),
                vocabulary_size=vocabulary_size(folder.model),
            )
            counts = _Counts()
            controller.events.listen(counts.listen)
            with collecting_rarely():
                run = asyncio.ensure_future(controller.run())
                watch = asyncio.ensure_future(_watch(controller, counts, live, turns_wanted))
                await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not watch.done():
                watch.cancel()
                run.result()
                raise RuntimeError("the run ended before it was measured")
            controller.interrupt()
            await run
        return watch.result()


async def _watch(controller: Controller, counts: _Counts, live: int, turns_wanted: int) -> dict[str, object]:
    row = await measure_turns(
        lambda: counts.turns,
        warm=live,
        wanted=turns_wanted,
        bytes_per_trajectory=lambda: _bytes_per_trajectory(controller, counts),
    )
    cancel_s = await _cancel(controller)
    return {
        **row,
        "suspend_max_ms": max(counts.suspends, default=0.0) * 1e3,
        "suspends": len(counts.suspends),
        "cancel_s": cancel_s,
    }


def _live(controller: Controller) -> list[Trajectory]:
    """Every trajectory that has not ended, in the buffer or in training."""
    groups = [*controller.rollout.buffer.groups.values(), *controller.rollout.in_training]
    return [t for group in groups for t in (*group.in_flight.values(), *group.scored)]


def _bytes_per_trajectory(controller: Controller, counts: _Counts) -> float:
    """Resident memory beyond what the process had before the run, and beyond the tokens."""
    live = _live(controller)
    tokens = sum(len(t.ids) + len(t.mask) + len(t.logprobs) for t in live)
    return (resident_bytes() - counts.bytes_before - tokens) / len(live)


async def _cancel(controller: Controller) -> float:
    """Seconds until ``CANCELS`` trajectories in flight have ended, owners and places at workers included."""
    chosen = [t for t in _live(controller) if t.id in controller.rollout.manager.tasks][:CANCELS]
    started = time.perf_counter()
    controller.rollout.cancel(chosen)
    while any(t.id in controller.rollout.manager.tasks for t in chosen):
        await asyncio.sleep(0)
    return time.perf_counter() - started
