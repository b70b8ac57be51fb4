"""Runs with agents: the real controller, endpoint and environment worker, a real engine, and the real openai client.

Only the trainer is scripted: it keeps what it is given, and its versions are models that the tests know.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from openai import AsyncOpenAI
from transformers import PreTrainedModel

from rollart.config import Config
from rollart.controller import events
from rollart.controller.controller import Controller, Outcome
from rollart.controller.events import Event, read_events
from rollart.controller.invariants import Invariants
from rollart.controller.progress import Progress
from rollart.controller.run_folder import RunFolder
from rollart.controller.transport import ZmqTransport
from rollart.environments import Episode, Score
from rollart.launch.local import Placement, WorkerExit
from rollart.packing import pack_floats, unpack_ids
from rollart.peer import Peer
from rollart.protocol import (
    Generate,
    Generated,
    Message,
    Publish,
    Published,
    Pull,
    Ready,
    ToWorker,
    TrainSample,
    Update,
    Updated,
    VersionRun,
)
from rollart.random_model import vocabulary_size, write_model_folder
from rollart.workers.dialer import Dialer, ZmqDialer
from rollart.workers.environment import EnvironmentWorker
from rollart.workers.worker import Worker
from tests.engines import VOCABULARY, DrivenWorker, logprobs_under, random_model, weights_of
from tests.scripted import Script, ScriptedInference, ScriptedLauncher, ScriptedTrainer

CHARACTERS = "".join(map(chr, range(32, 32 + VOCABULARY - 4)))
"""As many as the engine's model has tokens for."""


@cache
def model_of(version: int) -> PreTrainedModel:
    return random_model(version % 3)


class Versions:
    """What the run calls a version, and what the engine, which other tests use too, calls it."""

    def __init__(self, driven: DrivenWorker) -> None:
        self.driven = driven
        self.manifests: dict[int, tuple[int, str]] = {}
        self.of_engine: dict[int, int] = {}

    def publish(self, version: int) -> str:
        stored, manifest = self.driven.publish(weights_of(model_of(version)))
        self.manifests[version] = stored, manifest
        self.of_engine[stored] = version
        return manifest


class EngineInference(Worker):
    """The tests' engine as one of the run's workers."""

    role = ScriptedInference.role

    def __init__(self, dialer: Dialer, *, name: str, versions: Versions) -> None:
        super().__init__(dialer, name=name)
        self.versions = versions

    async def setup(self) -> Ready:
        return Ready(64, {"engine": "vllm"})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        versions = self.versions
        if isinstance(message, Pull | Update):
            message = msgspec.structs.replace(message, version=versions.manifests[message.version][0])
        answer = await versions.driven.worker.serve(message, payload)
        if isinstance(answer, Updated):
            answer.version = versions.of_engine[answer.version]
        elif isinstance(answer, Generated):
            assert isinstance(message, Generate)
            answer.versions = [VersionRun(versions.of_engine[r.version], r.count) for r in answer.versions]
        return answer


class KnownTrainer(ScriptedTrainer):
    """Publishes the versions' models."""

    versions: Versions

    async def carry_out(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        if isinstance(message, Publish):
            scores = logprobs_under(model_of(message.version), unpack_ids(message.canary), 1)
            manifest = self.versions.publish(message.version)
            return Published(message.seq, message.version, manifest, pack_floats(scores), 8, 0.0)
        return await super().carry_out(message, payload)


class MixedLauncher(ScriptedLauncher):
    """A real environment worker, and with ``versions`` a real engine."""

    versions: Versions | None = None

    async def start(self, placement: Placement) -> None:
        dialer, name = ZmqDialer(Peer.read(self.key_file)), placement.name
        worker: Worker
        if placement.role == "environment":
            worker = EnvironmentWorker(dialer, name=name)
        elif self.versions is None:
            await super().start(placement)
            return
        elif placement.role == "inference":
            worker = EngineInference(dialer, name=name, versions=self.versions)
        else:
            worker = KnownTrainer(dialer, name=name, script=self.script)
            worker.versions = self.versions
        self.workers[name] = worker
        self.tasks[name] = asyncio.create_task(self._run(worker, placement))


Plays = Callable[[Episode], Awaitable[float | Score]]


class Hooks:
    """What the agent of the next run does; an import path leads to it."""

    play: Plays | None = None
    seen: list[Episode] = []


async def agent(episode: Episode) -> float | Score:
    Hooks.seen.append(episode)
    assert Hooks.play is not None
    return await Hooks.play(episode)


def sync_agent(episode: Episode) -> float:
    """As those are who know nothing of asyncio."""
    from openai import OpenAI

    with OpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        said = client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": f"{episode.seed % 9}?"}], max_tokens=3
        )
    return float(len(said.choices[0].message.content or "") % 2)


def client_of(episode: Episode, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, **options)


def agent_config(**changes: Any) -> Config:
    """A run whose task is ``agent``; ``changes`` are sections, and ``task`` of the task."""
    raw: dict[str, Any] = {
        "name": "agents",
        "steps": 2,
        "model": {"random": {"characters": CHARACTERS}},
        "tasks": [
            {
                "name": "Agent",
                "agent": "tests.endpoint_run:agent",
                "max_turns": 6,
                **changes.pop("task", {}),
            }
        ],
        "sampling": {"max_tokens": 8},
        "rollout": {"groups_per_batch": 2, "group_size": 2},
        "heartbeat_s": 0.2,
        "heartbeat_timeout_s": 30.0,
        "start_timeout_s": 60.0,
    }
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if isinstance(raw.get(name), dict) else value
    return msgspec.convert(raw, Config)


class AgentRun:
    """A run under way."""

    def __init__(self, config: Config, path: Path, driven: DrivenWorker | None = None) -> None:
        Hooks.seen = []
        self.config = config
        self.script = Script()
        self.folder = RunFolder(path)
        self.folder.create(config)
        assert config.model.random is not None
        write_model_folder(config.model.random, self.folder.model)
        transport = ZmqTransport()
        transport.peer_file.write(self.folder.key_file)
        self.output = io.StringIO()

        def launch(on_exit: Callable[[WorkerExit], None]) -> ScriptedLauncher:
            launcher = MixedLauncher(self.folder.key_file, self.script, on_exit)
            launcher.versions = Versions(driven) if driven else None
            return launcher

        self.controller = Controller(
            config,
            self.folder,
            transport,
            launch=launch,
            progress=Progress(self.output, config.steps),
            vocabulary_size=vocabulary_size(self.folder.model),
        )

    @property
    def samples(self) -> list[TrainSample]:
        """All that was trained on."""
        return [sample for batch in self.script.batches for group in batch for sample in group.samples]

    @property
    def counts(self) -> dict[str, int]:
        assert self.controller.endpoint is not None
        return dict(self.controller.endpoint.counts)

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.folder.events))

    @property
    def ends(self) -> list[tuple[str, str]]:
        """States and reasons in which trajectories ended."""
        moves = [e for e in self.events if isinstance(e, events.Moved)]
        return [(e.after, e.reason) for e in moves if e.after in ("consumed", "aborted", "failed")]

    def check(self) -> None:
        """The invariants, and that each token has the log-probability of the model that sampled it."""
        invariants = Invariants()
        for event in self.events:
            invariants.feed(event)
        assert invariants.violations == []

    async def run(self, play: Plays | None = None) -> Outcome:
        Hooks.play = play
        return await self.controller.run()

    @contextlib.asynccontextmanager
    async def under_way(self, play: Plays) -> AsyncIterator[asyncio.Task[Outcome]]:
        """While it runs; it is interrupted afterwards."""
        running = asyncio.create_task(self.run(play))
        try:
            yield running
        finally:
            if not running.done():
                self.controller.interrupt()
            await running
