"""Rewards that see a whole group: its members wait for each other, and are scored together.

A group is whole when ``group_size`` members are there, or when no other can come any more.  A member that joins
later, in place of one that was aborted meanwhile, is scored with all of them in view; scores once given stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from rollart.controller.reward_batches import Call, Joint, Waiter
from rollart.controller.trajectory import Trajectory
from rollart.rewards.payload import Result
from rollart.rewards.view import TrajectoryView

__all__ = ["GroupCalls", "GroupMembers", "Members"]


class GroupMembers(msgspec.Struct, frozen=True):
    """The members of an open group."""

    size: int
    """How many it closes with."""
    scored: Sequence[Trajectory]
    in_flight: Sequence[Trajectory]
    """Those that are to be scored, or on their way there."""


Members = Callable[[int], GroupMembers | None]
"""Group id → its members; ``None`` when the group is not open any more."""
View = Callable[[Trajectory], TrajectoryView]


class GroupCalls:
    """The groups whose members wait for each other."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._members: Members = lambda group: None
        self._joint = Joint()
        self._waiting: dict[int, dict[int, Waiter]] = {}
        """By group and trajectory: those that have no call yet."""
        self._called: dict[int, dict[int, TrajectoryView]] = {}
        """Those whose call is under way."""
        self._calls = 0

    def attach(self, members: Members) -> None:
        """How to find a group's members."""
        self._members = members

    def changed(self, group: int) -> None:
        """A member of ``group`` ended, or came: look at it when all that follows from that has happened."""
        if group in self._waiting:
            asyncio.get_running_loop().call_soon(self._look, group)

    async def score(self, trajectory: Trajectory, view: View) -> Result:
        """The result for ``trajectory``; ``CallError`` when its group's call has none."""
        group, id = trajectory.group, trajectory.id
        waiter = Waiter(trajectory.session, view(trajectory))
        self._waiting.setdefault(group, {})[id] = waiter
        self._view = view
        self.changed(group)
        try:
            return await waiter.future
        finally:
            for table in (self._waiting, self._called):
                entries = table.get(group)
                if entries is not None and entries.pop(id, None) is not None and not entries:
                    del table[group]

    def _look(self, group: int) -> None:
        waiting = self._waiting.get(group)
        members = self._members(group)
        if not waiting or members is None:
            return
        called = self._called.get(group, {})
        here = len(members.scored) + len(called) + len(waiting)
        coming = any(t.id not in waiting and t.id not in called for t in members.in_flight)
        if here < members.size and coming:
            return
        seen = [self._view(t) for t in members.scored] + list(called.values())
        waiters = [waiter for waiter in waiting.values() if not waiter.future.done()]
        if not waiters:
            return
        self._called.setdefault(group, {}).update((id, waiter.view) for id, waiter in waiting.items())
        del self._waiting[group]
        self._calls += 1
        views = [*seen, *(waiter.view for waiter in waiters)]
        self._joint.start(waiters, self._last(f"g{group}.{self._calls}", views, len(waiters)))

    async def _last(self, name: str, views: Sequence[TrajectoryView], count: int) -> Sequence[Result]:
        """The results of the last ``count`` of ``views``; the others are there to be seen."""
        return (await self._call(name, views))[-count:]

    async def close(self) -> None:
        """Nobody waits any more."""
        await self._joint.close()
