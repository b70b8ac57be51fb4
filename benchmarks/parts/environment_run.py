"""Runs of ``benchmarks.environments``: the shipping controller and real environment workers; what answers and trains
does so at once, so that the environments are all that takes time."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from benchmarks.parts.report import Row, metrics_of
from benchmarks.parts.stragglers import TURNS
from benchmarks.parts.turns_launch import InstantLauncher, SidePayloads, key_file_of
from benchmarks.parts.turns_shape import ANSWER_TOKENS
from rollart.config import (
    Config,
    Environments,
    Inference,
    Model,
    RandomModel,
    Rollout,
    Sampling,
    Schedule,
    Task,
    Trainer,
    UpdateAt,
)
from rollart.controller.controller import Controller
from rollart.controller.progress import Progress
from rollart.controller.run_context import RunContext
from rollart.controller.run_folder import RunFolder
from rollart.controller.switchboard import Switchboard
from rollart.controller.transport import ZmqTransport
from rollart.launch.local import LocalLauncher, Placement, WorkerExit
from rollart.packing import pack_ids
from rollart.protocol import Close, Observation, Reset, Role, Step
from rollart.random_model import random_vocabulary, vocabulary_size, write_model_folder

__all__ = ["MODES", "batch_seconds", "steps_per_second"]

CONTEXT = 512
WORKERS = 2
GROUPS, SIZE = 8, 8
MODES = {
    "batch-synchronous": (Schedule.SYNC, UpdateAt.PUBLISH, 0, 0, 0),
    "trajectory-level": (Schedule.ROLLART, UpdateAt.PUBLISH, 1, 0, 0),
    "trajectory-level, redundant": (Schedule.ROLLART, UpdateAt.PUBLISH, 1, 2, 2),
}
"""The schedule, when weights are taken, alpha, redundant groups, redundant members."""


class MixedLauncher(InstantLauncher):
    """Environment workers are the real ones."""

    def __init__(self, key_file: Path, path: Path, on_exit: Callable[[WorkerExit], None]) -> None:
        super().__init__(key_file, SidePayloads())
        self._local = LocalLauncher(key_file, path, path, on_exit=on_exit)

    async def start(self, placement: Placement) -> None:
        """Start one worker."""
        await (self._local.start if placement.role == Role.ENVIRONMENT else super().start)(placement)

    async def stop(self, *, grace_s: float) -> None:
        """End all workers."""
        await super().stop(grace_s=grace_s)
        await self._local.stop(grace_s=grace_s)


def _config(task: Task, rollout: Rollout, steps: int, seed: int = 0) -> Config:
    return Config(
        name="benchmark",
        seed=seed,
        steps=steps,
        model=Model(random=RandomModel(max_position_embeddings=CONTEXT)),
        tasks=[task],
        sampling=Sampling(max_tokens=ANSWER_TOKENS),
        rollout=rollout,
        trainer=Trainer(verify_share=0.0),
        inference=Inference(max_model_len=CONTEXT),
        environments=Environments(workers=WORKERS, backoff_s=0.05),
    )


async def batch_seconds(mode: str, steps: int, seed: int) -> Row:
    """A row: seconds a batch of ``GROUPS`` × ``SIZE`` trajectories, of ``steps`` batches after a first."""
    schedule, update_at, alpha, groups, members = MODES[mode]
    rollout = Rollout(
        schedule=schedule, update_at=update_at, staleness_bound=alpha, groups_per_batch=GROUPS, group_size=SIZE,
        redundant_groups=groups, redundant_members=members, retries=20,
    )  # fmt: skip
    task = Task(name="stragglers", environment="benchmarks.parts.stragglers:Stragglers", max_turns=TURNS)
    config = _config(task, rollout, steps + 1, seed)
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as root:
        folder = RunFolder(Path(root) / "run")
        folder.create(config)
        assert config.model.random is not None
        write_model_folder(config.model.random, folder.model)
        transport = ZmqTransport()
        async with key_file_of(transport.peer_file) as key_file:
            await Controller(
                config,
                folder,
                transport,
                launch=lambda on_exit: MixedLauncher(key_file, folder.logs, on_exit),
                progress=Progress(io.StringIO(), config.steps),
                vocabulary_size=vocabulary_size(folder.model),
            ).run()
        rows = metrics_of(folder.path)[1:]
    seconds = sum(row["step_seconds"] for row in rows) / len(rows)
    return {
        "mode": mode,
        "seed": seed,
        "batches": len(rows),
        "batch_seconds": seconds,
        "longest_seconds": max(row["step_seconds"] for row in rows),
        "retried": sum(row.get("trajectories_retried", 0) for row in rows) / len(rows),
        "cut": sum(row["members_cut"] for row in rows) / len(rows),
    }


# --- steps a second -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _one_worker(config: Config) -> AsyncIterator[Switchboard]:
    """A switchboard with one real environment worker."""
    joined = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as root:
        folder = Path(root)
        assert config.model.random is not None
        write_model_folder(config.model.random, folder / "model")
        transport = ZmqTransport()
        async with key_file_of(transport.peer_file) as key_file:
            switchboard = Switchboard(
                transport,
                _welcome(config, folder),
                run=RunContext(write=lambda event: None, bug=_raise),
                on_change=lambda link, reason: joined.set() if link.capacity else None,
            )
            switchboard.start()
            launcher = LocalLauncher(key_file, folder, folder, on_exit=lambda exit: joined.set())
            await launcher.start(Placement("environment-0", "environment", "CPU", {"OMP_NUM_THREADS": "1"}))
            try:
                async with asyncio.timeout(60):
                    await joined.wait()
                if not switchboard.of(Role.ENVIRONMENT):
                    raise RuntimeError(launcher.tail("environment-0"))
                yield switchboard
            finally:
                switchboard.shut_down("measured")
                await launcher.stop(grace_s=3.0)
                await switchboard.close()


def _welcome(config: Config, folder: Path) -> object:
    import msgspec

    from rollart.protocol import Welcome

    encoded = msgspec.msgpack.encode(config)
    return Welcome(encoded, str(folder), str(folder / "model"), str(folder), "", "", 1.0, 30.0)


def _raise(error: BaseException) -> None:
    raise error


async def steps_per_second(
    environment: str, options: dict[str, object], sessions: int, seconds: float
) -> Row:
    """A row: steps of one real worker that holds ``sessions`` episodes, each stepped as soon as it has answered."""
    task = Task(name="steps", environment=environment, options=options, max_turns=100)
    config = _config(task, Rollout(), 1)
    vocabulary = random_vocabulary(RandomModel())
    actions = [pack_ids([vocabulary[letter]]) for letter in "LDRU"]
    count = 0

    async def play(number: int, switchboard: Switchboard, until: float) -> None:
        nonlocal count
        (link,) = switchboard.of(Role.ENVIRONMENT)
        episode = 0
        while time.monotonic() < until:
            session = f"{number}.{episode}"
            reset = Reset(switchboard.next_seq(), session, "steps", number + 1000 * episode, "train")
            await switchboard.call(link, reset, Observation, timeout_s=30.0)
            episode, done = episode + 1, False
            while not done and time.monotonic() < until:
                step = Step(switchboard.next_seq(), session, actions[(number + count) % 4])
                done = (await switchboard.call(link, step, Observation, timeout_s=30.0)).done
                count += 1
            switchboard.tell(link, Close(session))

    async with _one_worker(config) as switchboard:
        (link,) = switchboard.of(Role.ENVIRONMENT)
        process = psutil.Process(link.hello.pid)
        await asyncio.gather(*(play(n, switchboard, time.monotonic() + 0.5) for n in range(sessions)))
        count, started = 0, time.monotonic()
        before = sum(process.cpu_times()[:2])
        await asyncio.gather(*(play(n, switchboard, started + seconds) for n in range(sessions)))
        took, cpu = time.monotonic() - started, sum(process.cpu_times()[:2]) - before
    return {"live": sessions, "steps_per_second": count / took, "steps_per_core_second": count / cpu}
