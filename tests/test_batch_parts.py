"""A batch that comes in parts is trained on whole, in order, once, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.workers.batch_parts import BatchParts
from rollart.workers.worker import Deterministic


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_parts_in_any_order_and_said_again_make_the_same_batch(data: st.DataObject, sizes: list[int]) -> None:
    groups = [b"%d" % number for number in range(sum(sizes))]
    said = [(first, groups[first : first + size]) for size, first in zip(sizes, _starts(sizes), strict=True)]
    order = data.draw(st.permutations(said + data.draw(st.lists(st.sampled_from(said)))))
    parts = BatchParts()
    for first, part in order:
        parts.add(7, first, part)
    assert parts.of(7, len(groups)) == groups


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def test_a_batch_that_is_not_whole_is_refused_and_told() -> None:
    parts = BatchParts()
    with pytest.raises(Deterministic, match=r"step 0 has 2 group\(s\), but 0 came"):
        parts.of(0, 2)
    parts.add(0, 1, [b"b"])
    with pytest.raises(Deterministic, match=r"step 0 has 2 group\(s\), but 1 came"):
        parts.of(0, 2)
    parts.add(0, 0, [b"a", b"b", b"c"])
    with pytest.raises(Deterministic, match=r"step 0 has 2 group\(s\), but 3 came"):
        parts.of(0, 2)


def test_what_is_left_of_another_step_is_never_mixed_in() -> None:
    parts = BatchParts()
    parts.add(3, 0, [b"old", b"older"])
    parts.add(4, 0, [b"new"])
    parts.add(3, 1, [b"late"])
    assert parts.of(4, 1) == [b"new"]
    with pytest.raises(Deterministic):
        parts.of(3, 2)
    parts.drop(4)
    with pytest.raises(Deterministic, match=r"1 group\(s\), but 0 came"):
        parts.of(4, 1)
