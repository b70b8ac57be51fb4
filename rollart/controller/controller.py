"""Controller: one asyncio process that runs a training run from its first worker to its last file.

It wires the parts together, starts the workers, waits for the first cause that ends the run (success, an
error, a person) and then ends everything in order: no process, socket or shared-memory block outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rollart import __version__
from rollart.config import Config
from rollart.config.rewards import LOCAL
from rollart.controller import events
from rollart.controller.cluster_calls import ClusterCalls
from rollart.controller.journal import Journal
from rollart.controller.llm_proxy import LLMProxy
from rollart.controller.losses import Losses
from rollart.controller.metrics import Metrics
from rollart.controller.progress import Progress
from rollart.controller.resource_manager import ResourceManager
from rollart.controller.restarts import Restarts
from rollart.controller.reward_backends import backends
from rollart.controller.rewards import OwnRewards, RewardClient, Rewards
from rollart.controller.rollout import Rollout
from rollart.controller.run_context import RunContext
from rollart.controller.run_folder import RunOutput
from rollart.controller.staleness import Versions, bound_of
from rollart.controller.switchboard import Link, LinkState, Switchboard
from rollart.controller.trainer_line import TrainerLine
from rollart.controller.training_loop import TrainingLoop
from rollart.controller.trajectory import Reason
from rollart.controller.transport import Transport
from rollart.controller.weight_sync import WeightSync, canary_prompt
from rollart.declare import Cluster
from rollart.errors import ConfigError, RunError
from rollart.launch.local import Placement, WorkerExit
from rollart.protocol import Role, Welcome

if TYPE_CHECKING:
    from rollart.endpoint.server import Endpoint

__all__ = ["Controller", "Launcher", "Outcome"]

logger = logging.getLogger(__name__)

SALVAGE_PATIENCE_S = 3.0
SHUTDOWN_GRACE_S = 3.0
STATUS_EVERY_S = 0.5
RESTART_PATIENCE_S = 1.0
"""For the end of the process of a worker that is lost, which then is started again."""


class Outcome(enum.StrEnum):
    """How a run ended."""

    SUCCESS = "success"
    INTERRUPTED = "interrupted"
    ERROR = "error"


class Launcher(Protocol):
    """Starts workers somewhere."""

    async def start(self, placement: Placement) -> None:
        """Start one worker."""

    async def stop(self, *, grace_s: float) -> None:
        """End all workers, within about twice ``grace_s``."""

    def kill(self) -> None:
        """End all workers at once."""

    def end(self, name: str) -> None:
        """End one worker at once, if this launcher started it and it lives."""

    def tail(self, name: str) -> str:
        """What a worker's log says last."""


class FunctionsAddress(Protocol):
    """Where the local function host is."""

    token: str
    """What it wants to be told by whoever calls."""

    @property
    def address(self) -> str:
        """``http://HOST:PORT``, as it is now: a host that is started again has another."""


class Controller:
    """One run.

    ``await Controller(...).run()`` in a script of your own does what ``python -m rollart.controller`` does.
    """

    def __init__(
        self,
        config: Config,
        folder: RunOutput,
        transport: Transport,
        *,
        launch: Callable[[Callable[[WorkerExit], None]], Launcher],
        progress: Progress,
        vocabulary_size: int,
        rewards: Rewards | None = None,
        store_master: str = "",
        functions: FunctionsAddress | None = None,
        unix_time: Callable[[], float] = time.time,
        clusters: Sequence[Cluster] = (),
        resume: bool = False,
        loop_lag: Callable[[], float] | None = None,
    ) -> None:
        """``folder`` is created; ``launch(on_exit)`` makes the launcher of the workers; ``vocabulary_size``
        is the model's; ``rewards`` scores trajectories, by default as the tasks' ``reward`` sections say;
        ``store_master`` is the Mooncake master's address, where weights travel through one; ``functions`` is
        the function host, where a reward is ``local``; ``clusters`` are bound to the run's workers when those
        serve; ``resume``: the run in ``folder`` goes on, from its journal;
        ``loop_lag`` is ``LoopWatch.take_lag``, for the metrics."""
        self.config = config
        self.folder = folder
        self.model_dir = Path(config.model.path).absolute() if config.model.path else folder.model
        self._transport = transport
        self._launch = launch
        self._progress = progress
        self._vocabulary_size = vocabulary_size
        local = [task.name for task in config.tasks for reward in task.rewards if reward.where == LOCAL]
        if local and functions is None and rewards is None:
            raise ConfigError(
                f"task {local[0]}: its reward is local, and there is no function host (functions=)"
            )
        self._own_rewards = rewards
        self._functions = functions
        self._rewards: Rewards
        self._store_master = store_master
        self._unix_time = unix_time
        self._clusters = clusters
        self._resume = resume
        self._loop_lag = loop_lag
        self.events = events.EventLog(folder.open_events(more=resume), more=resume)
        self.journal = Journal(folder.journal, before_batch=self.events.flush)
        self.versions = Versions()
        self.loop: TrainingLoop | None = None
        self.endpoint: Endpoint | None = None
        """Where agents call, if any task has one."""
        self._end: asyncio.Future[Outcome]
        self._joined: asyncio.Event

    async def run(self) -> Outcome:
        """The whole run; ``RunError`` with the first cause when it fails."""
        self._wire(asyncio.get_running_loop())
        outcome, cause = Outcome.ERROR, "the controller failed"
        main = asyncio.ensure_future(self._main())
        try:
            waited: set[asyncio.Future[Any]] = {main, self._end}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._losses.pending:  # main may have failed too, but the lost worker is the cause
                await asyncio.wait({self._end})
            if self._end.done():
                outcome = self._end.result()
            else:
                main.result()
                outcome = Outcome.SUCCESS
            cause = ""
            return outcome
        except BaseException as error:
            cause = str(error) or type(error).__name__
            raise
        finally:
            main.cancel()
            await asyncio.wait({main})
            await self._shut_down(outcome, cause)

    def interrupt(self) -> None:
        """End the run in order, as a person's Ctrl-C does; the second call ends the workers at once."""
        if not self._end.done():
            self._end.set_result(Outcome.INTERRUPTED)
            self._progress.say("stopping; press Ctrl-C again to stop at once")
        else:
            self._launcher.kill()

    def fail(self, error: BaseException) -> None:
        """End the run with ``error`` as its cause; the first one counts."""
        logger.error("failure: %s", error, exc_info=error)
        if self._end.done() or self._losses.pending:
            return
        self._end_with(error)

    def _end_with(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)
            self._progress.say(f"the run fails: {error}")

    # --- start ----------------------------------------------------------------------------------------

    def _wire(self, loop: asyncio.AbstractEventLoop) -> None:
        config = self.config
        self._end = loop.create_future()
        self._joined = asyncio.Event()
        self._context = RunContext(write=self.events.write, bug=self.fail, began_s=self.events.last_s)
        self.metrics = Metrics(self._context.clock, refusals=self._refusals, loop_lag=self._loop_lag)
        self.events.listen(self.metrics.listen)
        self.events.listen(self._on_quarantined, events.Quarantined)
        self.events.listen(lambda event: self._restarts.serves(event.worker), events.Swapped)
        self._launcher = self._launch(self._on_exit)
        most = {
            Role.INFERENCE: config.inference.restarts,
            Role.TRAINER: config.trainer.restarts,
            Role.ENVIRONMENT: config.environments.restarts,
        }
        self._restarts = Restarts(
            most=lambda placement: most[Role(placement.role)],
            start=self._launcher.start,
            end=self._launcher.end,
            gave_up=self._remove,
            say=self._progress.say,
            patience_s=config.start_timeout_s,
        )
        self._missing_soon: set[asyncio.TimerHandle] = set()
        schedule = config.rollout.schedule
        bound = bound_of(schedule, config.rollout.staleness_bound, config.rollout.update_at)
        self._rewards = self._own_rewards or self._make_rewards()
        self._losses = Losses(fail=self._end_with, tail=self._launcher.tail)
        self.switchboard = Switchboard(
            self._transport,
            self._welcome(),
            run=self._context,
            on_change=self._on_link,
            on_leaving=lambda link: self.proxy.close_worker(link.name),
        )
        self.resources = ResourceManager(config)
        self.proxy = LLMProxy(
            self.switchboard,
            config,
            lowest_version=lambda: bound.floor(self.versions),
            resources=self.resources,
            run=self._context,
        )
        self.endpoint = self._make_endpoint()
        self.trainer = TrainerLine(
            config, self.switchboard, self.journal, run=self._context, say=self._progress.say
        )
        self.rollout = Rollout(
            config,
            self.switchboard,
            self.proxy,
            self.versions,
            bound,
            rewards=self._rewards,
            run=self._context,
            metrics=self.metrics,
            journal=self.journal,
            endpoint=self.endpoint,
        )
        self.sync = WeightSync(
            config,
            self.switchboard,
            self.proxy,
            self.versions,
            canary=canary_prompt(self._vocabulary_size, config.inference.max_model_len),
            run=self._context,
            trainer=self.trainer,
            on_serving=self.rollout.review,
        )
        self._bound = bound
        if self._resume:
            self._take_up()
            return
        self.journal.begin(self.rollout.source.state())
        self.events.write(
            events.Started(
                0.0,
                self._unix_time(),
                __version__,
                config.name,
                bound.alpha,
                bound.update_at,
                config.rollout.groups_per_batch,
                schedule,
            )
        )

    def _take_up(self) -> None:
        """Go on with the run that is in the journal."""
        torn = self.journal.resume()
        ledger = self.journal.ledger
        self.versions.n = self.versions.m = ledger.version
        behind = f" ({torn} bytes at the end of the journal were no whole record)" if torn else ""

        def tell(kept: list[events.KeptTrajectory]) -> None:
            self.events.write(
                events.Resumed(self._context.clock(), self._unix_time(), ledger.step, ledger.version, kept)
            )
            self._progress.say(
                f"resuming at step {ledger.step}, version {ledger.version}, with {len(ledger.groups)} open groups "
                f"and {len(kept)} scored trajectories{behind}"
            )

        self.rollout.restore(tell)

    def _make_rewards(self) -> Rewards:
        if not any(task.rewards for task in self.config.tasks):
            return OwnRewards()
        host = self._functions
        make = backends(
            local=lambda: host.address if host is not None else "",
            local_token=host.token if host is not None else "",
        )
        run_id = self.folder.store.name if self.folder.store is not None else self.config.name
        return RewardClient(self.config, make, run_id=run_id, bug=self.fail)

    def _make_endpoint(self) -> Endpoint | None:
        if not any(task.is_agent for task in self.config.tasks):
            return None
        from rollart.endpoint.server import Endpoint  # its packages are wanted only here

        return Endpoint(self.config, self.model_dir, bug=self._context.bug, unix_time=self._unix_time)

    def _welcome(self) -> Welcome:
        config = self.config
        return Welcome(
            config=msgspec.msgpack.encode(config),
            run_dir=str(self.folder.path),
            model_dir=str(self.model_dir),
            store_dir=str(self.folder.store),
            store_master=self._store_master,
            store_run=self.folder.store.name if self.folder.store is not None else "",
            heartbeat_s=config.heartbeat_s,
            controller_timeout_s=config.heartbeat_timeout_s,
        )

    async def _main(self) -> None:
        self.switchboard.start()
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        beside = [
            asyncio.ensure_future(self._beside(work)) for work in (self._show_status(), self.proxy.adapt())
        ]
        try:
            if self.endpoint is not None:
                await self.endpoint.start()
                self._progress.say(f"agents call {self.endpoint.base_url}")
            await self._start_workers()
            timeout_s = self.config.inference.generate_timeout_s
            calls = ClusterCalls(self.switchboard, self.proxy, self._context, timeout_s=timeout_s)
            for cluster in self._clusters:
                cluster.bind(calls)
            self.loop = TrainingLoop(
                self.config,
                self.folder,
                self.switchboard,
                self.rollout,
                self.sync,
                self.versions,
                self._bound,
                self.trainer,
                self.journal,
                resumed=self._resume,
                run=self._context,
                metrics=self.metrics,
                progress=self._progress,
            )
            await self.loop.run()
        finally:
            for cluster in self._clusters:
                cluster.bind(None)
            for work in beside:
                work.cancel()

    async def _start_workers(self) -> None:
        """Start all workers and wait until each serves."""
        placements = self.resources.placements()
        self._progress.say(f"starting {len(placements)} workers; run folder {self.folder.path}")
        bound = self._bound
        most = "is not bounded" if bound.max_train_lag is None else f"is at most {bound.max_train_lag}"
        self._progress.say(f"staleness_bound {bound.alpha}, update_at {bound.update_at}: train_lag {most}")
        self._restarts.know(placements)
        for placement in placements:
            await self._launcher.start(placement)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                while missing := self._missing(placements):
                    self._joined.clear()
                    await self._joined.wait()
            await self.trainer.link()  # a resumed run's has train_steps to make again
            async with asyncio.timeout(self.config.start_timeout_s):
                await self.sync.publish(self.versions.n)
                await self.sync.wait_for_serving(self.config.inference.workers)
        except TimeoutError:
            waits = ", ".join(missing) or "the first weights"
            raise RunError(
                f"the workers were not ready within start_timeout_s={self.config.start_timeout_s:g}: "
                f"still waiting for {waits}; see {self.folder.logs}"
            ) from None
        for link in self.switchboard.links.values():
            facts = ", ".join(f"{key} {value}" for key, value in link.facts.items())
            self._progress.say(f"ready after {self._context.clock():.0f} s: {link.name} ({facts})")

    def _missing(self, placements: list[Placement]) -> list[str]:
        ready = {link.name for role in Role for link in self.switchboard.of(role)}
        return [placement.name for placement in placements if placement.name not in ready]

    # --- what happens to workers ----------------------------------------------------------------------

    def _on_link(self, link: Link, reason: str) -> None:
        self.events.write(
            events.WorkerChanged(
                self._context.clock(), link.name, link.role, link.state, reason, link.hello.hardware_class
            )
        )
        self._joined.set()
        if link.role is Role.INFERENCE:
            ready = link.state is LinkState.READY
            self.resources.changed(link.name, link.hello.hardware_class, ready=ready)
        if link.state is LinkState.GONE:
            self._on_loss(link, reason)
        elif link.state is LinkState.READY:
            self._restarts.joined(link.name)
            if link.role is Role.INFERENCE:
                self.sync.join(link)
            else:
                self._restarts.serves(link.name)
                if link.role is Role.TRAINER:
                    self.trainer.joined(link)
        if link.role is Role.ENVIRONMENT:
            self.rollout.manager.workers_changed()

    @property
    def _starts_anew(self) -> bool:
        """A worker that dies now dies of a mistake in the config, mostly: with it, another one would die as well.

        What is resumed has run before.
        """
        return self.loop is None and not self._resume

    def _on_loss(self, link: Link, reason: str) -> None:
        if self._end.done():
            return
        logger.warning("worker %s is gone: %s", link.name, reason)
        if self._starts_anew:
            self._losses.fatal(link.name, f"{link.name} is lost while the run starts: {reason}")
        else:
            self._progress.say(f"{link.role} worker {link.name} is lost: {reason}")
            self._restarts.lost(link.name, reason)
            loop = asyncio.get_running_loop()
            # Its process may be seen to end a moment later, and then it is started again.
            self._missing_soon = {timer for timer in self._missing_soon if timer.when() > loop.time()}
            self._missing_soon.add(
                loop.call_later(RESTART_PATIENCE_S, self._miss, link.role, link.name, reason)
            )
        if link.role is Role.INFERENCE:
            self.sync.leave(link)
        elif link.role is Role.TRAINER:
            self.trainer.lost(link)

    def _remove(self, placement: Placement, reason: str) -> None:
        """A worker has failed too often: the run goes on without it, if it can."""
        role = Role(placement.role)
        self.events.write(
            events.WorkerChanged(self._context.clock(), placement.name, role, "removed", reason)
        )
        self._progress.say(
            f"{role} worker {placement.name} is removed, for it fails again and again: {reason}"
        )
        self._miss(role, placement.name, reason)

    def _miss(self, role: Role, name: str, reason: str) -> None:
        """Whether a worker of ``role`` is left, or comes again; the run can't go on otherwise."""
        if self._end.done() or self._restarts.coming(role):
            return
        if role is Role.ENVIRONMENT:
            self._miss_environments(name, reason)
        elif not any(link.role is role for link in self.switchboard.links.values()):
            last = (
                f"the trainer {name}"
                if role is Role.TRAINER
                else f"no {role} worker is left; the last, {name},"
            )
            self._losses.fatal(name, f"{last} is lost: {reason}")

    def _miss_environments(self, name: str, reason: str) -> None:
        """Whether each task has a worker."""
        held = [w.tasks for w in self.switchboard.of(Role.ENVIRONMENT)]
        for task in self.config.tasks:
            if task.name in self.rollout.source.quarantined:
                continue
            if not any(not tasks or task.name in tasks for tasks in held):
                whose = "" if not held else f" for task {task.name}"
                self._losses.fatal(
                    name, f"no environment worker is left{whose}; the last, {name}, is lost: {reason}"
                )
                return

    def _on_quarantined(self, event: events.Quarantined) -> None:
        self._progress.say(f"task {event.task} is taken out, since its groups fail: {event.error}")

    def _on_exit(self, exit: WorkerExit) -> None:
        """A worker's process ended."""
        if self._end.done():
            return
        self._losses.exited(exit)
        if not self._starts_anew:
            self._restarts.ended(exit.placement, str(exit))
        link = self.switchboard.links.get(exit.placement.name)
        if link is not None:
            self.switchboard.lose_soon(link, str(exit))
        elif self._starts_anew:
            self._losses.fatal(exit.placement.name, str(exit))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody awaits: never swallowed."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self.fail(error)
        else:
            logger.error("event loop: %s", context.get("message"))

    # --- the end --------------------------------------------------------------------------------------

    async def _shut_down(self, outcome: Outcome, cause: str) -> None:
        """End everything, in order; whatever one stage fails with, the next ones follow."""
        if not self._end.done():
            self._end.set_result(outcome)
        self._end.exception()  # it is told by whoever waits for run()
        self._losses.cancel()
        await self._restarts.close()
        for timer in self._missing_soon:
            timer.cancel()
        if outcome is not Outcome.SUCCESS and self.loop is not None and self.switchboard.of(Role.TRAINER):
            self._progress.say(await self.loop.salvage(SALVAGE_PATIENCE_S))
        self.journal.freeze()
        with _recorded("ending the trajectories"):
            self.rollout.close(Reason.SHUTDOWN)
            await self.rollout.manager.close()
            await self._rewards.close()
        with _recorded("ending the endpoint"):
            if self.endpoint is not None:
                await self.endpoint.stop()
        with _recorded("ending the training loop"):
            if self.loop is not None:
                await self.loop.close()
            await self.sync.close()
            await self.trainer.close()
        with _recorded("ending the workers"):
            self.switchboard.shut_down(f"the run ended: {outcome}")
            await self._launcher.stop(grace_s=SHUTDOWN_GRACE_S)
            await self.switchboard.close()
        with _recorded("writing the last events"):
            self.events.write(events.Ended(self._context.clock(), outcome, cause))
            self.events.close()
            self.journal.close()
        asyncio.get_running_loop().set_exception_handler(None)
        self.folder.clean()

    # --- for people -----------------------------------------------------------------------------------

    def _refusals(self) -> dict[str, int]:
        return {
            "late_answers": self.switchboard.late_answers,
            "refused_answers": self.proxy.refused_answers,
            "refused_frames": self.switchboard.refused_frames,
            "refused_frames_at_workers": self.switchboard.refused_frames_at_workers,
            "refused_peers": self._transport.refused_peers,
            **(self.endpoint.counts if self.endpoint is not None else {}),
        }

    @property
    def status(self) -> str:
        """What the run does and what it waits for, in one line."""
        if self.loop is None:
            joining = [w.name for w in self.switchboard.links.values() if w.state is LinkState.JOINING]
            return f"{self._context.clock():.0f} s: waiting for {', '.join(joining) or 'workers'}"
        queued = self.proxy.waiting
        # First, since the terminal's width cuts the rest.
        requests = f", {queued} request{'s wait' if queued > 1 else ' waits'} for an engine" if queued else ""
        waits = ""
        if self.loop.doing == "get_batch":
            waits = f": {self.rollout.buffer.waiting_for()}"
        elif self.loop.doing == "evaluation":
            waits = f": {self.rollout.evaluation.waiting_for()}"
        return f"{self.loop.doing}{requests}{waits}"

    async def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        """What goes on beside the run until its end: a bug in it stops the run, named."""
        try:
            await work
        except Exception as error:  # the boundary of such a task
            self.fail(error)

    async def _show_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            self.events.flush()
            if self._progress.live:
                self._progress.status(self.status)


@contextlib.contextmanager
def _recorded(stage: str) -> Iterator[None]:
    """The boundary of a stage of the shutdown: the run's own cause stays the one that is told."""
    try:
        yield
    except Exception:
        logger.exception("%s failed", stage)
