"""Changes between buckets: what ``encode`` gives, ``apply`` carries out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.weights.delta import apply, encode


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 200_000),
    changes=st.lists(st.integers(0, 10**9), max_size=20),
)
def test_the_new_bucket_comes_of_the_old_one(width: int, size: int, changes: list[int]) -> None:
    old = np.random.default_rng(size).integers(0, 256, size * width, np.uint8)
    new = old.copy()
    for change in changes:
        new[change % len(new)] ^= 1 + change % 255
    data = encode(memoryview(old), memoryview(new), width, 10**9)
    assert data is not None
    assert len(data) <= (len(changes) + size // 65_535 + 1) * (width + 2)
    target = memoryview(bytearray(old.tobytes()))
    apply(target, width, memoryview(data))
    assert bytes(target) == new.tobytes()


def test_changes_that_take_too_much_are_not_encoded() -> None:
    old, new = bytes(1000), bytes([1]) * 1000
    assert encode(memoryview(old), memoryview(new), 2, 1999) is None
    assert encode(memoryview(old), memoryview(new), 2, 2000) is not None


@pytest.mark.parametrize("data", [b"123", b"\0\0\xff\xff"])
def test_what_does_not_fit_is_refused_before_anything_changes(data: bytes) -> None:
    target = bytearray(100)
    with pytest.raises(ValueError, match="change"):
        apply(memoryview(target), 2, memoryview(data))
    assert target == bytearray(100)
