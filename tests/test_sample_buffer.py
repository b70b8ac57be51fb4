"""Groups under random orders of everything that can happen to them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.config import UpdateAt
from rollart.controller.sample_buffer import Group, GroupPolicy, Orders, SampleBuffer
from rollart.controller.staleness import Bound, Versions
from rollart.controller.trajectory import Kind, Limits, Reason, State, Trajectory
from rollart.errors import RunError
from rollart.packing import pack_floats, pack_ids
from rollart.protocol import VersionRun


class World:
    """A buffer and what a controller would do around it."""

    def __init__(self, alpha: int = 1, update_at: UpdateAt = UpdateAt.BATCH, **policy: Any) -> None:
        fields = {
            "per_batch": 2, "size": 2, "smallest": 2, "redundant_groups": 0, "redundant_members": 0, "refills": 2,
            "filter_groups": False, "max_filtered": 1000, "max_failed": 1000,
        }  # fmt: skip
        self.versions = Versions()
        self.bound = Bound(alpha, update_at)
        self.trajectories: list[Trajectory] = []
        self.live: dict[int, Trajectory] = {}
        self.ended: list[tuple[int, str]] = []
        self.draws = 0
        self.buffer = SampleBuffer(
            GroupPolicy(**{**fields, **policy}), self.bound, self.versions, draw_task=self.draw, make=self.make,
            on_group_end=lambda group, outcome: self.ended.append((group.id, outcome)),
        )  # fmt: skip

    def draw(self) -> tuple[str, int]:
        self.draws += 1
        return "Task", self.draws

    def make(self, *, group: int, member: int, task: str, seed: int) -> Trajectory:
        limits = Limits(max_turns=1, max_tokens=1, context_tokens=64, retries=0)
        trajectory = Trajectory(
            id=len(self.trajectories), group=group, member=member, task=task, seed=seed, kind=Kind.TRAIN,
            limits=limits, observer=lambda *_: None,
        )  # fmt: skip
        self.trajectories.append(trajectory)
        return trajectory

    def carry_out(self, orders: Orders) -> None:
        for trajectory in orders.stop:
            assert trajectory.state is State.ABORTED
            self.live.pop(trajectory.id, None)
        for trajectory in orders.start:
            if not trajectory.state.ended:
                self.live[trajectory.id] = trajectory
        if orders.failure is not None:
            raise orders.failure

    def review(self) -> None:
        self.carry_out(self.buffer.sweep())
        self.carry_out(self.buffer.admit())

    def finish(self, trajectory: Trajectory, score: float = 0.0, version: int | None = None) -> None:
        """Play the trajectory to its score, or, with ``score`` NaN, to its failure."""
        del self.live[trajectory.id]
        trajectory.begin()
        trajectory.observed(pack_ids([1]), 0.0, False, {})
        run = VersionRun(self.versions.m if version is None else version, 1)
        trajectory.generated(pack_ids([2]), pack_floats([-1.0]), [run])
        if version is None and run.version < self.bound.floor(self.versions):  # looked at at every turn
            trajectory.abort(Reason.STALE)
        elif score != score:
            trajectory.failed(Reason.ENV_ERROR, "broken", retry=False)
        else:
            trajectory.observed(b"", score, True, {})
            trajectory.scored(score)
        self.carry_out(self.buffer.settled(trajectory))

    def of(self, group: int) -> list[Trajectory]:
        return [t for t in self.live.values() if t.group == group]


def test_a_group_closes_at_the_first_members_and_cuts_the_rest() -> None:
    world = World(redundant_members=2)
    world.review()
    members = world.of(0)
    assert len(members) == 4
    world.finish(members[3])
    world.finish(members[1])
    assert {t.state for t in (members[0], members[2])} == {State.ABORTED}
    assert 0 in world.buffer.complete and world.of(0) == []


def test_a_failed_member_is_replaced_within_its_group_and_budget() -> None:
    world = World(refills=1)
    world.review()
    world.finish(world.of(0)[0], float("nan"))
    assert [t.member for t in world.of(0)] == [1, 2]
    world.finish(world.of(0)[0], float("nan"))
    assert 0 not in world.buffer.groups, "no refill is left, and one member is no group"
    assert world.ended == [(0, "incomplete")]


def test_a_group_that_cannot_complete_closes_short() -> None:
    world = World(size=3, smallest=2, refills=0)
    world.review()
    first, second, third = world.of(0)
    world.finish(first)
    world.finish(second, float("nan"))
    assert 0 not in world.buffer.complete, "the third may still come"
    world.finish(third)
    assert 0 in world.buffer.complete and len(world.buffer.groups[0].scored) == 2


def test_the_oldest_groups_ship_first_and_the_too_old_never_do() -> None:
    world = World(alpha=1, update_at=UpdateAt.PUBLISH, redundant_groups=2)
    world.versions.n = world.versions.m = 3
    world.review()
    versions = iter([3, 1, 2, 3, 2, 3])
    for group in list(world.buffer.groups):
        version = next(versions)
        for trajectory in world.of(group):
            world.finish(trajectory, version=version)
    batch = world.buffer.take_batch()
    assert batch is not None and [g.version for g in batch] == [2, 2]
    world.review()
    assert all(g.version is None or g.version >= 3 for g in world.buffer.groups.values())


def test_groups_that_become_too_old_are_no_failures() -> None:
    world = World(alpha=0, update_at=UpdateAt.PUBLISH, redundant_groups=6, max_failed=2, refills=0)
    world.review()
    for group in list(world.buffer.groups):
        world.finish(world.of(group)[0])
    for group in (0, 1):
        world.finish(world.of(group)[0])
    assert world.buffer.take_batch() is not None
    world.review()
    assert [outcome for _, outcome in world.ended].count("incomplete") == 6
    assert world.buffer.failed_in_a_row == 0


def test_failed_groups_stop_the_run_with_the_last_failure() -> None:
    world = World(max_failed=2, refills=0)
    world.review()
    world.finish(world.of(0)[0], float("nan"))
    world.review()
    with pytest.raises(RunError, match=r"2 groups in a row ended .* The last failure: Task: broken"):
        world.finish(world.of(1)[0], float("nan"))
    assert world.of(1) == [], "the other member was stopped first"


def test_no_member_is_started_for_a_group_that_cannot_complete() -> None:
    world = World(size=3, smallest=3, refills=1)
    world.review()
    world.finish(world.of(0)[0], float("nan"))
    world.finish(world.of(0)[0], float("nan"))
    assert len([t for t in world.trajectories if t.group == 0]) == 4


def test_filtered_groups_free_their_place_and_stop_the_run_at_last() -> None:
    world = World(filter_groups=True, max_filtered=3)
    world.review()
    for _ in range(2):
        group = min(t.group for t in world.live.values())
        for trajectory in world.of(group):
            world.finish(trajectory, 1.0)
        world.review()
    first, second = world.of(2)
    world.finish(first, 1.0)
    with pytest.raises(RunError, match="3 groups in a row had equal rewards"):
        world.finish(second, 1.0)


POLICIES = st.fixed_dictionaries(
    {
        "per_batch": st.integers(1, 3),
        "size": st.integers(2, 3),
        "smallest": st.just(2),
        "redundant_groups": st.integers(0, 2),
        "redundant_members": st.integers(0, 2),
        "refills": st.integers(0, 2),
        "filter_groups": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    policy=POLICIES,
    alpha=st.integers(0, 3),
    update_at=st.sampled_from(UpdateAt),
    choices=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 10**6)), max_size=120),
)
def test_any_order_keeps_the_rules(
    policy: dict[str, Any], alpha: int, update_at: UpdateAt, choices: list[tuple[int, int]]
) -> None:
    if update_at is UpdateAt.BATCH:
        alpha = max(alpha, 1)
    world = World(alpha, update_at, **policy)
    world.review()
    versions, consumed = world.versions, Counter[int]()
    batch: list[Group] | None = None
    for what, pick in choices:
        live = sorted(world.live)
        if what <= 3 and live:
            trajectory = world.live[live[pick % len(live)]]
            world.finish(trajectory, [0.0, 1.0, 2.0, float("nan")][what])
        elif what == 6:
            known = [*world.live.values(), *(t for g in batch or () for t in g.scored)]
            known += [t for g in world.buffer.groups.values() for t in g.scored]
            if known:
                world.carry_out(world.buffer.cancel(known[pick % len(known)]))
        elif what == 7 and batch is not None:  # the step is skipped: the bound falls again
            for trajectory in (t for group in batch for t in group.scored):
                trajectory.fail(Reason.NAN, "not finite")
            versions.busy, batch = False, None
        elif what == 4 and batch is None:
            batch = world.buffer.take_batch()
            for group in batch or ():
                assert 0 <= world.bound.staleness(group.version or 0, versions) <= alpha
                assert 2 <= len(group.scored) <= policy["size"]
            if batch and update_at is UpdateAt.BATCH:
                world.review()
                versions.m = versions.n
        elif batch is not None:
            for trajectory in (t for group in batch for t in group.scored):
                trajectory.move(State.CONSUMED)
                consumed[trajectory.id] += 1
            versions.n, versions.busy, batch = versions.n + 1, False, None
        elif what == 5 and update_at is UpdateAt.PUBLISH:
            versions.m = versions.n
        before = len(world.buffer.groups)
        world.review()
        assert len(world.buffer.groups) <= max(world.buffer.capacity, before)
        in_groups = {t for g in world.buffer.groups.values() for t in g.in_flight}
        assert in_groups == set(world.live), "what is in flight is in a group, and nothing else is"
        held = [t for g in world.buffer.groups.values() for t in (*g.in_flight.values(), *g.scored)]
        floor = world.bound.floor(versions)
        assert all(t.oldest is None or t.oldest >= floor for t in held), "what is too old is swept"
        assert not any(t.state.ended for t in held)
    assert set(consumed.values()) <= {1}
    in_buffer = [t for g in world.buffer.groups.values() for t in (*g.in_flight.values(), *g.scored)]
    in_batch = [t for g in batch or () for t in g.scored]
    ended = [t for t in world.trajectories if t.state.ended]
    assert len(world.trajectories) == len(in_buffer) + len(in_batch) + len(ended)


@settings(max_examples=60, deadline=None)
@given(
    policy=POLICIES, alpha=st.integers(0, 3), update_at=st.sampled_from(UpdateAt), n=st.integers(0, 9),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_run_never_stalls(
    policy: dict[str, Any], alpha: int, update_at: UpdateAt, n: int, order: Any
) -> None:
    """From any version on, finishing what is in flight always leads to the next batch."""
    policy["filter_groups"] = False
    if update_at is UpdateAt.BATCH:
        alpha = max(alpha, 1)
    world = World(alpha, update_at, **policy)
    world.versions.n = world.versions.m = n
    world.review()
    for _ in range(6):
        while (batch := world.buffer.take_batch()) is None:
            assert world.live, world.buffer.waiting_for()
            world.finish(world.live[order.choice(sorted(world.live))], order.choice([0.0, 1.0]))
            world.review()
        world.review()
        if update_at is UpdateAt.BATCH:
            world.versions.m = world.versions.n
        world.versions.n, world.versions.busy = world.versions.n + 1, False
        if update_at is UpdateAt.PUBLISH:
            world.versions.m = world.versions.n
        world.review()
        assert all(t.state is State.SCORED for g in batch for t in g.scored)
