"""``hw_affinity: auto``: which task suits which hardware class, by what its turns turn out to be like.

A turn's time on a class is estimated by a roofline: prompt tokens that no cache had are computed, at the class's peak
FLOP/s, and answer tokens read the weights, at its memory's bandwidth, ``BATCH`` of them at once.  The model's size
cancels out.  A task goes where its turns take least compared with what the other tasks' turns take there: every class
serves somebody, and the one that a task gains most on is its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from rollart.config.routing import Pool
from rollart.controller import events
from rollart.controller.affinity import Orders
from rollart.controller.run_context import RunContext
from rollart.controller.task_profile import TaskProfile, TaskProfiles

__all__ = ["Proposal", "Speed", "Suggestions", "propose", "speeds_of"]

LOOK_EVERY_S = 5.0
KNOWN_TURNS = 32
"""A task is judged after so many turns."""
WORTH = 1.15
"""A class has to be so much better for a task than the one it prefers now, or the task stays."""
BATCH = 32
"""Sequences that an engine decodes at once: an assumption."""
COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY = 0.55, 0.94
"""Of the peaks; their source is in ``rollart.simulation.engine_costs``."""


class Speed(msgspec.Struct, frozen=True):
    """Of a hardware class, at its vendor's peaks."""

    flops: float
    bytes_per_s: float

    def turn(self, profile: TaskProfile) -> float:
        """What a turn takes, in seconds for each parameter of the model (bf16: 2 FLOPs and 2 bytes a token)."""
        compute = 2 * profile.computed_tokens / (COMPUTE_EFFICIENCY * self.flops)
        read = 2 * profile.answer_tokens / (BANDWIDTH_EFFICIENCY * self.bytes_per_s * BATCH)
        return compute + read


class Proposal(msgspec.Struct, frozen=True):
    """The classes of a task, the best first, and why."""

    order: list[str]
    reason: str


def speeds_of(pools: list[Pool]) -> dict[str, Speed]:
    """The published figures of the pools' classes, which the config has checked to be there."""
    from rollart.simulation.hardware import HARDWARE

    return {
        p.hardware: Speed(HARDWARE[p.hardware].flops, HARDWARE[p.hardware].memory_bandwidth) for p in pools
    }


def propose(
    profiles: Mapping[str, TaskProfile], speeds: Mapping[str, Speed], preferred: Mapping[str, str]
) -> dict[str, Proposal]:
    """What to change; ``preferred`` is each task's class now.  Empty until all tasks are known."""
    if len(profiles) < len(preferred) or any(p.turns < KNOWN_TURNS for p in profiles.values()):
        return {}
    times = {
        task: {name: s.turn(profile) for name, s in speeds.items()} for task, profile in profiles.items()
    }
    usual = {name: sum(t[name] for t in times.values()) / len(times) for name in speeds}
    found = {}
    for task, profile in profiles.items():
        relative = {name: times[task][name] / usual[name] for name in speeds}
        order = sorted(speeds, key=lambda name: (relative[name], name))
        now = preferred[task]
        if order[0] != now and relative[now] > WORTH * relative[order[0]]:
            best = order[0]
            found[task] = Proposal(
                order,
                f"{profile}; compared with all tasks, a turn takes {relative[best]:.2f} of the time on {best} and "
                f"{relative[now]:.2f} on {now}",
            )
    return found


class Suggestions:
    """Proposes while the run goes on, and follows: a task's next turns go where it suits better."""

    def __init__(
        self,
        orders: Orders,
        profiles: TaskProfiles,
        pools: list[Pool],
        tasks: list[str],
        run: RunContext,
    ) -> None:
        self._orders = orders
        self._profiles = profiles
        self._speeds = speeds_of(pools)
        self._tasks = tasks
        self._run = run

    async def keep(self) -> None:
        """Look from time to time, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Look once."""
        preferred = {task: self._orders.of(task).whole[0] for task in self._tasks}
        known = {task: p for task, p in self._profiles.by_task.items() if task in preferred}
        for task, proposal in propose(known, self._speeds, preferred).items():
            if self._orders.prefer(task, proposal.order):
                self._run.write(
                    events.AffinityProposed(self._run.clock(), task, proposal.order, proposal.reason)
                )
