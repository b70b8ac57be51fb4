"""EnvManager: one coroutine owns one trajectory and does what it needs next.

Nothing that happens to a trajectory reaches another: failures of environments, engines and rewards are
classified here and become the trajectory's own state.  Only a bug of the controller itself ends the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

from rollart.config import Config, Schedule
from rollart.controller.agents import AgentPlayer
from rollart.controller.llm_proxy import Answer, LLMProxy
from rollart.controller.pace import LockStep, OwnPace, Pace
from rollart.controller.rewards import RewardError, Rewards
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.controller.trajectory import Kind, Next, Reason, State, Trajectory
from rollart.controller.warm_pool import Instance, WarmPool
from rollart.packing import ID_BYTES
from rollart.protocol import Close, FailureKind, Observation, Reset, Role, Step

if TYPE_CHECKING:
    from rollart.endpoint.server import Endpoint

__all__ = ["EnvManager"]

EVALUATION_SHARE = 16
"""One in so many of a worker's places, and at least one, is kept for evaluations where there are any."""
STARTS_AT_ONCE = 16
"""Trajectories that get an owner in one turn of the event loop."""
LONGEST_BACKOFF_S = 60.0
FAILURE_WEIGHT = 16
"""Episodes that a failure in a row counts for when a worker is chosen."""


class EnvManager:
    """The trajectories in flight."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        proxy: LLMProxy,
        rewards: Rewards,
        *,
        run: RunContext,
        on_sampled: Callable[[Trajectory, Answer], None],
        on_settled: Callable[[Trajectory], None],
        endpoint: Endpoint | None = None,
    ) -> None:
        """``on_sampled`` hears each answer and may end the trajectory; ``on_settled`` hears
        of each trajectory that became SCORED or FAILED."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._when_owner_ends = self._owner_ended  # one bound method for all
        self._config = config
        self._switchboard = switchboard
        self._proxy = proxy
        self._rewards = rewards
        self._run = run
        self._on_sampled = on_sampled
        self._on_settled = on_settled
        self._agents = AgentPlayer(
            config, switchboard, proxy, endpoint, on_sampled=on_sampled, stop=self.stop
        )
        self._starting: deque[Trajectory] = deque()
        self._episodes: dict[int, tuple[Link, str]] = {}
        """Each trajectory's open episode: at which worker, under which name."""
        self._pace: Pace = LockStep() if config.rollout.schedule is Schedule.SYNC else OwnPace()
        self._pools = {task.name: task.interpreter or "" for task in config.tasks}
        """Which workers hold a task's episodes: those of its interpreter."""
        self._places_wanted: dict[tuple[Kind, str], deque[asyncio.Future[None]]] = {
            (kind, pool): deque()
            for kind in (Kind.EVAL, Kind.TRAIN)
            for pool in sorted(set(self._pools.values()))
        }  # an evaluation may take any place, and comes first
        self._timeouts = {task.name: (task.reset_timeout_s, task.step_timeout_s) for task in config.tasks}
        self._episode_timeouts = {task.name: task.episode_timeout_s for task in config.tasks}
        self._due: dict[int, float] = {}
        """When trajectories of tasks with an ``episode_timeout_s`` are overdue."""
        self.warm = WarmPool(room=self._room, reset=self._reset_warm, close=self._close_episode)
        self._steps: dict[Next, Callable[[Trajectory], Coroutine[None, None, Next]]] = {
            Next.RESET: self._reset,
            Next.GENERATE: self._generate,
            Next.STEP: self._step,
            Next.SCORE: self._score,
        }

    def start(self, trajectory: Trajectory) -> None:
        """Give the PENDING trajectory an owner, soon: a new batch must not keep all others waiting."""
        self._pace.enter(trajectory)
        if not self._starting:
            asyncio.get_running_loop().call_soon(self._start_some)
        self._starting.append(trajectory)

    def _start_some(self) -> None:
        for _ in range(min(STARTS_AT_ONCE, len(self._starting))):
            trajectory = self._starting.popleft()
            if trajectory.state.ended:
                self._pace.leave(trajectory.id)
            else:
                self._give_owner(trajectory)
        if self._starting:
            asyncio.get_running_loop().call_soon(self._start_some)

    def _give_owner(self, trajectory: Trajectory) -> None:
        task = asyncio.get_running_loop().create_task(
            self._own(trajectory), name=f"trajectory {trajectory.id}"
        )
        self.tasks[trajectory.id] = task
        # Not in the owner itself: a task that is cancelled before it begins runs none of its code.
        task.add_done_callback(self._when_owner_ends)

    def session_of(self, trajectory: int) -> str:
        """The name of the episode that the trajectory has now; empty when it has none."""
        return self._episodes[trajectory][1] if trajectory in self._episodes else ""

    def stop(self, trajectory: Trajectory) -> None:
        """The trajectory has ended by another's decision: stop its owner, and what it waits for."""
        task = self.tasks.get(trajectory.id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _owner_ended(self, task: asyncio.Task[None]) -> None:
        id = int(task.get_name().rpartition(" ")[2])  # a closure for each would be a tenth of all they hold
        del self.tasks[id]
        self._due.pop(id, None)
        self._pace.leave(id)

    async def close(self) -> None:
        """Stop every owner, and wait until each has ended."""
        self._starting.clear()
        self.warm.drop()
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def workers_changed(self) -> None:
        """An environment worker came or left: who waits for a place looks again."""
        for waiting in self._places_wanted.values():
            for wanted in waiting:
                if not wanted.done():
                    wanted.set_result(None)
            waiting.clear()

    def _place_left(self, pool: str) -> None:
        """One place is free: the first of those that wait for ``pool`` looks again, and not all of them."""
        for (_, wanted_pool), waiting in self._places_wanted.items():
            while waiting and wanted_pool == pool:
                wanted = waiting.popleft()
                if not wanted.done():
                    wanted.set_result(None)
                    return

    async def _own(self, trajectory: Trajectory) -> None:
        try:
            todo = trajectory.begin()
            while todo is not Next.NOTHING:
                await self._pace.before(trajectory, todo)
                todo = await self._steps[todo](trajectory)
            if trajectory.state in (State.SCORED, State.FAILED):
                self._on_settled(trajectory)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of a trajectory's owner: a bug here stops the run, named
            self._run.bug(error)
        finally:
            self._proxy.forget(trajectory)
            self._leave(trajectory)

    # --- one step each --------------------------------------------------------------------------------

    async def _reset(self, trajectory: Trajectory) -> Next:
        failed_at = self._leave(trajectory)
        if trajectory.attempt:
            backoff_s = self._config.environments.backoff_s * 2 ** (trajectory.attempt - 1)
            await asyncio.sleep(min(backoff_s, LONGEST_BACKOFF_S))
        patience_s = self._episode_timeouts[trajectory.task]
        if patience_s is not None:
            self._due[trajectory.id] = asyncio.get_running_loop().time() + patience_s
        ready = None
        if trajectory.kind is Kind.TRAIN and not trajectory.attempt:
            ready = self.warm.take((trajectory.task, trajectory.seed))
        if ready is not None:
            self._episodes[trajectory.id] = (ready.link, ready.session)
            if ready.link.state is not LinkState.GONE:
                return await self._observe(trajectory, ready.link, ready.observation)
            self._leave(trajectory)
        link = await self._place(trajectory.kind, trajectory.task, failed_at)
        link.sessions += 1
        self._episodes[trajectory.id] = (link, trajectory.session)
        if self._agents.plays(trajectory.task):
            return await self._agents.play(trajectory, link)
        request = Reset(
            self._switchboard.next_seq(),
            trajectory.session,
            trajectory.task,
            trajectory.seed,
            trajectory.kind.value,
        )
        return await self._observe(trajectory, link, self._ask(link, request, trajectory.task))

    async def _place(self, kind: Kind, task: str, failed_at: Link | None) -> Link:
        """The environment worker with the most room; another than ``failed_at`` if there is one.

        Some places are for evaluations only: training trajectories keep theirs while they wait for the version
        after the next train_step, and that step may wait for an evaluation.

        A worker whose requests fail counts as busier with each failure in a row, so that one that fails at
        once does not draw every episode.
        """
        while True:
            free = self._free(kind, task)
            elsewhere = [worker for worker in free if worker is not failed_at]
            if free:
                return min(elsewhere or free, key=lambda w: w.sessions + FAILURE_WEIGHT * w.failures_in_a_row)
            if self.warm.drop():  # nobody waits for what nobody needs yet
                continue
            wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._places_wanted[kind, self._pools[task]].append(wanted)
            try:
                await wanted
            except asyncio.CancelledError:
                if not wanted.cancelled():  # it was told of a place that another can take now
                    self._place_left(self._pools[task])
                raise

    def _free(self, kind: Kind, task: str) -> list[Link]:
        """The workers that hold episodes of ``task`` and have a place for one more."""
        return [
            worker
            for worker in self._switchboard.of(Role.ENVIRONMENT)
            if worker.sessions < self._places(worker, kind) and (not worker.tasks or task in worker.tasks)
        ]

    def _room(self, task: str) -> Link | None:
        """For an episode that nobody waits for yet."""
        free = self._free(Kind.TRAIN, task)
        return min(free, key=lambda w: w.sessions + FAILURE_WEIGHT * w.failures_in_a_row, default=None)

    async def _reset_warm(self, link: Link, session: str, instance: Instance) -> Observation:
        task, seed = instance
        request = Reset(self._switchboard.next_seq(), session, task, seed, Kind.TRAIN.value)
        return await self._ask(link, request, task)

    def _places(self, worker: Link, kind: Kind) -> int:
        """How many episodes may be on ``worker`` when one of ``kind`` joins them."""
        if kind is Kind.EVAL or not self._config.evaluation.episodes:
            return worker.capacity
        return worker.capacity - max(1, worker.capacity // EVALUATION_SHARE)

    async def _generate(self, trajectory: Trajectory) -> Next:
        try:
            answer = await self._proxy.generate(trajectory)
        except CallError as error:
            return trajectory.failed(Reason.GENERATION_ERROR, str(error), retry=error.retry)
        generated = answer.generated
        todo = trajectory.generated(generated.ids, generated.logprobs, generated.versions)
        self._on_sampled(trajectory, answer)
        return Next.NOTHING if trajectory.state.ended else todo

    async def _step(self, trajectory: Trajectory) -> Next:
        link, session = self._episodes[trajectory.id]
        request = Step(self._switchboard.next_seq(), session, trajectory.answer)
        return await self._observe(trajectory, link, self._ask(link, request, trajectory.task))

    async def _score(self, trajectory: Trajectory) -> Next:
        self._leave(trajectory)
        try:
            score = await self._rewards.score(trajectory)
        except RewardError as error:
            return trajectory.failed(error.reason, str(error), retry=False)
        return trajectory.scored(score)

    def _ask(self, link: Link, request: Reset | Step, task: str) -> Coroutine[None, None, Observation]:
        timeout_s = self._timeouts[task][isinstance(request, Step)]
        return self._switchboard.call(link, request, Observation, timeout_s=timeout_s)

    async def _observe(self, trajectory: Trajectory, link: Link, observation: Awaitable[Observation]) -> Next:
        try:
            seen = await observation
        except CallError as error:
            link.failures_in_a_row += error.retry
            reason = Reason.ENV_TIMEOUT if error.kind is FailureKind.TIMEOUT else Reason.ENV_ERROR
            return trajectory.failed(reason, str(error), retry=error.retry)
        if len(seen.ids) % ID_BYTES:
            link.failures_in_a_row += 1
            return trajectory.failed(
                Reason.ENV_ERROR, f"{link.name}: {len(seen.ids)} bytes are no ids", retry=True
            )
        link.failures_in_a_row = 0
        if trajectory.record is not None:
            trajectory.record.observed(seen)
        due = self._due.get(trajectory.id)
        overdue = due is not None and asyncio.get_running_loop().time() > due
        return trajectory.observed(seen.ids, seen.reward, seen.done, seen.info, overdue=overdue)

    def _leave(self, trajectory: Trajectory) -> Link | None:
        """Close the trajectory's episode, if it has one; the worker that held it."""
        link, session = self._episodes.pop(trajectory.id, (None, ""))
        if link is not None:
            self._close_episode(link, session)
        return link

    def _close_episode(self, link: Link, session: str) -> None:
        link.sessions -= 1
        if link.state is not LinkState.GONE:
            self._switchboard.tell(link, Close(session))
        for pool in {self._pools[task] for task in link.tasks} or set(self._pools.values()):
            self._place_left(pool)
