"""A simulated environment worker: the real worker base, episodes drawn from the workload.

An observation's last token says how long the answer to it will be: so a simulated policy needs to know
nothing of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import ClassVar

from rollart.packing import pack_ids
from rollart.protocol import Close, Message, Observation, Ready, Reset, Role, Step, ToWorker
from rollart.simulation.workload import Episode
from rollart.simulation.world import World
from rollart.workers.dialer import Dialer
from rollart.workers.worker import Deterministic, Worker

__all__ = ["SimEnvironment"]

FILLER = pack_ids([1])
NEARLY = 0.98
"""Of a deadline: the messages of a request take time too."""


class SimEnvironment(Worker):
    """Serves ``Reset``, ``Step`` and ``Close``."""

    role: ClassVar[Role] = Role.ENVIRONMENT

    def __init__(self, dialer: Dialer, *, name: str, hardware_class: str, world: World) -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self._world = world
        self.busy_s = 0.0
        """Seconds that environments acted, summed over those that did at the same time."""
        threads = world.environment_threads
        self._threads = None if threads is None else asyncio.Semaphore(threads)
        self._episodes: dict[str, Episode] = {}

    async def setup(self) -> Ready:
        """Be there."""
        await asyncio.sleep(self._world.timings.start_s / 10)
        self._patience = {
            task.name: (task.reset_timeout_s, task.step_timeout_s) for task in self.config.tasks
        }
        return Ready(self.config.environments.max_sessions, {})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request of the environment protocol."""
        match message:
            case Reset():
                return await self._reset(message)
            case Step():
                return await self._step(message)
            case Close(session=session):
                self._episodes.pop(session, None)
                return None
        raise Deterministic(f"an environment worker does not serve {type(message).__name__}")

    async def _reset(self, request: Reset) -> Observation:
        episode = Episode(request.task, self._world.families[request.task], request.seed, request.session)
        self._episodes[request.session] = episode
        seconds, fails = episode.reset_s(), episode.fails(episode.family.reset_failure)
        await self._act(request.session, seconds, fails, self._patience[request.task][0])
        return Observation(request.seq, _text(episode), 0.0, False, {})

    async def _step(self, request: Step) -> Observation:
        episode = self._episodes.get(request.session)
        if episode is None:
            raise RuntimeError(f"no session {request.session}")
        seconds, fails = episode.step_s(), episode.fails(episode.family.step_failure)
        await self._act(request.session, seconds, fails, self._patience[episode.task][1])
        episode.steps += 1
        reward = float(episode.success) if episode.done else 0.0
        info = {"success": reward} if episode.done else {}
        return Observation(request.seq, _text(episode), reward, episode.done, info)

    async def _act(self, session: str, seconds: float, fails: bool, patience_s: float) -> None:
        ailments = self._world.of(self.name)
        if fails or seconds >= NEARLY * patience_s:
            self._world.troubled.add(session)
        async with self._threads or contextlib.nullcontext():
            await asyncio.sleep(seconds * ailments.slowdown)
            self.busy_s += seconds * ailments.slowdown
        if ailments.failing_requests:
            ailments.failing_requests -= 1
            fails = True
        if fails:
            raise RuntimeError("the environment failed")


def _text(episode: Episode) -> bytes:
    return FILLER * (episode.observation() - 1) + pack_ids([episode.answer()])
