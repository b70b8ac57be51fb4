"""SampleBuffer: groups from their admission to their batch.  Plain data in, orders out; no I/O, no clock.

It decides how many groups may be open, when a group closes, what is aborted and what is started in its
place, and which groups form a batch.  The controller carries out the ``Orders``.  Invariants:

* admission counts groups, and one reservation covers a group's extra members and refills;
* a group leaves exactly once: shipped, filtered or ended without a sample;
* whatever can't make the next batch under the staleness bound is aborted in whatever stage it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from rollart.controller.staleness import Bound, Versions
from rollart.controller.trajectory import Reason, State, Trajectory
from rollart.errors import InvariantError, RunError

__all__ = ["Group", "GroupPolicy", "Orders", "SampleBuffer"]


class GroupPolicy(msgspec.Struct, frozen=True):
    """How groups form and close; the fields are those of ``config.Rollout``."""

    per_batch: int
    size: int
    smallest: int
    redundant_groups: int
    redundant_members: int
    refills: int
    filter_groups: bool
    max_filtered: int
    max_failed: int


class Orders(msgspec.Struct):
    """What the controller has to carry out, in this order."""

    stop: list[Trajectory] = msgspec.field(default_factory=list)
    """Were in flight and are ABORTED already: their owners are to be stopped."""
    start: list[Trajectory] = msgspec.field(default_factory=list)
    """New, PENDING: each wants an owner."""
    failure: RunError | None = None
    """The run can't go on, and why."""

    def add(self, other: Orders) -> None:
        """Append ``other``'s; the first failure counts."""
        self.stop += other.stop
        self.start += other.start
        self.failure = self.failure or other.failure


class Group:
    """Trajectories of one task instance."""

    __slots__ = (
        "dispatched",
        "failures",
        "id",
        "in_flight",
        "refills_left",
        "scored",
        "seed",
        "settled_version",
        "task",
    )

    def __init__(self, id: int, task: str, seed: int, refills: int) -> None:
        self.id = id
        self.task = task
        self.seed = seed
        self.in_flight: dict[int, Trajectory] = {}
        self.scored: list[Trajectory] = []
        self.refills_left = refills
        self.dispatched = 0
        self.failures = 0
        """Members that FAILED."""
        self.settled_version: int | None = None
        """v of a group that is complete, whose members don't change any more."""

    @property
    def version(self) -> int | None:
        """v: the lowest version among the scored members' tokens."""
        if self.settled_version is not None:
            return self.settled_version
        return min((t.oldest for t in self.scored if t.oldest is not None), default=None)


class MakeTrajectory(Protocol):
    """Makes a PENDING trajectory of a group."""

    def __call__(self, *, group: int, member: int, task: str, seed: int) -> Trajectory:
        """A trajectory with an id of its own."""


class SampleBuffer:
    """The groups of a run that are open: in flight or complete and waiting for a batch."""

    def __init__(
        self,
        policy: GroupPolicy,
        bound: Bound,
        versions: Versions,
        *,
        draw_task: Callable[[], tuple[str, int]],
        make: MakeTrajectory,
        on_group_end: Callable[[Group, str], None],
    ) -> None:
        """``draw_task`` gives the next task instance (name, seed); ``on_group_end`` hears how a group left."""
        self.policy = policy
        self.bound = bound
        self.versions = versions
        self.groups: dict[int, Group] = {}
        self.complete: dict[int, tuple[int, int, Group]] = {}
        """Of ``groups``, those that wait for a batch: v, when they were filed, and the group."""
        self.streamed: list[Group] = []
        """Of the complete groups, those that the next batch has for sure, in its order: they are with the trainer."""
        self.filtered_in_a_row = 0
        self.failed_in_a_row = 0
        self.last_failure = ""
        self._draw_task = draw_task
        self._make = make
        self._on_group_end = on_group_end
        self._next_group = 0
        self._filed = 0
        self._swept = 0
        """The floor of the last sweep; it falls when a step is skipped."""

    # --- admission ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Groups that may be open now."""
        return self.bound.open_groups(
            self.versions, per_batch=self.policy.per_batch, redundant=self.policy.redundant_groups
        )

    def admit(self, most: int | None = None) -> Orders:
        """Open as many groups as the bound allows now, and no more than ``most``."""
        orders = Orders()
        free = self.capacity - len(self.groups)
        for _ in range(free if most is None else min(free, most)):
            task, seed = self._draw_task()
            group = Group(self._next_group, task, seed, self.policy.refills)
            self._next_group += 1
            self.groups[group.id] = group
            for _ in range(self.policy.size + self.policy.redundant_members):
                orders.start.append(self._start_member(group))
        return orders

    def reopen(self, id: int, task: str, seed: int, scored: list[Trajectory]) -> Orders:
        """A group of the run before this one: the members that are missing are started."""
        group = self.groups[id] = Group(id, task, seed, self.policy.refills)
        self._next_group = max(self._next_group, id + 1)
        group.scored = scored
        group.dispatched = max((t.member + 1 for t in scored), default=0)
        wanted = self.policy.size + self.policy.redundant_members
        orders = Orders()
        if len(scored) < self.policy.size:
            orders.start = [self._start_member(group) for _ in range(wanted - len(scored))]
        else:
            orders.add(self._review(group))
        return orders

    def go_on_at(self, group: int) -> None:
        """The next new group has this id at least."""
        self._next_group = max(self._next_group, group)

    def _start_member(self, group: Group) -> Trajectory:
        trajectory = self._make(group=group.id, member=group.dispatched, task=group.task, seed=group.seed)
        group.dispatched += 1
        group.in_flight[trajectory.id] = trajectory
        return trajectory

    # --- what happens to members ----------------------------------------------------------------------

    def settled(self, trajectory: Trajectory) -> Orders:
        """``trajectory`` of this buffer became SCORED, ABORTED or FAILED by itself."""
        group = self.groups.get(trajectory.group)
        if group is None or group.in_flight.pop(trajectory.id, None) is None:
            return Orders()
        if trajectory.state is State.SCORED:
            group.scored.append(trajectory)
        elif trajectory.state is State.FAILED:
            group.failures += 1
            self.last_failure = f"{trajectory.task}: {trajectory.detail}"
        return self._review(group)

    def cancel(self, trajectory: Trajectory) -> Orders:
        """Abort ``trajectory`` by a person's wish, if it is still in a group and not with the trainer."""
        orders = Orders()
        group = self.groups.get(trajectory.group)
        if group in self.streamed:
            return orders
        if group is not None and (trajectory.id in group.in_flight or trajectory in group.scored):
            self._abort(group, trajectory, Reason.CANCELLED, orders)
            orders.add(self._review(group))
        return orders

    def sweep(self) -> Orders:
        """Abort, in whatever stage, every trajectory that the bound bars from the next batch."""
        floor = self.bound.floor(self.versions)
        orders = Orders()
        before, self._swept = self._swept, floor
        if floor <= before:  # what was sampled since is looked at turn by turn
            return orders
        for group in list(self.groups.values()):
            stale = [
                t
                for t in (*group.in_flight.values(), *group.scored)
                if t.oldest is not None and t.oldest < floor
            ]
            if stale and group in self.streamed:
                raise InvariantError(f"group {group.id} is with the trainer, and too old for the batch")
            for trajectory in stale:
                self._abort(group, trajectory, Reason.STALE, orders)
            if stale:
                orders.add(self._review(group))
        return orders

    def _abort(self, group: Group, trajectory: Trajectory, reason: Reason, orders: Orders) -> None:
        if group.in_flight.pop(trajectory.id, None) is not None:
            orders.stop.append(trajectory)
        else:
            group.scored.remove(trajectory)
        trajectory.abort(reason)

    def _review(self, group: Group) -> Orders:
        """Close the group, refill it, or wait."""
        orders = Orders()
        self.complete.pop(group.id, None)
        group.settled_version = None
        policy = self.policy
        hoped_for = len(group.scored) + len(group.in_flight)
        if hoped_for + group.refills_left < policy.smallest:
            self._end(group, "incomplete", Reason.GROUP_INCOMPLETE, orders)
            self._count_failure(group, orders)
            return orders
        refills = min(max(policy.size - hoped_for, 0), group.refills_left)
        group.refills_left -= refills
        orders.start += [self._start_member(group) for _ in range(refills)]
        if len(group.scored) >= policy.size or not group.in_flight:
            self._close(group, orders)
        return orders

    def _close(self, group: Group, orders: Orders) -> None:
        """Enough members are scored: stop the others, and file or filter the group."""
        for trajectory in list(group.in_flight.values()):
            self._abort(group, trajectory, Reason.REDUNDANT, orders)
        scores = {trajectory.score for trajectory in group.scored}
        self.failed_in_a_row = 0
        if self.policy.filter_groups and len(scores) == 1:
            self._end(group, "filtered", Reason.GROUP_FILTERED, orders)
            self._count_filtered(scores.pop(), orders)
            return
        self.filtered_in_a_row = 0
        self._filed += 1
        group.settled_version = group.version or 0
        self.complete[group.id] = (group.settled_version, self._filed, group)

    def _end(self, group: Group, outcome: str, reason: Reason, orders: Orders) -> None:
        for trajectory in [*group.in_flight.values(), *group.scored]:
            self._abort(group, trajectory, reason, orders)
        self._leave(group, outcome)

    def _leave(self, group: Group, outcome: str) -> None:
        del self.groups[group.id]
        self.complete.pop(group.id, None)
        self._on_group_end(group, outcome)

    def _count_filtered(self, score: float, orders: Orders) -> None:
        self.filtered_in_a_row += 1
        if self.filtered_in_a_row >= self.policy.max_filtered:
            orders.failure = RunError(
                f"{self.filtered_in_a_row} groups in a row had equal rewards in all members (the last: "
                f"{score:g}): the run gets no signal. Choose easier or harder tasks, a larger "
                "group_size, or a reward with more than one value"
            )

    def _count_failure(self, group: Group, orders: Orders) -> None:
        """A group that ends for its failed members; one that only became too old says nothing of the source."""
        if not group.failures:
            return
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.policy.max_failed:
            orders.failure = RunError(
                f"{self.failed_in_a_row} groups in a row ended without enough scored members. "
                f"The last failure: {self.last_failure}"
            )

    # --- batches --------------------------------------------------------------------------------------

    def ready(self) -> list[Group]:
        """The complete groups that a batch formed now may hold, oldest version first."""
        lowest = self.bound.oldest(self.versions)
        by_age = sorted(self.complete.values(), key=lambda entry: entry[:2])
        return [group for version, _, group in by_age if version >= lowest]

    @property
    def has_unstreamed(self) -> bool:
        """``stream`` may have something to give."""
        return not self.versions.busy and len(self.complete) > len(self.streamed)

    def stream(self) -> list[Group]:
        """Complete groups that the next batch will have, and that were not given yet; none while one is in training.

        The bound's reference does not move until the batch is formed, so what may be in it now may be in it then.
        """
        if self.versions.busy:
            return []
        known = {group.id for group in self.streamed}
        new = [group for group in self.ready() if group.id not in known]
        new = new[: self.policy.per_batch - len(self.streamed)]
        self.streamed += new
        return new

    def take_batch(self) -> list[Group] | None:
        """Form a batch, if one is complete: its groups leave the buffer, and ``versions.busy`` is set.

        The caller must ``sweep`` next: what can't make the batch after this one is aborted then.
        """
        if len(self.complete) < self.policy.per_batch:
            return None
        known = {group.id for group in self.streamed}
        others = [group for group in self.ready() if group.id not in known]
        groups = [*self.streamed, *others][: self.policy.per_batch]
        if len(groups) < self.policy.per_batch:
            return None
        self.streamed = []
        for group in groups:
            self.bound.staleness(group.version or 0, self.versions)
            self._leave(group, "shipped")
        self.versions.busy = True
        return groups

    def clear(self, reason: Reason) -> Orders:
        """End every group: the run is over."""
        orders = Orders()
        for group in list(self.groups.values()):
            self._end(group, "cleared", reason, orders)
        return orders

    # --- for people -----------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """What the next batch waits for, with the ids, in one line."""
        complete = len(self.ready())
        waiting = sum(len(group.in_flight) for group in self.groups.values())
        first = itertools.islice((t for g in self.groups.values() for t in g.in_flight.values()), 8)
        shown = ", ".join(f"{t.id} ({t.state})" for t in first)
        more = f" and {waiting - 8} more" if waiting > 8 else ""
        return (
            f"{complete} of {self.policy.per_batch} groups complete, {len(self.groups)} of {self.capacity} open; "
            f"waiting for {'trajectories ' + shown + more if waiting else 'admission'}"
        )
