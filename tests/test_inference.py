"""The inference worker over a real vLLM engine: what it says of tokens, versions and weights is true."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollart.packing import pack_ids, unpack_floats, unpack_ids
from rollart.protocol import Cancel, FailureKind, Suspend
from rollart.workers.inference import InferenceWorker
from rollart.workers.worker import Deterministic, Lost
from tests.engines import (
    CANARY,
    EOS,
    EXACT,
    NOWHERE,
    PROMPT,
    VOCABULARY,
    DrivenWorker,
    config_for,
    largest_gap,
    logprobs_under,
    random_mixture,
    random_model,
    save_shape,
    saved_weights,
    until,
    weights_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


# --- what is sampled ----------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_the_distribution_that_was_sampled(untied_worker: DrivenWorker) -> None:
    model = random_model(1)
    version, _ = await untied_worker.serve_weights(weights_of(model))
    allowed = [5, 17, 40, 41, 77]
    answers = await asyncio.gather(
        *(
            untied_worker.generate(PROMPT[: 5 + i], 12, temperature=0.7, allowed_token_ids=pack_ids(allowed))
            for i in range(8)
        )
    )
    for i, answer in enumerate(answers):
        ids = unpack_ids(answer.ids)
        prompt = PROMPT[: 5 + i]
        assert len(ids) == 12
        assert set(ids) <= set(allowed)
        assert answer.finish_reason == "length"
        assert [(run.version, run.count) for run in answer.versions] == [(version, 12)]
        found = unpack_floats(answer.logprobs)
        expected = logprobs_under(model, prompt + ids, len(prompt), temperature=0.7, allowed=allowed)
        assert largest_gap(found, expected) < EXACT
        assert all(value <= 0.0 for value in found)
    assert len({answer.ids for answer in answers}) > 1


async def test_greedy_takes_the_likeliest_token_and_asks_for_no_logprobs(untied_worker: DrivenWorker) -> None:
    model = random_model(2)
    await untied_worker.serve_weights(weights_of(model))
    answer = await untied_worker.generate(PROMPT, 6, temperature=0.0)
    assert answer.logprobs == b""
    ids = list(PROMPT)
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert unpack_ids(answer.ids) == ids[len(PROMPT) :]


async def test_one_allowed_token_has_probability_one(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    answer = await untied_worker.generate(PROMPT, 3, allowed_token_ids=pack_ids([9]))
    assert unpack_ids(answer.ids) == [9, 9, 9]
    assert unpack_floats(answer.logprobs) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("token", "stops"), [(EOS, b""), (30, pack_ids([30, 31]))])
async def test_the_end_of_an_answer_stays_in_it(
    untied_worker: DrivenWorker, token: int, stops: bytes
) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    answer = await untied_worker.generate(
        PROMPT, 5, ignore_eos=False, allowed_token_ids=pack_ids([token]), stop_token_ids=stops
    )
    assert unpack_ids(answer.ids) == [token]
    assert answer.finish_reason == "stop"


async def test_a_seed_repeats_an_answer(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    first, second = [await untied_worker.generate(PROMPT, 16, seed=5) for _ in range(2)]
    assert first.ids == second.ids


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (list(range(4, 90)) * 6, "the engine refused"),
        ([], "the engine refused"),
        ([5, VOCABULARY], f"the model knows 0 to {VOCABULARY - 1}"),
        ([5, -1], f"the model knows 0 to {VOCABULARY - 1}"),
    ],
    ids=["too long", "empty", "no such token", "negative"],
)
async def test_a_request_that_can_never_be_served_harms_only_itself(
    untied_worker: DrivenWorker, prompt: list[int], reason: str
) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    with pytest.raises(Deterministic, match=reason):
        await untied_worker.generate(prompt, 4)
    assert len(unpack_ids((await untied_worker.generate(PROMPT, 2)).ids)) == 2


# --- weights ------------------------------------------------------------------------------------------------


async def test_an_update_in_mid_answer_switches_exactly_where_the_versions_say(
    untied_worker: DrivenWorker,
) -> None:
    await update_in_mid_answer(untied_worker, tied=False)


async def test_so_it_does_when_the_embedding_is_the_head(tied_worker: DrivenWorker) -> None:
    await update_in_mid_answer(tied_worker, tied=True)


async def update_in_mid_answer(driven: DrivenWorker, *, tied: bool) -> None:
    old, new = random_model(3, tied=tied), random_model(4, tied=tied)
    before, _ = await driven.serve_weights(weights_of(old))
    await driven.generate(PROMPT, 40)
    started = time.perf_counter()
    await driven.generate(PROMPT, 40)
    generating = asyncio.create_task(driven.generate(PROMPT, 200))
    await asyncio.sleep(time.perf_counter() - started)
    after, canary = await driven.serve_weights(weights_of(new))
    answer = await generating

    ids, found = unpack_ids(answer.ids), unpack_floats(answer.logprobs)
    assert [run.version for run in answer.versions] == [before, after]
    switch = answer.versions[0].count
    assert 0 < switch < 200
    under_old = logprobs_under(old, PROMPT + ids, len(PROMPT))
    under_new = logprobs_under(new, PROMPT + ids, len(PROMPT))
    assert largest_gap(found[:switch], under_old[:switch]) < EXACT
    assert largest_gap(found[switch:], under_new[switch:]) < EXACT
    assert abs(found[switch - 1] - under_new[switch - 1]) > EXACT
    assert abs(found[switch] - under_old[switch]) > EXACT
    assert largest_gap(canary, logprobs_under(new, CANARY, 1)) < EXACT


async def test_the_canary_sees_a_wrong_weight(untied_worker: DrivenWorker) -> None:
    model = random_model(5)
    wrong = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    wrong["model.layers.1.mlp.up_proj.weight"][3] += 0.2
    _, canary = await untied_worker.serve_weights(wrong)
    assert largest_gap(canary, logprobs_under(model, CANARY, 1)) > 1e-3
    _, canary = await untied_worker.serve_weights(weights_of(model))
    assert largest_gap(canary, logprobs_under(model, CANARY, 1)) < EXACT


async def test_the_prefix_cache_never_crosses_a_version(untied_worker: DrivenWorker) -> None:
    prompt = [4 + (j * 11) % 90 for j in range(300)]
    for seed in (6, 7):
        model = random_model(seed)
        await untied_worker.serve_weights(weights_of(model))
        for cached in (False, True):
            answer = await untied_worker.generate(prompt, 4)
            assert (answer.cached_tokens > 0) == cached
            ids = unpack_ids(answer.ids)
            expected = logprobs_under(model, prompt + ids, len(prompt))
            assert largest_gap(unpack_floats(answer.logprobs), expected) < EXACT


async def test_finished_answers_wait_for_resume(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    version, manifest = untied_worker.publish(weights_of(random_model(2)))
    engine = untied_worker.worker.engine
    assert engine is not None
    await untied_worker.pull(version, manifest)
    await untied_worker.suspend()
    generating = asyncio.create_task(untied_worker.generate(PROMPT, 20))
    await until(lambda: engine.live == 1)
    await untied_worker.update(version)
    await until(lambda: engine.live == 0)
    await asyncio.sleep(0.05)
    assert not generating.done()
    await untied_worker.resume()
    answer = await generating
    assert answer.versions[-1].version == version


async def test_suspend_stops_the_engine_and_resume_without_an_update_goes_on(
    untied_worker: DrivenWorker,
) -> None:
    version, _ = await untied_worker.serve_weights(weights_of(random_model(1)))
    engine = untied_worker.worker.engine
    assert engine is not None
    generating = asyncio.create_task(untied_worker.generate(PROMPT, 200))
    await until(lambda: engine.live == 1)
    await untied_worker.suspend()
    await asyncio.sleep(0.5)
    assert not generating.done()
    await untied_worker.resume()
    assert [run.version for run in (await generating).versions] == [version]


async def test_an_update_wants_a_suspended_engine_and_the_pulled_version(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    version, manifest = untied_worker.publish(weights_of(random_model(2)))
    with pytest.raises(Deterministic, match="suspend it before"):
        await untied_worker.update(version)
    await untied_worker.suspend()
    with pytest.raises(Deterministic, match=f"has not pulled version {version}"):
        await untied_worker.update(version)
    with pytest.raises(Deterministic, match=f"is of version {version}, not of 999"):
        await untied_worker.pull(999, manifest)
    await untied_worker.resume()
    assert unpack_ids((await untied_worker.generate(PROMPT, 2)).ids)


async def test_the_newest_pull_stands(untied_worker: DrivenWorker) -> None:
    models = [random_model(8), random_model(9)]
    published = [untied_worker.publish(weights_of(model)) for model in models]
    for version, manifest in published:
        await untied_worker.pull(version, manifest)
    await untied_worker.suspend()
    canary = await untied_worker.update(published[1][0])
    await untied_worker.resume()
    assert largest_gap(canary, logprobs_under(models[1], CANARY, 1)) < EXACT


async def test_damaged_weights_never_reach_the_engine(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    version, manifest = untied_worker.publish(weights_of(random_model(2)))
    bucket = next(path for path in Path(manifest).parent.iterdir() if path.name != "manifest")
    content = bytearray(bucket.read_bytes())
    content[1000] ^= 1
    bucket.write_bytes(content)
    with pytest.raises(Lost, match=bucket.name):
        await untied_worker.pull(version, manifest)


# --- cancelling ---------------------------------------------------------------------------------------------


async def test_a_storm_of_cancels_leaves_no_request_and_each_is_acknowledged(
    untied_worker: DrivenWorker,
) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    worker, said = untied_worker.worker, []
    engine = worker.engine
    assert engine is not None
    answers = type("Said", (), {"add": lambda self, message: said.append(message)})()
    worker._closed = False
    requests = [untied_worker.request([*PROMPT, 5 + n % 90], 400) for n in range(1000)]
    for request in requests:
        worker._take(request, [], answers)
    await until(lambda: engine.live == 1000, timeout_s=60)
    await asyncio.sleep(0.3)  # some run, most wait
    for request in requests:
        worker._take(Cancel(request.seq), [], answers)
    await until(lambda: engine.live == 0 and len(said) == 1000, timeout_s=30)
    assert {(message.seq, message.kind) for message in said} == {
        (request.seq, FailureKind.CANCELLED) for request in requests
    }
    core = engine._llm.engine_core
    async with asyncio.timeout(30):
        while await core.call_utility_async("has_work"):
            await asyncio.sleep(0.02)
    assert len(unpack_ids((await untied_worker.generate(PROMPT, 4)).ids)) == 4


async def test_a_cancelled_request_is_gone_from_the_engine(untied_worker: DrivenWorker) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    engine = untied_worker.worker.engine
    assert engine is not None
    core = engine._llm.engine_core
    requests = [asyncio.create_task(untied_worker.generate(PROMPT, 450)) for _ in range(4)]
    await until(lambda: engine.live == 4)
    await asyncio.sleep(0.1)
    assert await core.call_utility_async("has_work")
    for task in requests:
        task.cancel()
    await asyncio.wait(requests)
    assert all(task.cancelled() for task in requests)
    assert engine.live == 0
    async with asyncio.timeout(5):
        while await core.call_utility_async("has_work"):
            await asyncio.sleep(0.01)
    assert len(unpack_ids((await untied_worker.generate(PROMPT, 3)).ids)) == 3


# --- answers that can't be true -----------------------------------------------------------------------------


async def test_what_can_not_be_true_is_never_passed_on() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    from rollart.workers.vllm_engine import EngineError, _logprobs_of, _versions_of

    def answer(values: list[float], tokens: list[int], *spans: tuple[str, int, int]) -> CompletionOutput:
        logprobs = FlatLogprobs(token_ids=tokens, logprobs=values)
        versions = [WeightVersionSpan(*span) for span in spans]
        return CompletionOutput(0, "", [7, 8], None, logprobs, weight_versions=versions)

    good = answer([-0.5, 5e-7], [7, 8], ("3", 0, 1), ("4", 1, 1), ("5", 1, 2))
    assert _logprobs_of(good, [7, 8]) == [-0.5, 0.0]
    assert [(run.version, run.count) for run in _versions_of(good, 2)] == [(3, 1), (5, 1)]
    for values, tokens in ([[-0.5, 1e-3], [7, 8]], [[-0.5, math.nan], [7, 8]], [[-0.5, -math.inf], [7, 8]]):
        with pytest.raises(EngineError, match="not finite"):
            _logprobs_of(answer(values, tokens), [7, 8])
    with pytest.raises(EngineError, match="other tokens"):
        _logprobs_of(answer([-0.5, -0.5], [7, 9]), [7, 8])
    for spans in ([("3", 0, 1)], [("3", 1, 2)], [("default", 0, 2)], []):
        with pytest.raises(EngineError, match="weight versions"):
            _versions_of(answer([], [], *spans), 2)


async def test_a_worker_without_an_engine_refuses() -> None:
    with pytest.raises(RuntimeError, match="not set up"):
        await InferenceWorker(NOWHERE, name="early").serve(Suspend(1), [])


# --- other engines ------------------------------------------------------------------------------------------


async def _serves_what_is_published(
    tmp_path: Path, models: list[PreTrainedModel], **inference: object
) -> None:
    """An engine of its own: after each update its canary is that of Hugging Face."""
    (tmp_path / "shape").mkdir()
    shape = save_shape(models[0], tmp_path / "shape")
    with tempfile.TemporaryDirectory(prefix="rollart-test-", dir="/dev/shm") as store:
        driven = DrivenWorker(shape, Path(store), config_for(**inference))
        try:
            await driven.worker.setup()
            for number, model in enumerate(models):
                tensors = saved_weights(model, tmp_path / str(number))
                _, canary = await driven.serve_weights(tensors)
                assert largest_gap(canary, logprobs_under(model, CANARY, 1)) < EXACT
        finally:
            await driven.worker.teardown()


async def test_an_update_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """vLLM packs the experts' weights for a CPU when they are first loaded, and by itself not again."""
    await _serves_what_is_published(tmp_path, [random_mixture(seed) for seed in (1, 2)])


async def test_an_engine_that_is_divided_over_processes(tmp_path: Path) -> None:
    models = [random_model(seed, tied=True) for seed in (1, 2)]
    await _serves_what_is_published(tmp_path, models, tensor_parallel=2)
