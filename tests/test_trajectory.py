"""A trajectory's states and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.controller.trajectory import LEGAL, Kind, Limits, Next, Reason, State, Trajectory
from rollart.errors import InvariantError
from rollart.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from rollart.protocol import VersionRun


def trajectory(moves: list[tuple[State, State, Reason]] | None = None, **limits: int) -> Trajectory:
    fields = {"max_turns": 8, "max_tokens": 4, "context_tokens": 256, "retries": 1, **limits}

    def observe(t: Trajectory, before: State, reason: Reason) -> None:
        if moves is not None:
            moves.append((before, t.state, reason))

    return Trajectory(
        id=7,
        group=1,
        member=0,
        task="Task",
        seed=3,
        kind=Kind.TRAIN,
        limits=Limits(**fields),
        observer=observe,
    )


Turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
        st.lists(st.integers(0, 2**31 - 1), max_size=5),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@given(first=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), turns=Turns)
def test_ids_go_in_as_they_came_out(first: list[int], turns: list[tuple[list[int], list[int], int]]) -> None:
    """Whatever ids the engine and the environment give, the sample holds them, in order, masked and stamped."""
    t = trajectory()
    assert t.begin() is Next.RESET
    todo = t.observed(pack_ids(first), 0.0, False, {})
    ids, mask, logprobs, stamps = list(first), [0] * len(first), [], []
    version = 0
    for number, (answer, observation, bump) in enumerate(turns):
        assert todo is Next.GENERATE and unpack_ids(t.ids) == ids
        scores = [-float(i + 1) for i in range(len(answer))]
        split = len(answer) // 2 if bump else 0
        runs = [VersionRun(version, split)] if split else []
        version += bump
        runs.append(VersionRun(version, len(answer) - split))
        assert t.generated(pack_ids(answer), pack_floats(scores), runs) is Next.STEP
        ids += answer
        mask += [1] * len(answer)
        logprobs += scores
        stamps += [v for run in runs for v in [run.version] * run.count]
        last = number == len(turns) - 1
        todo = t.observed(pack_ids(observation), 0.5, last, {})
        if not last:
            ids += observation
            mask += [0] * len(observation)
    assert todo is Next.SCORE
    t.scored(1.0)
    (sample,) = t.take_samples()
    assert unpack_ids(sample.ids) == ids
    assert list(sample.mask) == mask
    assert unpack_floats(sample.logprobs) == logprobs
    assert [v for run in sample.versions for v in [run.version] * run.count] == stamps
    assert all(a.version != b.version for a, b in zip(sample.versions, sample.versions[1:], strict=False))
    assert (t.oldest, t.newest) == (min(stamps), max(stamps))
    assert t.reward == 0.5 * len(turns)


def test_only_the_moves_of_the_table_are_possible() -> None:
    for before in State:
        for after in State:
            t = trajectory()
            t.state = before
            if after in LEGAL[before]:
                t.move(after)
            else:
                with pytest.raises(InvariantError, match=f"can't go from {before} to {after}"):
                    t.move(after)
    assert all(LEGAL[state] == frozenset() for state in State if state.ended)


def test_a_retry_forgets_the_dead_attempt() -> None:
    moves: list[tuple[State, State, Reason]] = []
    t = trajectory(moves)
    t.begin()
    t.observed(pack_ids([1, 2]), 0.0, False, {"success": 0.0})
    t.generated(pack_ids([3]), pack_floats([-1.0]), [VersionRun(5, 1)])
    assert t.failed(Reason.ENV_ERROR, "the worker died", retry=True) is Next.RESET
    assert (t.attempt, t.tokens, t.sampled, t.turns, t.oldest, t.session) == (1, 0, 0, 0, None, "7.1")
    assert t.failed(Reason.ENV_ERROR, "it died again", retry=True) is Next.NOTHING
    assert t.state is State.FAILED and t.detail == "it died again"
    assert moves[-1] == (State.RESETTING, State.FAILED, Reason.ENV_ERROR)


def test_turns_and_context_are_bounded() -> None:
    t = trajectory(max_turns=1)
    t.begin()
    t.observed(pack_ids([1]), 0.0, False, {})
    t.generated(pack_ids([2]), pack_floats([-1.0]), [VersionRun(0, 1)])
    assert t.observed(pack_ids([3]), 0.0, False, {}) is Next.SCORE
    assert t.truncated == "max_turns" and unpack_ids(t.ids) == [1, 2]

    t = trajectory(context_tokens=5)
    t.begin()
    t.observed(pack_ids([1, 2]), 0.0, False, {})
    t.generated(pack_ids([3]), pack_floats([-1.0]), [VersionRun(0, 1)])
    assert t.observed(pack_ids([4, 5]), 0.0, False, {}) is Next.SCORE, "no room for an answer"
    assert t.truncated == "context" and t.tokens == 3

    t = trajectory(context_tokens=2)
    t.begin()
    assert t.observed(pack_ids([1, 2]), 0.0, False, {}) is Next.NOTHING
    assert t.state is State.FAILED and "has 2 tokens" in t.detail


def test_an_episode_without_a_turn_is_no_sample() -> None:
    t = trajectory()
    t.begin()
    assert t.observed(pack_ids([1]), 1.0, True, {}) is Next.NOTHING
    assert t.state is State.FAILED
