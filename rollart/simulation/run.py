"""One simulated run: the shipping ``Controller`` on the virtual loop, and everything that is checked about it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rollart.config import Config
from rollart.controller.controller import Controller
from rollart.controller.events import parse_events
from rollart.controller.invariants import Invariants
from rollart.controller.progress import Progress
from rollart.controller.rewards import RewardClient, Rewards
from rollart.errors import InvariantError, RunError
from rollart.launch.local import Placement, WorkerExit
from rollart.protocol import Role
from rollart.simulation import order
from rollart.simulation.engine import BatchingEngine
from rollart.simulation.environment import SimEnvironment
from rollart.simulation.faults import Fault, Injector
from rollart.simulation.functions import FunctionPool, SimFunctions
from rollart.simulation.host import Host, Messages, OnHost, Sharing
from rollart.simulation.inference import SimInference
from rollart.simulation.isolation import Isolation
from rollart.simulation.launcher import SimLauncher
from rollart.simulation.loop import Deadlock, VirtualLoop
from rollart.simulation.network import SimDialer, SimNetwork
from rollart.simulation.output import MemoryJournal, MemoryOutput
from rollart.simulation.rewards import SimBackend, SimRewards
from rollart.simulation.trainer import SimTrainer, StepTime
from rollart.simulation.truth import Truth
from rollart.simulation.wire import WireRules
from rollart.simulation.workload import Family
from rollart.simulation.world import Timings, World
from rollart.workers.worker import Worker

__all__ = ["Result", "Setup", "simulate"]

VOCABULARY = 1 << 24


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated."""

    config: Config
    families: Mapping[str, Family]
    """By the name of the task."""
    timings: Timings
    engine: Callable[[Placement], BatchingEngine]
    """The engine of an inference worker."""
    step_s: StepTime
    """Seconds of a train_step."""
    delay: Callable[[str, int], float]
    """(worker, bytes) → seconds that a message takes."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of what each message's delay is multiplied by."""
    sharing: Sharing | None = None
    """The machine whose cores all workers share; by default each has its own."""
    environment_threads: int | None = None
    """Environments of one worker that act at the same time; by default all."""
    functions: FunctionPool | None = None
    """What serves the rewards; by default as many at once as there are."""


class Result(msgspec.Struct, kw_only=True):
    """What became of it."""

    outcome: str
    """``success``, ``interrupted``, ``error`` (the run failed and said why) or ``broken`` (it never ended, or
    with an exception that is no run's failure)."""
    cause: str
    violations: list[str]
    """Of the invariants: of the event stream, the tokens, the wire, and of what is left at the end."""
    seconds: float
    """Of virtual time."""
    callbacks: int
    transitions: int
    messages: int
    faults: dict[str, int]
    lineage: list[int]
    """The train_steps that the trainer's weights are of at the end."""
    events: bytes
    rows: list[dict[str, Any]]
    """The metrics."""
    workers: list[Any]
    """Every worker that lived, for its statistics."""
    waiting_for: str
    """What the controller was waiting for at the end, as its status line says it."""
    host: Host | None
    """The machine, when it was shared."""
    functions: SimFunctions | None = None
    """What served the rewards, when it was not unlimited."""


class Remains(msgspec.Struct):
    """What outlives a controller that is killed, and its workers."""

    journal: bytes
    events: bytes
    metrics: str
    truth: Truth | None
    checkpoints: dict[str, tuple[int, tuple[int, ...]]]


class _Run:
    """The parts of one run."""

    def __init__(
        self, setup: Setup, seed: int, faults: list[Fault], *, check: bool, before: Remains | None = None
    ) -> None:
        self.setup = setup
        self.resumed = before is not None
        self.truth = before.truth if before is not None else Truth() if check else None
        self.world = World(
            seed,
            setup.families,
            setup.timings,
            truth=self.truth,
            sharing=setup.sharing,
            environment_threads=setup.environment_threads,
        )
        self.messages: Messages | None = None
        if setup.sharing is not None and self.world.host is not None:
            self.messages = Messages(setup.delay, setup.sharing.message_s, self.world.host)
        self.injector = Injector(faults, self.world)
        delay = self.messages or setup.delay
        self.network = SimNetwork(
            delay,
            jitter=partial(self.world.rng("network").lognormvariate, 0.0, setup.jitter)
            if setup.jitter
            else None,
            interfere=self.injector.interfere if faults else None,
        )
        self.wire = WireRules()
        if check:
            self.network.taps.append(self.wire.hear)
        # A large workload's journal would be most of what the simulation holds.
        journal = MemoryJournal(before.journal if before is not None else b"") if check else None
        self.output = MemoryOutput(journal=journal)
        self.invariants = Invariants()
        if before is not None:
            self.output = MemoryOutput(events=before.events, metrics=before.metrics, journal=journal)
            self.world.checkpoints = before.checkpoints
            for event in parse_events(io.BytesIO(before.events), "the killed run"):
                self.invariants.feed(event)
        if journal is not None:
            journal.on_write = self.injector.wrote
        self.isolation = Isolation(
            befell=self.injector.befell.__contains__,
            troubled=self.world.troubled,
            session_of=lambda trajectory: self.controller.rollout.manager.session_of(trajectory),
        )
        self.launcher: SimLauncher
        self.outcome, self.cause = "broken", ""
        self.functions = SimFunctions(setup.functions) if setup.functions is not None else None
        self.controller: Controller

    async def main(self) -> None:
        config = self.setup.config
        self.controller = controller = Controller(
            config,
            self.output,
            self.network,
            launch=self._launch,
            progress=Progress(io.StringIO(), config.steps),
            vocabulary_size=VOCABULARY,
            rewards=self._rewards(),
            unix_time=lambda: 0.0,
            resume=self.resumed,
        )
        controller.events.listen(self.invariants.feed)
        controller.events.listen(self.isolation.feed)
        try:
            self.outcome = str(await controller.run())
        except InvariantError as error:
            self.cause = f"InvariantError: {error}"
        except RunError as error:
            self.outcome, self.cause = "error", str(error)
        except Exception as error:  # whatever else ends a run is what a simulation looks for
            self.cause = f"{type(error).__name__}: {error}"
        finally:
            await self.injector.close()
            if self.messages is not None:
                self.messages.close()

    def remains(self, torn: int) -> Remains:
        """What is left of it when the controller is killed now, ``torn`` bytes before the journal's end."""
        journal = self.output.journal
        assert isinstance(journal, MemoryJournal)
        return Remains(
            journal.content[: len(journal.content) - torn],
            self.output.events,
            self.output.metrics,
            copy.deepcopy(self.truth),
            dict(self.world.checkpoints),
        )

    def violations(self) -> list[str]:
        """Of all that is checked."""
        found = [*self.invariants.violations, *self.wire.violations, *self.isolation.violations]
        return found + list(self.truth.violations if self.truth else []) + list(self.world.violations)

    def _rewards(self) -> Rewards:
        config = self.setup.config
        if not any(task.rewards for task in config.tasks):
            return SimRewards(self.world, self.functions)
        return RewardClient(
            config,
            lambda reward: SimBackend(self.world),
            run_id="simulated",
            bug=lambda error: self.controller.fail(error),
        )

    @property
    def waiting_for(self) -> str:
        """The controller's status line."""
        return self.controller.status

    def _launch(self, on_exit: Callable[[WorkerExit], None]) -> SimLauncher:
        self.launcher = SimLauncher(self.network, self._worker, on_exit)
        self.injector.start(self.network, self.launcher)
        return self.launcher

    def _worker(self, placement: Placement) -> Worker:
        dialer, name, hardware = SimDialer(self.network), placement.name, placement.hardware_class
        self.world.ailments.pop(name, None)  # a new worker has none
        if placement.role == Role.INFERENCE:
            engine = self.setup.engine(placement)
            if self.world.host is not None:
                engine.costs = OnHost(engine.costs, self.world.host)
            return SimInference(dialer, name=name, hardware_class=hardware, world=self.world, engine=engine)
        if placement.role == Role.TRAINER:
            return SimTrainer(
                dialer, name=name, hardware_class=hardware, world=self.world, step_s=self.setup.step_s
            )
        return SimEnvironment(dialer, name=name, hardware_class=hardware, world=self.world)


def simulate(
    setup: Setup,
    *,
    seed: int,
    faults: Sequence[Fault] = (),
    shuffle: bool = False,
    check: bool = True,
    end_at_s: float = 10 * 24 * 3600.0,
) -> Result:
    """Run ``setup`` to its end; the same arguments give the same result, byte for byte.

    ``shuffle`` permutes, by the seed, the tasks that could go on.  ``check`` follows every single
    message and token, which a large workload has too many of; the event stream is always checked.
    """
    lives: list[_Life] = []
    logger = logging.getLogger("rollart")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # what goes wrong here was planted
    try:
        left = list(faults)
        while True:
            before = lives[-1].remains if lives else None
            life = _Life(_Run(setup, seed, left, check=check, before=before))
            lives.append(life)
            rng = random.Random(f"{seed}/shuffle/{len(lives)}") if shuffle else None
            life.live(rng, end_at_s)
            if life.remains is None:
                break
            left = life.run.injector.later(life.seconds)
    finally:
        logger.setLevel(level)
    run = lives[-1].run
    violations = [each for life in lives for each in life.violations]
    if run.outcome == "broken":
        violations.insert(0, f"the run broke: {run.cause}")
    if check and run.outcome == "success":
        violations += order.violations(setup.config, run.output.events, list(run.world.lineage))
    return Result(
        outcome=run.outcome,
        cause=run.cause,
        violations=violations,
        seconds=sum(life.seconds for life in lives),
        callbacks=sum(life.callbacks for life in lives),
        transitions=run.invariants.transitions,
        messages=sum(life.run.network.messages for life in lives),
        faults=dict(sum((life.run.injector.happened for life in lives), Counter())),
        lineage=list(run.world.lineage),
        events=run.output.events,
        rows=[json.loads(line) for line in run.output.metrics.splitlines()],
        workers=[worker for life in lives for worker in life.run.launcher.started],
        waiting_for=run.waiting_for,
        host=run.world.host,
        functions=run.functions,
    )


class _Life:
    """One controller, from its start to its end or its sudden death."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.remains: Remains | None = None
        """Of a controller that was killed."""
        self.violations: list[str] = []
        self.seconds = 0.0
        self.callbacks = 0

    def live(self, shuffle: random.Random | None, end_at_s: float) -> None:
        """Run to the end."""
        run = self.run
        loop = VirtualLoop(shuffle=shuffle, end_at=end_at_s)  # type: ignore[abstract]  # no sockets, no processes

        def kill(torn: int) -> None:
            if self.remains is None:
                self.remains = run.remains(torn)
                self.violations = run.violations()
                self.seconds = loop.time()
                loop.stop()

        run.injector.kill = kill
        main = loop.create_task(run.main())
        main.add_done_callback(lambda _: loop.stop())
        try:
            loop.run_forever()
            if self.remains is None:
                main.result()
                self.violations = _left_over(loop)
        except Deadlock as error:
            run.cause = str(error)
        finally:
            killed = self.remains is not None
            self.callbacks = loop.steps
            if not killed:
                self.seconds = loop.time()
                self.violations += run.violations()
            _abandon(loop, after_s=100.0 if killed else 0.0)
            loop.close()


def _left_over(loop: VirtualLoop) -> list[str]:
    """I9: after the end nothing is left that would still happen, but messages to nobody."""
    tasks = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    left = [f"I9 task {name} is left" for name in tasks]
    callbacks = sorted(callback for callback in loop.waiting() if "SimNetwork" not in callback)
    return left + [f"I9 a timer is left: {callback}" for callback in callbacks]


def _abandon(loop: VirtualLoop, *, after_s: float) -> None:
    """Let go of the tasks of a run that never ended; whatever they still do, nobody looks at it."""
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    loop.call_later(after_s, loop.stop)
    with contextlib.suppress(Deadlock):
        loop.run_forever()
