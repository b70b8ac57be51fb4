"""Which worker a request goes to: the pure functions, and the waiting and the places around them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.routing import Phase
from rollart.controller.routing import (
    DECODING,
    PLAIN,
    PREFILLING,
    Candidate,
    Prefix,
    Wish,
    choose,
    pair,
    place,
)

CLASSES = ("H800", "H20", "CPU")
Workers = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdef"),
        st.integers(-1, 4),
        st.integers(0, 1000),
        requests=st.integers(0, 4),
        hardware=st.sampled_from(CLASSES),
        phase=st.sampled_from(Phase),
        most_requests=st.integers(1, 4),
        most_tokens=st.integers(1, 1500),
    ),
    max_size=6,
    unique_by=lambda c: c.name,
)
Prefixes = st.none() | st.builds(Prefix, st.sampled_from("abcdef"), st.integers(0, 4), st.integers(0, 800))
Wishes = st.builds(
    Wish,
    st.integers(0, 4),
    st.integers(1, 500),
    st.integers(1, 1000),
    prefix=Prefixes,
    avoid=st.sampled_from(["", *"abc"]),
)
Orders = st.permutations(CLASSES)


def by_class(workers: list[Candidate]) -> dict[str, list[Candidate]]:
    return {name: [c for c in workers if c.hardware == name] for name in CLASSES}


def cost(candidate: Candidate, wish: Wish) -> int:
    """Tokens to compute before the answer: a prefix counts only where its version is still served."""
    prefix = wish.prefix
    holds = prefix is not None and prefix.worker == candidate.name and prefix.version == candidate.version
    return candidate.tokens + wish.prompt_tokens - (min(prefix.tokens, wish.prompt_tokens) if holds else 0)  # type: ignore[union-attr]


@given(Workers, Wishes)
def test_the_worker_that_has_the_least_to_compute_before_the_answer(
    workers: list[Candidate], wish: Wish
) -> None:
    found = choose(workers, wish)
    usable = [
        c for c in workers if c.version >= wish.lowest_version and c.name != wish.avoid and c.takes(wish.load)
    ]
    if not usable:
        assert found is None
        return
    assert found in usable
    assert cost(found, wish) == min(cost(c, wish) for c in usable)


@given(Workers, Wishes)
def test_the_holder_of_the_prefix_is_kept_unless_its_queue_costs_more_than_prefilling_again(
    workers: list[Candidate], wish: Wish
) -> None:
    found, prefix = choose(workers, wish), wish.prefix
    holder = next((c for c in workers if prefix and c.name == prefix.worker), None)
    if found is None or holder is None or prefix is None:
        return
    usable = holder.version >= wish.lowest_version and holder.takes(wish.load) and holder.name != wish.avoid
    if usable and holder.version == prefix.version:
        saved = min(prefix.tokens, wish.prompt_tokens)
        others = [c for c in workers if c.version >= wish.lowest_version and c.takes(wish.load)]
        if all(holder.tokens <= c.tokens + saved for c in others) and saved:
            assert found is holder


@given(Workers, Wishes)
def test_a_prefix_of_another_version_is_worth_nothing(workers: list[Candidate], wish: Wish) -> None:
    if wish.prefix is None or any(
        c.name == wish.prefix.worker and c.version == wish.prefix.version for c in workers
    ):
        return
    assert choose(workers, wish) is choose(workers, msgspec.structs.replace(wish, prefix=None))


@given(Workers, Wishes, Orders)
def test_classes_in_the_declared_order_and_nobody_waits_while_one_has_room(
    workers: list[Candidate], wish: Wish, order: list[str]
) -> None:
    found = place(by_class(workers), order, wish)
    usable = [c for c in workers if c.version >= wish.lowest_version and c.takes(wish.load)]
    assert (found is None) == (not usable)
    if found is None:
        return
    assert found in usable
    unavoided = [c for c in usable if c.name != wish.avoid] or usable
    assert found in unavoided

    def rank(candidate: Candidate) -> tuple[int, int]:
        phase = next(n for n, phases in enumerate(PLAIN) if candidate.phase in phases)
        return phase, order.index(candidate.hardware)

    assert rank(found) == min(map(rank, unavoided))


@given(Workers, Wishes, Orders, Orders)
def test_a_pair_is_of_one_version_and_of_two_workers_that_serve_the_phases(
    workers: list[Candidate], wish: Wish, prefill: list[str], decode: list[str]
) -> None:
    found = pair(by_class(workers), prefill, decode, wish)
    usable = [c for c in workers if c.version >= wish.lowest_version]
    possible = [
        (p, d)
        for p in usable
        for d in usable
        if p is not d
        and p.version == d.version
        and p.takes(wish.prompt_tokens)
        and d.takes(wish.load)
        and p.phase in PREFILLING[0]
        and d.phase in DECODING[0]
    ]
    if found is None:
        return
    assert (found.prefill, found.decode) in possible
    assert found.prefill.version == max(
        p.version for p, d in possible if d is found.decode or p is found.prefill
    )


def test_a_full_class_is_passed_over_and_a_gone_one_too() -> None:
    fast = Candidate("a", 1, 50, requests=2, hardware="H800", most_requests=2)
    slow = Candidate("b", 1, 900, hardware="H20", most_requests=2)
    wish = Wish(1, 10, 20)
    assert place({"H800": [fast], "H20": [slow]}, ["H800", "H20"], wish) is slow
    assert place({"H20": [slow]}, ["H800", "H20"], wish) is slow
    assert place({"H800": [fast]}, ["H800", "H20"], wish) is None
