"""Rewards in virtual time: the environment's own after a time, or ``RewardClient`` over a simulated endpoint."""

from __future__ import annotations

import asyncio

from rollart.controller.reward_calls import CallError, FailureKind
from rollart.controller.rewards import OwnRewards
from rollart.controller.trajectory import Trajectory
from rollart.rewards.kinds import group_rank
from rollart.rewards.payload import Meter, Reply, Request, Result
from rollart.simulation.functions import SimFunctions
from rollart.simulation.world import World

__all__ = ["SimBackend", "SimRewards"]

FAILS = 0.05
"""Share of the attempts at a simulated endpoint that fail as infrastructure does."""


class SimRewards(OwnRewards):
    """The environment's reward, after the family's time for scoring."""

    def __init__(self, world: World, functions: SimFunctions | None) -> None:
        """``functions`` are what serves them; ``None``: as many at once as there are."""
        self._world = world
        self._functions = functions

    async def score(self, trajectory: Trajectory) -> float:
        """The sum of the environment's rewards."""
        seconds = self._world.families[trajectory.task].reward_s.draw(
            self._world.rng("reward", trajectory.session)
        )
        if seconds and self._functions is not None:
            await self._functions.call(seconds)
        elif seconds:
            await asyncio.sleep(seconds)
        return trajectory.reward

    async def close(self) -> None:
        """End what serves the rewards."""
        if self._functions is not None:
            await self._functions.close()


class SimBackend:
    """An endpoint that takes the family's time, fails now and then, and ranks groups."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls = 0

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        """As of ``Backend``."""
        self._calls += 1
        rng = self._world.rng("reward", request.key, self._calls)
        task = request.trajectories[0].task
        seconds = self._world.families[task].reward_s.draw(rng)
        if seconds:
            await asyncio.sleep(seconds)
        if rng.random() < FAILS:
            raise CallError(FailureKind.INFRASTRUCTURE, "the simulated endpoint failed")
        if request.scope == "group":
            scores = group_rank(request.trajectories)
        else:
            scores = [trajectory.environment.reward for trajectory in request.trajectories]
        return Reply(results=[Result(score=score) for score in scores], meter=Meter(busy_s=seconds))

    async def close(self) -> None:
        """Holds nothing."""
