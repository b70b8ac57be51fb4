"""Prefill on one vLLM engine, decode on another: what comes of it, and what survives it.

Both engines can do both, so each test says who does what.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence

import psutil
import pytest
import pytest_asyncio

from rollart.packing import unpack_ids
from rollart.protocol import Generated, Message, Progress, Release
from rollart.workers.worker import Lost
from tests.engines import DrivenWorker, config_for, random_model, save_shape, until, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

POOLS = [{"hardware": "H800", "phase": "prefill"}, {"hardware": "H20", "phase": "decode"}]
BLOCK = 128
"""Tokens of a block of keys and values, on CPU."""


class Said:
    """What a worker says unasked."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        self.messages.append(message)


class Two:
    """Two workers that serve the same version."""

    def __init__(self, a: DrivenWorker, b: DrivenWorker) -> None:
        self.a, self.b = a, b
        self.version = -1
        self._first = iter(range(5, 90))

    def prompt(self, count: int = 300) -> list[int]:
        """One that no engine has seen."""
        first = next(self._first)
        return [first, *(5 + (j * 7 + first) % 90 for j in range(count - 1))]

    async def serve(self, seed: int) -> None:
        """Weights of ``random_model(seed)`` on both, as the next version."""
        tensors = weights_of(random_model(seed))
        (self.version, _), (other, _) = [await worker.serve_weights(tensors) for worker in (self.a, self.b)]
        assert self.version == other

    async def prefill(self, at: DrivenWorker, prompt: Sequence[int]) -> Generated:
        first = await at.generate(prompt, 1, temperature=0.0, prefill=True)
        assert first.kv
        return first

    async def decode(
        self, at: DrivenWorker, prompt: Sequence[int], first: Generated, count: int = 24
    ) -> Generated:
        (run,) = first.versions
        return await at.generate(prompt, count, temperature=0.0, kv=first.kv, kv_version=run.version)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    config = config_for(pools=POOLS, progress_every_s=0.05)
    model_dir = save_shape(random_model(0), folder / "model")
    workers = [
        DrivenWorker(model_dir, folder / name, config, name=name, hardware=hardware)
        for name, hardware in (("a", "H800"), ("b", "H20"))
    ]
    try:
        for worker in workers:
            worker.worker._say_data = Said()  # type: ignore[assignment]
            await worker.worker.setup()
        yield Two(*workers)
    finally:
        for worker in workers:
            await worker.worker.teardown()


def live(worker: DrivenWorker) -> int:
    assert worker.worker.engine is not None
    return worker.worker.engine.live


async def at_rest(worker: DrivenWorker) -> None:
    """The engine has no work: no request, and nothing held for another engine."""
    assert worker.worker.engine is not None
    core = worker.worker.engine._llm.engine_core
    async with asyncio.timeout(10):
        while await core.call_utility_async("has_work"):
            await asyncio.sleep(0.02)


async def test_greedy_answers_are_those_of_one_engine_and_the_decoder_computes_no_prompt(two: Two) -> None:
    await two.serve(1)
    for count in (20, BLOCK, 300):
        prompt = two.prompt(count)
        first = await two.prefill(two.a, prompt)
        assert first.cached_tokens == 0
        answer = await two.decode(two.b, prompt, first)
        # The last position is computed once more, for the first token's distribution.
        assert answer.cached_tokens >= len(prompt) - 1
        assert answer.ids == (await two.a.generate(prompt, 24, temperature=0.0)).ids
    await at_rest(two.a)


async def test_the_next_turn_fetches_only_what_the_decoder_does_not_have(two: Two) -> None:
    await two.serve(1)
    prompt = two.prompt()
    answer = await two.decode(two.b, prompt, await two.prefill(two.a, prompt))
    longer = [*prompt, *unpack_ids(answer.ids), *two.prompt(40)]
    first = await two.prefill(two.a, longer)
    assert first.cached_tokens == len(prompt) // BLOCK * BLOCK
    answer = await two.decode(two.b, longer, first)
    assert answer.cached_tokens >= len(longer) - 1
    assert answer.ids == (await two.a.generate(longer, 24, temperature=0.0)).ids


async def test_either_engine_does_either_part(two: Two) -> None:
    await two.serve(2)
    prompt = two.prompt()
    answer = await two.decode(two.a, prompt, await two.prefill(two.b, prompt))
    assert answer.cached_tokens >= len(prompt) - 1
    assert answer.ids == (await two.b.generate(prompt, 24, temperature=0.0)).ids


async def test_what_an_old_version_computed_is_never_decoded_with_a_new_one(two: Two) -> None:
    await two.serve(3)
    old = two.version
    prompts = [two.prompt() for _ in range(3)]
    expected = [(await two.a.generate(p, 24, temperature=0.0)).ids for p in prompts]
    firsts = [await two.prefill(two.a, p) for p in prompts]
    assert {run.version for first in firsts for run in first.versions} == {old}

    # The prefiller takes new weights while it holds prompts: they are the old version's, for whoever serves that.
    await two.a.serve_weights(weights_of(random_model(4)))
    on_new = await two.a.generate(prompts[0], 24, temperature=0.0)
    assert on_new.cached_tokens == 0
    assert on_new.ids != expected[0]
    answer = await two.decode(two.b, prompts[0], firsts[0])
    assert answer.cached_tokens >= len(prompts[0]) - 1
    assert answer.ids == expected[0]

    # The decoder takes them while keys and values are on their way to it.
    fetching = asyncio.create_task(two.decode(two.b, prompts[1], firsts[1], 200))
    await asyncio.sleep(0)
    await two.b.serve_weights(weights_of(random_model(4)))
    with pytest.raises(Lost, match="took new weights while"):
        await fetching
    with pytest.raises(Lost, match="was prefilled with"):
        await two.decode(two.b, prompts[2], firsts[2])
    again = await two.decode(two.b, prompts[0], await two.prefill(two.a, prompts[0]))
    assert again.ids == on_new.ids
    for worker in (two.a, two.b):
        await at_rest(worker)


async def test_an_update_after_the_first_token_goes_on_with_the_answer(two: Two) -> None:
    await two.serve(5)
    old, prompt = two.version, two.prompt()
    first = await two.prefill(two.a, prompt)
    decoding = asyncio.create_task(two.decode(two.b, prompt, first, 150))
    engine = two.b.worker.engine
    assert engine is not None
    await until(lambda: any(engine.progress(name, 0) for name in two.b.worker._arriving))
    await two.serve(6)
    answer = await decoding
    assert [run.version for run in answer.versions] == [old, two.version]
    ids = unpack_ids(answer.ids)
    before = answer.versions[0].count
    rest = await two.a.generate([*prompt, *ids[:before]], 150 - before, temperature=0.0)
    assert unpack_ids(rest.ids) == ids[before:]


async def test_an_abort_in_any_phase_leaves_nothing_behind(two: Two) -> None:
    await two.serve(1)
    prompt = two.prompt()
    prefilling = asyncio.create_task(two.prefill(two.a, prompt))
    await until(lambda: live(two.a) == 1)
    prefilling.cancel()
    held = await two.prefill(two.a, two.prompt())
    assert await two.b.worker.serve(Release(held.kv), []) is None
    for wait_s in (0.0, 0.005, 0.05, 0.3):
        first = await two.prefill(two.a, prompt := two.prompt())
        decoding = asyncio.create_task(two.decode(two.b, prompt, first, 200))
        await asyncio.sleep(wait_s)
        decoding.cancel()
        await asyncio.wait({decoding})
    for worker in (two.a, two.b):
        await until(lambda worker=worker: live(worker) == 0)
        await at_rest(worker)
    answer = await two.decode(two.b, prompt, await two.prefill(two.a, prompt))
    assert answer.ids == (await two.a.generate(prompt, 24, temperature=0.0)).ids


async def test_what_is_reported_on_the_way_is_the_beginning_of_the_answer(two: Two) -> None:
    await two.serve(1)
    said = two.b.worker._say_data
    assert isinstance(said, Said)
    said.messages.clear()
    request = two.b.request(two.prompt(), 200)
    answer = await two.b.ask(request)
    assert isinstance(answer, Generated)
    parts = [m for m in said.messages if isinstance(m, Progress) and m.seq == request.seq]
    assert parts
    assert answer.ids.startswith(b"".join(part.ids for part in parts))
    assert answer.logprobs.startswith(b"".join(part.logprobs for part in parts))
    assert {run.version for part in parts for run in part.versions} == {two.version}

    # Another engine goes on from there, and ends with what the first would have said.
    prompt = two.prompt()
    whole = await two.a.generate(prompt, 60, temperature=0.0)
    half = await two.a.generate(prompt, 25, temperature=0.0)
    rest = await two.b.generate([*prompt, *unpack_ids(half.ids)], 35, temperature=0.0)
    assert half.ids + rest.ids == whole.ids


async def test_a_killed_decoder_harms_no_other_request_of_the_prefiller(two: Two) -> None:
    """The last test: one of the engines is dead after it."""
    await two.serve(1)
    prompt = two.prompt()
    expected = await two.a.generate(prompt, 24, temperature=0.0)
    first = await two.prefill(two.a, two.prompt())
    decoding = asyncio.create_task(two.decode(two.b, prompt, first, 200))
    await until(lambda: live(two.b) == 1)
    two.b.worker._end = asyncio.get_running_loop().create_future()
    (engine,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if two.b.worker.engine is not None and process.pid == _core_pid(two.b)
    ]
    engine.send_signal(signal.SIGKILL)
    with pytest.raises(Exception, match="EngineCore encountered"):
        await decoding
    assert (await two.a.generate(prompt, 24, temperature=0.0)).ids == expected.ids
    await two.a.serve_weights(weights_of(random_model(2)))  # with a prompt held that nobody will fetch
    assert (await two.a.generate(prompt, 24, temperature=0.0)).ids != expected.ids


def _core_pid(worker: DrivenWorker) -> int:
    assert worker.worker.engine is not None
    manager = worker.worker.engine._llm.engine_core.resources.engine_manager  # type: ignore[attr-defined]
    (process,) = manager.processes
    return int(process.pid)
