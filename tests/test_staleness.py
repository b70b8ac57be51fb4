"""The bound's arithmetic, and a model check that every legal setting makes progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollart.config import Schedule, UpdateAt
from rollart.controller.staleness import Bound, Versions, bound_of
from rollart.errors import InvariantError

BATCH, PUBLISH = UpdateAt.BATCH, UpdateAt.PUBLISH


@pytest.mark.parametrize(
    ("alpha", "update_at", "versions", "groups"),
    [
        (1, BATCH, Versions(0, 0, False), 16),  # the start: this batch and the next
        (1, BATCH, Versions(0, 0, True), 16),  # one is in training; two more may be on the way
        (1, BATCH, Versions(1, 0, False), 16),  # the step ended, the workers are one behind
        (1, BATCH, Versions(1, 0, True), 8),  # a batch is formed, the update is still to come
        (0, PUBLISH, Versions(0, 0, False), 8),
        (0, PUBLISH, Versions(0, 0, True), 0),  # exactly on-policy: nothing starts during a step
        (0, PUBLISH, Versions(1, 0, False), 0),  # nor before the workers are up to date
        (2, PUBLISH, Versions(5, 5, False), 24),
        (2, PUBLISH, Versions(5, 4, True), 8),
    ],
)
def test_admission(alpha: int, update_at: UpdateAt, versions: Versions, groups: int) -> None:
    bound = Bound(alpha, update_at)
    assert bound.open_groups(versions, per_batch=8, redundant=0) == groups
    assert bound.open_groups(versions, per_batch=8, redundant=3) == (groups + 3 if groups else 0)


def test_age_is_measured_against_m_or_n() -> None:
    versions = Versions(n=7, m=6)
    assert Bound(1, BATCH).staleness(5, versions) == 1
    assert Bound(1, PUBLISH).staleness(6, versions) == 1
    with pytest.raises(InvariantError, match="negative"):
        Bound(1, BATCH).staleness(7, versions)


# --- model check --------------------------------------------------------------------------------------------
#
# A state: n - m, busy, and for each open group how far below n its version is (None: no token yet) and
# whether it is complete.  Counting from n makes the states of endless runs finitely many, so this is
# exhaustive: it covers a resume at any version too.

OLD = 6
"""Beyond every bound here: older ones behave the same."""
Group = tuple[int | None, bool]
State = tuple[int, bool, tuple[Group, ...]]


def settle(bound: Bound, per_batch: int, redundant: int, lag: int, busy: bool, groups: list[Group]) -> State:
    """Abort what is too old and admit what fits, as the controller does after every change."""
    versions = Versions(n=100, m=100 - lag, busy=busy)
    floor = bound.floor(versions)
    kept = [g for g in groups if g[0] is None or 100 - g[0] >= floor]
    room = bound.open_groups(versions, per_batch=per_batch, redundant=redundant) - len(kept)
    kept += [(None, False)] * max(room, 0)
    return lag, busy, tuple(sorted(kept, key=str))


def steps(bound: Bound, per_batch: int, redundant: int, state: State) -> Iterator[tuple[str, State]]:
    """What may happen next."""
    lag, busy, groups = state
    versions = Versions(n=100, m=100 - lag, busy=busy)

    def after(lag: int, busy: bool, groups: list[Group]) -> State:
        return settle(bound, per_batch, redundant, lag, busy, groups)

    updating = bound.update_at is BATCH and busy and lag > 0
    for i, (age, complete) in enumerate(groups):
        others = [g for j, g in enumerate(groups) if j != i]
        if not complete and not updating and 100 - lag >= bound.floor(versions):
            oldest = lag if age is None else max(age, lag)
            yield "sample", after(lag, busy, [*others, (oldest, False)])
        if not complete and age is not None:
            yield "complete", after(lag, busy, [*others, (age, True)])
    lowest = bound.oldest(versions)
    ready = sorted(((g[0] or 0) for g in groups if g[1] and 100 - (g[0] or 0) >= lowest), reverse=True)
    if not busy and len(ready) >= per_batch:
        rest = list(groups)
        for age in ready[:per_batch]:
            assert bound.staleness(100 - age, versions) >= 0
            assert bound.staleness(100 - age, versions) <= bound.alpha or bound.max_train_lag is None
            rest.remove((age, True))
        yield "ship", after(lag, True, rest)
    if lag and (updating or bound.update_at is PUBLISH):
        yield "update", after(0, busy, list(groups))
    if busy and not updating:
        older: list[Group] = [
            (None if age is None else min(age + 1, OLD), complete) for age, complete in groups
        ]
        yield "trained", after(lag + 1, False, older)


RULES = [
    *(bound_of(Schedule.ROLLART, alpha, BATCH) for alpha in (1, 2)),
    *(bound_of(Schedule.ROLLART, alpha, PUBLISH) for alpha in (0, 1, 2)),
    bound_of(Schedule.SYNC, 0, PUBLISH),
    bound_of(Schedule.ONE_OFF, 1, BATCH),
    *(bound_of(Schedule.AREAL, alpha, PUBLISH) for alpha in (0, 1, 2)),
]
"""Of BATCH, alpha 0 is missing: the config refuses it."""


@pytest.mark.parametrize("bound", RULES, ids=repr)
@pytest.mark.parametrize(("per_batch", "redundant"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_every_reachable_state_leads_to_a_train_step(bound: Bound, per_batch: int, redundant: int) -> None:
    first = settle(bound, per_batch, redundant, 0, False, [])
    seen, frontier = {first}, [first]
    before: dict[State, set[State]] = {}
    trains: set[State] = set()
    while frontier:
        state = frontier.pop()
        for what, following in steps(bound, per_batch, redundant, state):
            before.setdefault(following, set()).add(state)
            if what == "trained":
                trains.add(state)
            if following not in seen:
                seen.add(following)
                frontier.append(following)
    leads, frontier = set(trains), list(trains)
    while frontier:
        for state in before.get(frontier.pop(), ()):
            if state not in leads:
                leads.add(state)
                frontier.append(state)
    assert seen - leads == set()
