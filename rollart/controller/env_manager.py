"""EnvManager: one coroutine owns one trajectory and does what it needs next.

Nothing that happens to a trajectory reaches another: failures of environments, engines and rewards are
classified here and become the trajectory's own state.  Only a bug of the controller itself ends the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from rollart.config import Config, Schedule
from rollart.controller.llm_proxy import Answer, LLMProxy
from rollart.controller.pace import LockStep, OwnPace, Pace
from rollart.controller.rewards import RewardError, Rewards
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.controller.trajectory import Kind, Next, Reason, State, Trajectory
from rollart.packing import ID_BYTES
from rollart.protocol import Close, FailureKind, Observation, Reset, Role, Step

__all__ = ["EnvManager"]

EVALUATION_SHARE = 16
"""One in so many of a worker's places, and at least one, is kept for evaluations where there are any."""
STARTS_AT_ONCE = 16
"""Trajectories that get an owner in one turn of the event loop."""
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
        self._starting: deque[Trajectory] = deque()
        self._episodes: dict[int, tuple[Link, str]] = {}
        """Each trajectory's open episode: at which worker, under which name."""
        self._pace: Pace = LockStep() if config.rollout.schedule is Schedule.SYNC else OwnPace()
        self._places_wanted: dict[Kind, deque[asyncio.Future[None]]] = {kind: deque() for kind in Kind}
        self._timeouts = {task.name: (task.reset_timeout_s, task.step_timeout_s) for task in config.tasks}
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

    def stop(self, trajectory: Trajectory) -> None:
        """The trajectory has ended by another's decision: stop its owner, and what it waits for."""
        task = self.tasks.get(trajectory.id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _owner_ended(self, task: asyncio.Task[None]) -> None:
        id = int(task.get_name().rpartition(" ")[2])  # a closure for each would be a tenth of all they hold
        del self.tasks[id]
        self._pace.leave(id)

    async def close(self) -> None:
        """Stop every owner, and wait until each has ended."""
        self._starting.clear()
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

    def _place_left(self) -> None:
        """One place is free: the first of those that wait looks again, and not all of them."""
        for kind in (Kind.EVAL, Kind.TRAIN):  # an evaluation may take any place
            waiting = self._places_wanted[kind]
            while waiting:
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
        link = await self._place(trajectory.kind, failed_at)
        link.sessions += 1
        self._episodes[trajectory.id] = (link, trajectory.session)
        request = Reset(
            self._switchboard.next_seq(),
            trajectory.session,
            trajectory.task,
            trajectory.seed,
            trajectory.kind.value,
        )
        return await self._observe(trajectory, link, request, self._timeouts[trajectory.task][0])

    async def _place(self, kind: Kind, failed_at: Link | None) -> Link:
        """The environment worker with the most room; another than ``failed_at`` if there is one.

        Some places are for evaluations only: training trajectories keep theirs while they wait for the version
        after the next train_step, and that step may wait for an evaluation.

        A worker whose requests fail counts as busier with each failure in a row, so that one that fails at
        once does not draw every episode.
        """
        while True:
            workers = self._switchboard.of(Role.ENVIRONMENT)
            free = [w for w in workers if w.sessions < self._places(w, kind)]
            elsewhere = [worker for worker in free if worker is not failed_at]
            if free:
                return min(elsewhere or free, key=lambda w: w.sessions + FAILURE_WEIGHT * w.failures_in_a_row)
            wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._places_wanted[kind].append(wanted)
            try:
                await wanted
            except asyncio.CancelledError:
                if not wanted.cancelled():  # it was told of a place that another can take now
                    self._place_left()
                raise

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
        return await self._observe(trajectory, link, request, self._timeouts[trajectory.task][1])

    async def _score(self, trajectory: Trajectory) -> Next:
        self._leave(trajectory)
        try:
            score = await self._rewards.score(trajectory)
        except RewardError as error:
            return trajectory.failed(error.reason, str(error), retry=False)
        return trajectory.scored(score)

    async def _observe(
        self, trajectory: Trajectory, link: Link, request: Reset | Step, timeout_s: float
    ) -> Next:
        try:
            seen = await self._switchboard.call(link, request, Observation, timeout_s=timeout_s)
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
        return trajectory.observed(seen.ids, seen.reward, seen.done, seen.info)

    def _leave(self, trajectory: Trajectory) -> Link | None:
        """Close the trajectory's episode, if it has one; the worker that held it."""
        link, session = self._episodes.pop(trajectory.id, (None, ""))
        if link is not None:
            link.sessions -= 1
            if link.state is not LinkState.GONE:
                self._switchboard.tell(link, Close(session))
            self._place_left()
        return link
