"""EnvManager: one coroutine owns one trajectory and does what it needs next.

Nothing that happens to a trajectory reaches another: failures of environments, engines and rewards are
classified here and become the trajectory's own state.  Only a bug of the controller itself ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from rollart.config import Config
from rollart.controller.llm_proxy import Answer, LLMProxy
from rollart.controller.rewards import RewardClient, RewardError
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.controller.trajectory import Next, Reason, State, Trajectory
from rollart.packing import unpack_ids
from rollart.protocol import Close, FailureKind, Observation, Reset, Role, Step

__all__ = ["EnvManager"]


class EnvManager:
    """The trajectories in flight."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        proxy: LLMProxy,
        rewards: RewardClient,
        *,
        on_sampled: Callable[[Trajectory, Answer], None],
        on_settled: Callable[[Trajectory], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """``on_sampled`` hears each answer before it counts and may end the trajectory; ``on_settled`` hears
        of each trajectory that became SCORED or FAILED; ``on_bug`` of an exception that no one expected."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._config = config
        self._switchboard = switchboard
        self._proxy = proxy
        self._rewards = rewards
        self._on_sampled = on_sampled
        self._on_settled = on_settled
        self._on_bug = on_bug
        self._episodes: dict[int, tuple[Link, str]] = {}
        """Each trajectory's open episode: at which worker, under which name."""
        self._steps: dict[Next, Callable[[Trajectory], Coroutine[None, None, Next]]] = {
            Next.RESET: self._reset,
            Next.GENERATE: self._generate,
            Next.STEP: self._step,
            Next.SCORE: self._score,
        }

    def start(self, trajectory: Trajectory) -> None:
        """Give the PENDING trajectory an owner."""
        task = asyncio.get_running_loop().create_task(
            self._own(trajectory), name=f"trajectory {trajectory.id}"
        )
        self.tasks[trajectory.id] = task

    def stop(self, trajectory: Trajectory) -> None:
        """The trajectory has ended by another's decision: stop its owner, and what it waits for."""
        task = self.tasks.pop(trajectory.id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def drain(self) -> None:
        """Wait until every owner has ended."""
        while self.tasks:
            await asyncio.wait(set(self.tasks.values()))

    async def _own(self, trajectory: Trajectory) -> None:
        try:
            todo = trajectory.begin()
            while todo is not Next.NOTHING:
                todo = await self._steps[todo](trajectory)
            self.tasks.pop(trajectory.id, None)
            if trajectory.state in (State.SCORED, State.FAILED):
                self._on_settled(trajectory)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of a trajectory's owner: a bug here stops the run, named
            self._on_bug(error)
        finally:
            self.tasks.pop(trajectory.id, None)
            self._proxy.forget(trajectory)
            self._leave(trajectory)

    # --- one step each --------------------------------------------------------------------------------

    async def _reset(self, trajectory: Trajectory) -> Next:
        self._leave(trajectory)
        workers = self._switchboard.of(Role.ENVIRONMENT)
        if not workers:
            return trajectory.failed(Reason.ENV_ERROR, "no environment worker is left", retry=False)
        link = min(workers, key=lambda worker: worker.sessions)
        link.sessions += 1
        self._episodes[trajectory.id] = (link, trajectory.session)
        request = Reset(
            self._switchboard.next_seq(),
            trajectory.session,
            trajectory.task,
            trajectory.seed,
            trajectory.kind.value,
        )
        return await self._observe(
            trajectory, link, request, self._config.task(trajectory.task).reset_timeout_s
        )

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
        return await self._observe(
            trajectory, link, request, self._config.task(trajectory.task).step_timeout_s
        )

    async def _score(self, trajectory: Trajectory) -> Next:
        self._leave(trajectory)
        try:
            score = await self._rewards.score(trajectory)
        except RewardError as error:
            return trajectory.failed(Reason.REWARD_ERROR, str(error), retry=False)
        return trajectory.scored(score)

    async def _observe(
        self, trajectory: Trajectory, link: Link, request: Reset | Step, timeout_s: float
    ) -> Next:
        try:
            seen = await self._switchboard.call(link, request, Observation, timeout_s=timeout_s)
            unpack_ids(seen.ids)
        except CallError as error:
            reason = Reason.ENV_TIMEOUT if error.kind is FailureKind.TIMEOUT else Reason.ENV_ERROR
            return trajectory.failed(reason, str(error), retry=error.retry)
        except ValueError as error:
            return trajectory.failed(Reason.ENV_ERROR, f"{link.name}: malformed ids: {error}", retry=True)
        return trajectory.observed(seen.ids, seen.reward, seen.done, seen.info)

    def _leave(self, trajectory: Trajectory) -> None:
        """Close the trajectory's episode, if it has one."""
        link, session = self._episodes.pop(trajectory.id, (None, ""))
        if link is not None:
            link.sessions -= 1
            if link.state is not LinkState.GONE:
                self._switchboard.tell(link, Close(session))
