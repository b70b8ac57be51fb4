"""AgentPlayer: an agent's whole episode, from its start at an environment worker to its score.

What an environment's trajectory does turn by turn, an agent decides by itself: it runs at the worker and calls the
endpoint, and each call is a turn.  All else is the same: states, groups, redundancy and the staleness bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollart.config import Config
from rollart.controller.llm_proxy import Answer, LLMProxy
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trajectory import Next, Reason, State, Trajectory
from rollart.protocol import FailureKind, Play, Played

if TYPE_CHECKING:
    from rollart.endpoint.server import Endpoint
    from rollart.endpoint.session import Session

__all__ = ["AgentPlayer"]

logger = logging.getLogger(__name__)

EPISODE_TIMEOUT_S = 600.0


class AgentPlayer:
    """Plays the trajectories of the tasks that have an agent."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        proxy: LLMProxy,
        endpoint: Endpoint | None,
        *,
        on_sampled: Callable[[Trajectory, Answer], None],
        stop: Callable[[Trajectory], None],
    ) -> None:
        """``on_sampled`` hears each answer and may end the trajectory; ``stop`` stops a trajectory's owner."""
        self._timeouts = {
            task.name: task.episode_timeout_s or EPISODE_TIMEOUT_S for task in config.tasks if task.is_agent
        }
        self._switchboard = switchboard
        self._proxy = proxy
        self._endpoint = endpoint
        self._on_sampled = on_sampled
        self._stop = stop

    def plays(self, task: str) -> bool:
        """Whether the task has an agent."""
        return task in self._timeouts

    async def play(self, trajectory: Trajectory, link: Link) -> Next:
        """One attempt, at the worker ``link``."""
        endpoint = self._endpoint
        if endpoint is None:
            raise RuntimeError(f"task {trajectory.task} has an agent, and this controller has no endpoint")
        session = endpoint.open(trajectory, sample=self._proxy.generate, sampled=self._sampled)
        playing = asyncio.ensure_future(self._play(endpoint, session, link))
        playing.add_done_callback(_seen)
        try:
            waited: set[asyncio.Future[Any]] = {playing, session.broken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            endpoint.close(session, f"the agent of trajectory {trajectory.id} has ended")
            if session.broken.done():
                error = session.broken.result()
                return trajectory.failed(Reason.GENERATION_ERROR, str(error), retry=error.retry)
            return self._ended(session, link, playing)
        finally:
            playing.cancel()
            endpoint.close(session)

    async def _play(self, endpoint: Endpoint, session: Session, link: Link) -> Played:
        trajectory = session.trajectory
        request = Play(
            self._switchboard.next_seq(),
            session.name,
            trajectory.task,
            trajectory.seed,
            trajectory.kind.value,
            endpoint.base_url,
            endpoint.key(session),
            endpoint.model,
        )
        timeout_s = self._timeouts[trajectory.task]
        return await self._switchboard.call(link, request, Played, timeout_s=timeout_s)

    def _ended(self, session: Session, link: Link, playing: asyncio.Future[Played]) -> Next:
        """The agent has ended, or its worker failed."""
        trajectory = session.trajectory
        try:
            played = playing.result()
        except CallError as error:
            # Whoever is told that the episode is too long may give up: it is scored as it is, which is nothing.
            if session.cut and error.kind is FailureKind.DETERMINISTIC and trajectory.turns:
                logger.info("trajectory %d is cut (%s): %s", trajectory.id, session.cut, error)
                played = Played(0, 0.0, {})
            else:
                link.failures_in_a_row += error.retry
                reason = Reason.ENV_TIMEOUT if error.kind is FailureKind.TIMEOUT else Reason.ENV_ERROR
                return trajectory.failed(reason, str(error), retry=error.retry)
        link.failures_in_a_row = 0
        if trajectory.state is State.GENERATING:
            trajectory.withdrawn()
        trajectory.truncated = session.cut
        return trajectory.played(played.reward, played.info)

    def _sampled(self, trajectory: Trajectory, answer: Answer) -> None:
        self._on_sampled(trajectory, answer)
        if trajectory.state.ended:
            self._stop(trajectory)


def _seen(playing: asyncio.Future[Played]) -> None:
    """When the trajectory ended for another reason, nobody looks at how its agent did."""
    if not playing.cancelled():
        playing.exception()
