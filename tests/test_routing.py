"""Which worker a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollart.controller.routing import Candidate, choose

Workers = st.lists(
    st.builds(Candidate, st.sampled_from("abcdef"), st.integers(-1, 4), st.integers(0, 1000)),
    max_size=6, unique_by=lambda c: c.name,
)  # fmt: skip


@given(Workers, st.integers(0, 4), st.none() | st.sampled_from("abcdef"), st.integers(0, 500))
def test_only_workers_of_a_right_version_and_the_cheapest_of_them(
    workers: list[Candidate], lowest: int, previous: str | None, prompt: int
) -> None:
    name = choose(workers, lowest_version=lowest, previous=previous, prompt_tokens=prompt)
    usable = {c.name: c for c in workers if c.version >= lowest}
    if not usable:
        assert name is None
        return
    assert name in usable
    least = min(c.tokens for c in usable.values())
    cost = {c.name: c.tokens + (0 if c.name == previous else prompt) for c in usable.values()}
    assert cost[name] <= min(cost.values()) or (name == previous and usable[name].tokens <= least + prompt)
    if previous in usable and usable[previous].tokens <= least:
        assert name == previous
