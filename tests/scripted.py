"""Workers that answer by a script, over real ZeroMQ, in this process.

They test the controller: what they do wrong is planted.  The real engines have tests of their own.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import Config
from rollart.controller.controller import Controller
from rollart.controller.events import Event, read_events
from rollart.controller.invariants import Invariants
from rollart.controller.progress import Progress as Shown
from rollart.controller.run_folder import RunFolder
from rollart.controller.transport import ZmqTransport
from rollart.launch.local import Placement, WorkerExit
from rollart.packing import pack_floats, pack_ids, unpack_ids
from rollart.peer import Peer
from rollart.protocol import (
    Close,
    Collect,
    Done,
    Export,
    Generate,
    Generated,
    Message,
    Observation,
    Progress,
    PruneCheckpoints,
    Publish,
    Published,
    Pull,
    Pulled,
    Ready,
    Reset,
    Resume,
    Role,
    SaveCheckpoint,
    Step,
    Suspend,
    ToWorker,
    Trained,
    TrainGroup,
    TrainPart,
    TrainStep,
    Update,
    Updated,
    VersionRun,
)
from rollart.random_model import vocabulary_size, write_model_folder
from rollart.workers.batch_parts import BatchParts
from rollart.workers.dialer import Dialer, ZmqDialer
from rollart.workers.worker import Deterministic, Worker

MINIMAL = {
    "name": "scripted",
    "steps": 3,
    "model": {"random": {}},
    "tasks": [{"name": "Count", "environment": "tests.scripted:Nothing", "max_turns": 4}],
    "rollout": {"groups_per_batch": 2, "group_size": 2},
    "heartbeat_s": 0.05,
    "heartbeat_timeout_s": 5.0,
    "start_timeout_s": 20.0,
}


def config_of(**changes: object) -> Config:
    """The minimal config with sections changed or replaced."""
    raw: dict[str, object] = dict(MINIMAL.items())
    for key, value in changes.items():
        before = raw.get(key)
        raw[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return msgspec.convert(raw, Config)


class Script:
    """What the scripted workers do; tests change it."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.generate_s: Callable[[], float] = lambda: 0.0
        self.step_s: Callable[[], float] = lambda: 0.0
        self.train_s: Callable[[], float] = lambda: 0.0
        self.turns: Callable[[int], int] = lambda seed: 1 + seed % 3
        self.fail_step: Callable[[Step], Exception | None] = lambda step: None
        self.fail_reset: Callable[[str], Exception | None] = lambda worker: None
        self.fail_setup: Callable[[str], bool] = lambda worker: False
        self.canary: Callable[[str, int], float] = lambda worker, version: -1.0
        self.skip: Callable[[int], str] = lambda step: ""
        self.places = 1000
        self.batches: list[list[TrainGroup]] = []
        self.saved: list[str] = []
        self.pruned: list[tuple[str, int]] = []
        """Up to which checkpoint, and how many stay."""
        """Checkpoints: the name, and how many shall stay."""
        self.lose_after: dict[str, int] = {}
        """Workers that end in the middle of an answer, when they have reported so many tokens of it."""
        self.requests: list[tuple[str, Generate]] = []
        """Each that a worker was given, with its name."""
        self.generated = 0
        self.aborted = 0


class ScriptedInference(Worker):
    role = Role.INFERENCE

    def __init__(self, dialer: Dialer, *, name: str, script: Script, hardware_class: str = "CPU") -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self.script = script
        self.version = -1
        self.pulled = -1
        self.running = asyncio.Event()
        self.released = asyncio.Event()

    async def setup(self) -> Ready:
        if self.script.fail_setup(self.name):
            raise MemoryError("out of memory")
        return Ready(64, {"engine": "scripted"})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        match message:
            case Generate(seq=seq, max_tokens=count, temperature=temperature):
                self.script.requests.append((self.name, message))
                if self.name in self.script.lose_after and count > 1:
                    return await self.end_in_the_middle(seq, self.script.lose_after[self.name])
                return await self.generate(seq, count, temperature)
            case Pull(seq=seq, version=version):
                self.pulled = version
                return Pulled(seq, 0)
            case Suspend(seq=seq):
                self.running.clear()
                self.released.clear()
                return Done(seq)
            case Update(seq=seq, version=version, canary=canary):
                assert not self.running.is_set()
                assert self.pulled == version
                self.version = version
                self.running.set()
                score = self.script.canary(self.name, version)
                return Updated(seq, version, pack_floats([score] * (len(canary) // 4 - 1)), 0.0)
            case Resume(seq=seq):
                self.released.set()
                return Done(seq)
        raise Deterministic(f"unknown request {message}")

    async def end_in_the_middle(self, seq: int, count: int) -> None:
        ids, logprobs = pack_ids(range(10, 10 + count)), pack_floats([-0.5] * count)
        self._say_data.add(Progress(seq, ids, logprobs, [VersionRun(self.version, count)]))
        self._say_data.flush()
        await asyncio.sleep(0.05)
        self.end("the test says so")
        await asyncio.Event().wait()

    async def generate(self, seq: int, count: int, temperature: float) -> Generated:
        assert self.version >= 0
        versions: list[VersionRun] = []
        try:
            for _ in range(count):
                await asyncio.sleep(self.script.generate_s() / count)
                await self.running.wait()
                if versions and versions[-1].version == self.version:
                    versions.append(VersionRun(self.version, versions.pop().count + 1))
                else:
                    versions.append(VersionRun(self.version, 1))
            await self.released.wait()
        except asyncio.CancelledError:
            self.script.aborted += 1
            raise
        self.script.generated += 1
        ids = [self.script.random.randrange(4, 90) for _ in range(count)]
        logprobs = [] if temperature == 0 else [-0.5] * count
        return Generated(seq, pack_ids(ids), pack_floats(logprobs), versions, "length", 0)


class ScriptedTrainer(Worker):
    role = Role.TRAINER

    def __init__(self, dialer: Dialer, *, name: str, script: Script, hardware_class: str = "CPU") -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self.script = script
        self.version = 0
        self.one_at_a_time = asyncio.Lock()
        self.parts = BatchParts()

    async def setup(self) -> Ready:
        return Ready(1, {"trainer": "scripted"})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        async with self.one_at_a_time:
            return await self.carry_out(message, payload)

    async def carry_out(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        match message:
            case TrainPart(seq=seq, step_id=step, first=first):
                self.parts.add(step, first, payload)
                return Done(seq)
            case TrainStep(seq=seq, step_id=step, groups=groups):
                assert message.version == self.version
                await asyncio.sleep(self.script.train_s())
                skipped = self.script.skip(step)
                if not skipped:
                    self.version += 1
                    self.script.batches.append(
                        [
                            msgspec.msgpack.decode(frame, type=TrainGroup)
                            for frame in self.parts.of(step, groups)
                        ]
                    )
                # As the real one: what is not finite is left out.
                metrics = {} if skipped else {"loss": 0.0, "logprob_gap_mean": 0.0}
                return Trained(seq, step, self.version, skipped, metrics)
            case Publish(seq=seq, version=version, canary=canary):
                assert version == self.version
                scores = pack_floats([-1.0] * (len(canary) // 4 - 1))
                return Published(seq, version, f"v{version}", scores, 8, 0.0)
            case Collect(seq=seq) | Export(seq=seq):
                return Done(seq)
            case SaveCheckpoint(seq=seq, path=path):
                Path(path).mkdir()
                self.script.saved.append(Path(path).name)
                return Done(seq)
            case PruneCheckpoints(seq=seq, path=path, keep=keep):
                self.script.pruned.append((Path(path).name, keep))
                return Done(seq)
        raise Deterministic(f"unknown request {message}")


class ScriptedEnvironment(Worker):
    role = Role.ENVIRONMENT

    def __init__(self, dialer: Dialer, *, name: str, script: Script, hardware_class: str = "CPU") -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self.script = script
        self.left: dict[str, int] = {}

    async def setup(self) -> Ready:
        return Ready(self.script.places, {"environments": "scripted"})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        match message:
            case Reset(seq=seq, session=session, seed=seed):
                broken = self.script.fail_reset(self.name)
                if broken is not None:
                    raise broken
                assert len(self.left) < self.script.places
                self.left[session] = self.script.turns(seed)
                return Observation(seq, pack_ids([5, 6, 7]), 0.0, False, {}, "567", "", f"seed {seed}")
            case Step(seq=seq, session=session, action=action):
                error = self.script.fail_step(message)
                if error is not None:
                    raise error
                await asyncio.sleep(self.script.step_s())
                self.left[session] -= 1
                reward = unpack_ids(action)[0] % 2
                done = self.left[session] <= 0
                said = str(unpack_ids(action)[0])
                return Observation(seq, pack_ids([8, 9]), float(reward), done, {}, "89", said)
            case Close(session=session):
                self.left.pop(session, None)
                return None
        raise Deterministic(f"unknown request {message}")


WORKERS = {"inference": ScriptedInference, "trainer": ScriptedTrainer, "environment": ScriptedEnvironment}


class ScriptedLauncher:
    """Runs scripted workers as tasks of this process."""

    def __init__(self, key_file: Path, script: Script, on_exit: Callable[[WorkerExit], None]) -> None:
        self.key_file = key_file
        self.script = script
        self.on_exit = on_exit
        self.workers: dict[str, Worker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, placement: Placement) -> None:
        worker = WORKERS[placement.role](
            ZmqDialer(Peer.read(self.key_file)),
            name=placement.name,
            script=self.script,
            hardware_class=placement.hardware_class,
        )
        self.workers[placement.name] = worker
        self.tasks[placement.name] = asyncio.create_task(self._run(worker, placement))

    async def _run(self, worker: Worker, placement: Placement) -> None:
        code = -9
        try:
            code = await worker.run()
        finally:
            self.on_exit(WorkerExit(placement, code))

    async def stop(self, *, grace_s: float) -> None:
        await asyncio.wait(self.tasks.values(), timeout=grace_s)
        self.kill()

    def end(self, name: str) -> None:
        self.tasks[name].cancel()

    def tail(self, name: str) -> str:
        return f"the log of {name}"

    def kill(self) -> None:
        for task in self.tasks.values():
            task.cancel()


class ScriptedRun:
    """A controller with scripted workers, and what it left."""

    def __init__(self, config: Config, script: Script, path: Path, **options: Any) -> None:
        self.folder = RunFolder(path)
        self.folder.create(config)
        assert config.model.random is not None
        write_model_folder(config.model.random, self.folder.model)
        self.output = io.StringIO()
        self.transport = ZmqTransport()
        self.transport.peer_file.write(self.folder.key_file)
        self.launcher: ScriptedLauncher

        def launch(on_exit: Callable[[WorkerExit], None]) -> ScriptedLauncher:
            self.launcher = ScriptedLauncher(self.folder.key_file, script, on_exit)
            return self.launcher

        self.controller = Controller(
            config,
            self.folder,
            self.transport,
            launch=launch,
            progress=Shown(self.output, config.steps),
            vocabulary_size=vocabulary_size(self.folder.model),
            **options,
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics file, as far as it is written."""
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.folder.events))

    @property
    def violations(self) -> list[str]:
        invariants = Invariants()
        for event in self.events:
            invariants.feed(event)
        return invariants.violations
