"""The simulated engine: what its scheduler must keep, whatever comes when, and what it costs against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.simulation.engine import BatchingEngine, EngineCosts, Finished
from rollart.simulation.hardware import H800, QWEN3_8B, QWEN3_32B, HardwareClass, dense_model

TINY = dense_model(
    "tiny",
    layers=2,
    hidden=64,
    ffn=128,
    attention_heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=512,
    max_context=4096,
)


def tiny_costs(kv_tokens: int = 4096, **knobs: float) -> EngineCosts:
    """On a small device with room for ``kv_tokens``."""
    memory = TINY.weight_bytes + (kv_tokens + 0.5) * TINY.kv_bytes_per_token
    device = HardwareClass(
        name="small", flops=1e11, memory_bandwidth=1e9, memory=memory, interconnect=1e9, cost=None
    )
    costs = EngineCosts(device, TINY, memory_utilization=1, workspace_bytes=0, **knobs)
    assert costs.kv_capacity == kv_tokens
    return costs


def drain(engine: BatchingEngine) -> list[Finished]:
    finished: list[Finished] = []
    while (at := engine.next_event()) is not None:
        finished += engine.advance(at)
    return finished


# --- whatever happens -----------------------------------------------------------------------------------


@dataclass
class Input:
    gap: float
    """Seconds after the input before it."""
    kind: str
    prompt: int = 1
    new: int = 1
    key: int = 0
    which: int = 0
    """The request to cancel, or how slow."""


GAPS = st.sampled_from([0.0, 0.0, 0.0004, 0.003, 0.02, 0.5])
SUBMITS = st.builds(
    Input,
    gap=GAPS,
    kind=st.just("submit"),
    prompt=st.integers(1, 90),
    new=st.integers(1, 60),
    key=st.integers(0, 4),
)
OTHERS = st.builds(
    Input,
    gap=GAPS,
    kind=st.sampled_from(["cancel", "suspend", "resume", "drop", "slow"]),
    which=st.integers(0, 12),
)
INPUTS = st.lists(st.one_of(SUBMITS, SUBMITS, OTHERS), min_size=1, max_size=24)
LIMITS = st.tuples(
    st.sampled_from([160, 400, 4000]), st.sampled_from([8, 64, 512]), st.sampled_from([1, 5, 256])
)
POLLS = st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.31, 0.99, 1.0]), max_size=4).map(sorted)


@dataclass
class Seen:
    finished: list[Finished]
    cancelled: list[int]
    submitted: dict[int, Input]
    engine: BatchingEngine

    def all(self) -> tuple[Any, ...]:
        engine = self.engine
        counts = engine.tokens_prefilled, engine.tokens_decoded, engine.preemptions, engine.cached_tokens
        return self.finished, self.cancelled, engine.busy_s, counts


def play(inputs: list[Input], limits: tuple[int, int, int], polls: Sequence[float] = ()) -> Seen:
    """Give an engine ``inputs``, and look at it at ``polls``, shares of the time between each two of them."""
    kv, budget, steps = limits
    engine = BatchingEngine(tiny_costs(kv), token_budget=budget, max_requests=min(6, budget), max_steps=steps)
    seen = Seen([], [], {}, engine)
    now = 0.0
    for number, item in enumerate(inputs):
        for share in polls:
            seen.finished += engine.advance(now + share * item.gap)
            engine.next_event()
        now += item.gap
        match item.kind:
            case "submit":
                engine.submit(now, number, f"key {item.key}", item.prompt, item.new)
                seen.submitted[number] = item
            case "cancel":
                if engine.cancel(now, item.which):
                    seen.cancelled.append(item.which)
            case "suspend":
                assert engine.suspend(now) >= now
            case "resume":
                engine.resume(now)
            case "drop":
                assert engine.drop_caches(now) >= now
            case "slow":
                seen.finished += engine.advance(now)
                engine.slowdown = 1 + item.which
        assert engine.kv_tokens + engine.cached_tokens <= engine.capacity + engine.running
    engine.resume(now)
    while (at := engine.next_event()) is not None:
        assert at >= now
        now = at
        seen.finished += engine.advance(now)
    return seen


@given(INPUTS, LIMITS)
@settings(max_examples=400, deadline=None)
def test_each_request_finishes_once_or_is_cancelled(
    inputs: list[Input], limits: tuple[int, int, int]
) -> None:
    seen = play(inputs, limits)
    assert sorted([done.id for done in seen.finished] + seen.cancelled) == list(seen.submitted)
    times = [done.time for done in seen.finished]
    assert times == sorted(times)
    for done in seen.finished:
        assert done.tokens == seen.submitted[done.id].new
        assert 0 <= done.cached < seen.submitted[done.id].prompt
    engine = seen.engine
    assert (engine.running, engine.waiting, engine.kv_tokens) == (0, 0, 0)
    assert engine.cached_tokens <= engine.capacity


@given(INPUTS, LIMITS)
@settings(max_examples=200, deadline=None)
def test_tokens_are_conserved(inputs: list[Input], limits: tuple[int, int, int]) -> None:
    seen = play(inputs, limits)
    engine = seen.engine
    sampled = sum(done.tokens for done in seen.finished)
    prompts = sum(seen.submitted[done.id].prompt - done.cached for done in seen.finished)
    assert engine.tokens_decoded >= sampled
    if not seen.cancelled:
        assert engine.tokens_decoded == sampled
    if not engine.preemptions:  # else it may find more under its key when it comes back
        assert engine.tokens_prefilled >= prompts
        if not seen.cancelled and all(item.kind != "drop" for item in inputs):
            assert engine.tokens_prefilled == prompts


@given(INPUTS, LIMITS, POLLS)
@settings(max_examples=400, deadline=None)
def test_how_often_one_looks_changes_nothing(
    inputs: list[Input], limits: tuple[int, int, int], polls: list[float]
) -> None:
    assert play(inputs, limits, polls).all() == play(inputs, limits).all()


@given(INPUTS, st.integers(0, 2000))
@settings(max_examples=200, deadline=None)
def test_a_suspended_engine_adds_nothing(inputs: list[Input], at_ms: int) -> None:
    engine = BatchingEngine(tiny_costs(400), token_budget=64, max_requests=6)
    for number, item in enumerate(inputs):
        engine.submit(0.0, number, f"key {item.key}", item.prompt, item.new)
    finished = engine.advance(at_ms / 1e4)
    quiet = engine.suspend(at_ms / 1e4)
    finished += engine.advance(quiet)
    alive = [number for number in range(len(inputs)) if number not in {done.id for done in finished}]
    before = [engine.sampled(number) for number in alive]
    busy = engine.busy_s
    assert engine.next_event() is None
    assert engine.advance(quiet + 100) == []
    assert [engine.sampled(number) for number in alive] == before
    assert engine.busy_s == busy
    engine.resume(quiet + 100)
    assert [engine.sampled(number) for number in alive] == before
    rest = drain(engine)
    assert sorted(done.id for done in rest) == alive
    assert all(done.time > quiet + 100 for done in rest)


@given(st.lists(SUBMITS, min_size=1, max_size=12), LIMITS)
@settings(max_examples=200, deadline=None)
def test_never_faster_than_the_hardware(inputs: list[Input], limits: tuple[int, int, int]) -> None:
    kv, budget, steps = limits
    costs = tiny_costs(
        kv, compute_efficiency=1, bandwidth_efficiency=1, step_overhead_s=0, sequence_overhead_s=0
    )
    engine = BatchingEngine(costs, token_budget=budget, max_requests=min(6, budget), max_steps=steps)
    now = 0.0
    for number, item in enumerate(inputs):
        now += item.gap
        engine.submit(now, number, f"key {item.key}", item.prompt, item.new)
    finished = drain(engine)
    cached = {done.id: done.cached for done in finished}
    flops = read = 0.0
    for number, item in enumerate(inputs):
        tokens = item.prompt - cached[number] + item.new - 1
        flops += tokens * 2 * TINY.body_parameters + item.new * 2 * TINY.table_parameters
        read += sum(item.prompt + done for done in range(item.new - 1)) * TINY.kv_bytes_per_token
    read += max(item.new for item in inputs) * TINY.streamed_bytes
    device = costs.hardware
    assert engine.busy_s >= max(flops / device.flops, read / device.memory_bandwidth) * (1 - 1e-9)
    assert engine.busy_s <= finished[-1].time + 1e-9


# --- the scheduler, case by case ------------------------------------------------------------------------


def test_a_turn_prefills_only_what_is_new() -> None:
    engine = BatchingEngine(tiny_costs())
    engine.submit(0.0, 1, "a", 100, 20)
    (first,) = drain(engine)
    assert (first.cached, engine.cached_tokens) == (0, 119)  # the last token sampled was never put in
    engine.submit(first.time, 2, "a", 150, 5)
    engine.submit(first.time, 3, "b", 150, 5)
    engine.advance(first.time + 1e-9)
    assert (engine.kv_tokens, engine.cached_tokens) == (
        300,
        0,
    )  # what a request has taken isn't counted twice
    second, third = drain(engine)
    assert (second.id, second.cached, third.cached) == (2, 119, 0)
    assert engine.tokens_prefilled == 100 + 31 + 150
    engine.submit(third.time, 4, "b", 150, 1)  # all of it is there, but the last token has to be computed
    assert drain(engine)[0].cached == 149


@pytest.mark.parametrize(("key", "cached"), [("a", 101), ("b", 49), ("c", 149)])
def test_the_least_recently_used_context_is_evicted_from_its_end(key: str, cached: int) -> None:
    engine = BatchingEngine(tiny_costs(300))
    now = 0.0
    # a and b have 100 each, a is used again, and c needs 51 tokens more than are free.
    for id, (other, prompt) in enumerate([("a", 100), ("b", 100), ("a", 101), ("c", 150)]):
        engine.submit(now, id, other, prompt, 1)
        now = drain(engine)[0].time
    assert engine.cached_tokens == 300
    engine.submit(now, 4, key, 150, 1)
    assert drain(engine)[0].cached == cached


def test_short_of_memory_the_latest_is_preempted_and_nothing_is_lost() -> None:
    engine = BatchingEngine(tiny_costs(200))
    engine.submit(0.0, 1, "a", 90, 60)
    engine.submit(0.0, 2, "b", 90, 60)
    finished = drain(engine)
    assert [(done.id, done.tokens) for done in finished] == [(1, 60), (2, 60)]
    assert engine.preemptions == 1
    assert engine.tokens_decoded == 120
    # 10 tokens each, then 200 are full. What the first needed more, the second computes again.
    assert 180 < engine.tokens_prefilled < 180 + 101
    alone = BatchingEngine(tiny_costs(200))
    alone.submit(0.0, 1, "a", 90, 60)
    assert finished[1].time > 1.5 * drain(alone)[0].time


def test_no_preemption_with_enough_memory() -> None:
    engine = BatchingEngine(tiny_costs(300))
    engine.submit(0.0, 1, "a", 90, 60)
    engine.submit(0.0, 2, "b", 90, 60)
    assert len({done.time for done in drain(engine)}) == 1
    assert (engine.preemptions, engine.tokens_prefilled) == (0, 180)


def test_new_weights_have_the_whole_context_computed_again() -> None:
    engine = BatchingEngine(tiny_costs())
    engine.submit(0.0, 1, "old", 50, 1)
    now = drain(engine)[0].time
    engine.submit(now, 2, "a", 100, 40)
    while engine.sampled(2) < 10:
        now += 1e-4
        assert engine.advance(now) == []
    quiet = engine.suspend(now)
    engine.advance(quiet)
    kept = engine.sampled(2)
    assert 10 <= kept < 40
    before = engine.tokens_prefilled
    engine.drop_caches(quiet)
    assert (engine.cached_tokens, engine.sampled(2)) == (0, kept)
    engine.resume(quiet + 1)
    (done,) = drain(engine)
    assert done.tokens == 40
    assert engine.tokens_prefilled == before + 100 + kept
    assert engine.tokens_decoded == 1 + 40
    engine.submit(done.time, 3, "old", 60, 1)
    assert drain(engine)[0].cached == 0


def test_a_drop_while_it_runs_waits_for_the_step() -> None:
    engine = BatchingEngine(tiny_costs())
    engine.submit(0.0, 1, "a", 100, 40)
    first = engine.next_event()
    assert first is not None
    assert engine.drop_caches(first / 2) == pytest.approx(first)
    engine.advance(first)
    assert engine.sampled(1) == 1
    drain(engine)
    assert (engine.tokens_prefilled, engine.tokens_decoded) == (100 + 101, 40)


def test_a_long_prompt_goes_in_chunks_and_others_decode_meanwhile() -> None:
    engine = BatchingEngine(tiny_costs(), token_budget=11, max_requests=11)
    engine.submit(0.0, 1, "a", 11, 30)
    at = engine.next_event()
    assert at is not None
    engine.advance(at)
    engine.submit(at, 2, "b", 40, 2)
    for step in range(1, 5):  # each gives the one that decodes a token and the prompt 10
        at = engine.next_event()
        assert at is not None
        assert engine.advance(at) == []
        assert (engine.sampled(1), engine.sampled(2)) == (1 + step, int(step == 4))
        assert engine.tokens_prefilled == 11 + 10 * step


def test_only_so_many_run_and_first_come_first_served() -> None:
    engine = BatchingEngine(tiny_costs(), max_requests=2)
    for id in range(4):
        engine.submit(0.0, id, str(id), 10, 10 + id)
    assert engine.next_event() is not None
    engine.advance(1e-9)
    assert (engine.running, engine.waiting) == (2, 2)
    assert [done.id for done in drain(engine)] == [0, 1, 2, 3]


def test_a_cancelled_request_makes_room() -> None:
    engine = BatchingEngine(tiny_costs(150))
    engine.submit(0.0, 1, "a", 100, 50)
    engine.submit(0.0, 2, "b", 100, 5)
    at = engine.next_event()
    assert at is not None
    engine.advance(at)
    assert (engine.running, engine.waiting) == (1, 1)
    assert engine.cancel(at, 1)
    assert not engine.cancel(at, 1)
    (done,) = drain(engine)
    assert done.id == 2
    assert not engine.cancel(done.time, 2)


def test_many_steps_at_once_are_as_long_as_one_by_one() -> None:
    times = []
    for steps in (1, 16, 256):
        engine = BatchingEngine(tiny_costs(), max_steps=steps)
        for id in range(4):
            engine.submit(0.01 * id, id, str(id), 100, 300 + 7 * id)
        times.append([done.time for done in drain(engine)])
    assert times[1] == pytest.approx(times[0], rel=1e-3)
    assert times[2] == pytest.approx(times[0], rel=1e-3)


def test_twice_as_slow_takes_twice_as_long() -> None:
    ends = []
    for factor in (1.0, 2.0):
        engine = BatchingEngine(tiny_costs())
        engine.slowdown = factor
        engine.submit(0.0, 1, "a", 100, 30)
        ends.append(drain(engine)[0].time)
    assert ends[1] == pytest.approx(2 * ends[0])


@pytest.mark.parametrize("asked", [False, True])
def test_a_slowdown_begins_at_the_next_event_whether_that_was_asked_for_or_not(asked: bool) -> None:
    engine = BatchingEngine(tiny_costs())
    engine.submit(0.0, 1, "a", 100, 2)
    if asked:
        engine.next_event()
    engine.slowdown = 3.0
    ends = [engine.next_event()]
    engine.advance(ends[0] or 0.0)
    ends.append(engine.next_event())
    costs = tiny_costs()
    first = costs.step_s(100, 0, 0, 0, samples=1)
    assert ends == pytest.approx([first, first + 3 * costs.step_s(0, 0, 1, 100)])


def test_bad_input_is_refused() -> None:
    engine = BatchingEngine(tiny_costs(100))
    engine.submit(1.0, 1, "a", 50, 51)
    for call, message in [
        (lambda: engine.submit(1.0, 1, "a", 1, 1), "already there"),
        (lambda: engine.submit(1.0, 2, "a", 50, 52), "needs 101 tokens of KV cache: there are 100"),
        (lambda: engine.submit(1.0, 2, "a", 0, 5), "0 tokens of prompt"),
        (lambda: engine.advance(0.5), "time went back"),
        (lambda: setattr(engine, "slowdown", 0.0), "0.0 times as slow"),
        (lambda: BatchingEngine(tiny_costs(), token_budget=8, max_requests=9), "must be 1 to token_budget"),
        (lambda: EngineCosts(H800, QWEN3_32B, tensor_parallel=3), "can't be divided among 3 devices"),
        (lambda: EngineCosts(H800, QWEN3_32B, memory_utilization=0.8), "doesn't fit: 65.5 GB of weights"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert [done.id for done in drain(engine)] == [1]


# --- against measurements -------------------------------------------------------------------------------
# vLLM 0.30, Qwen3-8B in bf16 on one H100 SXM (an H800's compute and memory): github.com/tgarg01/silybench-data, run
# 20260924T125045Z_h100-80gbx1_qwen3-8b_bf16, CC BY 4.0. The efficiencies were taken from its times to the first token
# and between tokens (engine_costs.py), not from these throughputs.


def test_kv_cache_of_the_measured_engine() -> None:
    assert EngineCosts(H800, QWEN3_8B).kv_capacity == pytest.approx(377024, rel=0.01)


# Points whose prompts may have been in the server's prefix cache, from the point before, are left out: where all of
# them fit and the prompt matters, the time to the first token shows that they were.
@pytest.mark.parametrize(
    ("prompt", "new", "users", "requests_per_s"),
    [
        (128, 1024, 1, 0.1422),
        (128, 1024, 32, 3.819),
        (128, 1024, 128, 10.06),
        (128, 1024, 384, 13.27),
        (1024, 128, 1, 1.102),
        (1024, 128, 128, 26.16),
        (1024, 128, 256, 28.26),
        (2048, 2048, 64, 1.691),
        (2048, 2048, 128, 1.913),  # more than fit: it preempts
        (8192, 512, 7, 0.9796),
        (8192, 512, 32, 1.858),
        (8192, 512, 128, 1.942),
    ],
)
def test_throughput_is_near_the_measured_one(
    prompt: int, new: int, users: int, requests_per_s: float
) -> None:
    """A closed loop, as measured: a user's next request comes when the last has finished; 5 each, at least 50."""
    engine = BatchingEngine(EngineCosts(H800, QWEN3_8B))
    total = max(50, 5 * users)
    for id in range(users):
        engine.submit(0.0, id, str(id), prompt, new)
    sent, end = users, 0.0
    while (at := engine.next_event()) is not None:
        for done in engine.advance(at):
            end = done.time
            if sent < total:
                engine.submit(at, sent, str(sent), prompt, new)
                sent += 1
    assert total / end == pytest.approx(requests_per_s, rel=0.1)
