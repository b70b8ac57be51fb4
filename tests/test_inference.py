"""The inference worker over a real vLLM engine: what it says of tokens, versions and weights is true."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import torch
import zmq

from rollart.packing import pack_ids, unpack_floats, unpack_ids
from rollart.protocol import (
    Attach,
    Beat,
    Done,
    Failure,
    FailureKind,
    Generate,
    Generated,
    Goodbye,
    Hello,
    Message,
    Pull,
    Ready,
    Resume,
    Shutdown,
    Suspend,
    Update,
    Updated,
    Welcome,
    decode_to_controller,
    encode,
)
from rollart.weights.local import LocalStore
from rollart.weights.store import DamagedWeights
from rollart.weights.tensors import buffers_of
from rollart.workers.inference import InferenceWorker
from rollart.workers.worker import Deterministic, Peer
from tests.engines import (
    CANARY,
    EOS,
    NOWHERE,
    VOCABULARY,
    DrivenWorker,
    config_for,
    largest_gap,
    logprobs_under,
    random_model,
    save_shape,
    weights_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPT = [1, *(5 + (j * 7) % 90 for j in range(20))]
EXACT = 1e-4
"""Nats between vLLM and Hugging Face in float32."""
Answer = TypeVar("Answer", bound=Message)


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def engine_of(driven: DrivenWorker) -> object:
    assert driven.worker.engine is not None
    return driven.worker.engine


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
    "prompt", [list(range(4, 90)) * 6, [VOCABULARY + 100], []], ids=["too long", "no such token", "empty"]
)
async def test_a_request_that_can_never_be_served_says_so(
    untied_worker: DrivenWorker, prompt: list[int]
) -> None:
    await untied_worker.serve_weights(weights_of(random_model(1)))
    with pytest.raises(Deterministic, match="the engine refused"):
        await untied_worker.generate(prompt, 4)


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_an_update_in_mid_answer_switches_exactly_where_the_versions_say(
    request: pytest.FixtureRequest, tied: bool
) -> None:
    driven: DrivenWorker = request.getfixturevalue("tied_worker" if tied else "untied_worker")
    old, new = random_model(3, tied=tied), random_model(4, tied=tied)
    before, _ = await driven.serve_weights(weights_of(old))
    generating = asyncio.create_task(driven.generate(PROMPT, 200))
    await asyncio.sleep(0.15)
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
    generating = asyncio.create_task(untied_worker.generate(PROMPT, 60))
    await asyncio.sleep(0.1)
    await untied_worker.pull(version, manifest)
    await untied_worker.suspend()
    await untied_worker.update(version)
    engine = untied_worker.worker.engine
    assert engine is not None
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
    generating = asyncio.create_task(untied_worker.generate(PROMPT, 40))
    await asyncio.sleep(0.05)
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
    with pytest.raises(DamagedWeights, match=bucket.name):
        await untied_worker.pull(version, manifest)


# --- cancelling ---------------------------------------------------------------------------------------------


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


# --- processes ----------------------------------------------------------------------------------------------


async def test_a_worker_that_ends_while_its_engine_starts_leaves_nothing(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    driven = DrivenWorker(save_shape(random_model(0), tmp_path / "model"), tmp_path / "store")
    setup = asyncio.create_task(driven.worker.setup())
    await until(lambda: bool(set(psutil.Process().children(recursive=True)) - before), timeout_s=60)
    await asyncio.sleep(1)
    setup.cancel()
    await driven.worker.teardown()
    assert setup.cancelled()
    await until(lambda: not _engines(set(psutil.Process().children(recursive=True)) - before))
    assert list((tmp_path / "store").iterdir()) == []


def _engines(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Those that run; multiprocessing's resource tracker stays with this process."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            tracker = any("resource_tracker" in word for word in process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not tracker:
                found.append(process)
    return found


class Controller:
    """A CURVE ROUTER that talks to one worker process."""

    def __init__(self, folder: Path) -> None:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_secretkey = server_secret
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        keys = [key.decode() for key in (server_public, client_public, client_secret)]
        self.key_file = folder / "peer.json"
        self.key_file.write_bytes(msgspec.json.encode(Peer(f"tcp://127.0.0.1:{port}", *keys)))
        self.waiting: list[Message] = []
        self.seq = 0

    def send(self, kind: str, message: Message) -> None:
        self.socket.send_multipart([f"{kind}:engine".encode(), encode(message)])

    def receive(self, expect: type[Answer], *, seq: int | None = None, timeout_s: float = 60.0) -> Answer:
        """The next message of that type (answering ``seq``); others are kept, beats are not."""
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self.waiting:
                if isinstance(message, expect) and (seq is None or getattr(message, "seq", None) == seq):
                    self.waiting.remove(message)
                    return message
            assert self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))), (
                f"no {expect.__name__} within {timeout_s:g} s, only {self.waiting}"
            )
            message = decode_to_controller(self.socket.recv_multipart()[1])
            if not isinstance(message, Beat):
                self.waiting.append(message)

    def call(self, kind: str, message: Message, expect: type[Answer]) -> Answer:
        self.send(kind, message)
        return self.receive(expect, seq=message.seq)  # type: ignore[attr-defined]

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def generate(self, count: int) -> Generate:
        seq = self.next_seq()
        return Generate(seq, f"r{seq}", pack_ids(PROMPT), count, 1.0, b"", b"", True, None)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def worker_process(tmp_path: Path, controller: Controller) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-m", "rollart.workers", "inference", "--key-file", str(controller.key_file)]
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen([*command, "--name", "engine"], stdout=log, stderr=subprocess.STDOUT)
    family: list[psutil.Process] = []
    process.family = family
    yield process
    for member in (*family, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(10)


def welcome(controller: Controller, folder: Path) -> Ready:
    """Take the worker in, as a run's controller does, and wait until it is ready."""
    hello = controller.receive(Hello)
    assert hello.role == "inference"
    assert hello.packages["torch"]
    controller.receive(Attach)
    model_dir = save_shape(random_model(0), folder / "model")
    config = msgspec.msgpack.encode(config_for())
    controller.send(
        "control", Welcome(config, str(folder), str(model_dir), str(folder / "store"), 0.5, 300.0)
    )
    return controller.receive(Ready, timeout_s=180)


def swap(
    controller: Controller, store: LocalStore, version: int, tensors: dict[str, torch.Tensor]
) -> Message:
    """Publish, pull, suspend and update; the answer to the update."""
    manifest = store.publish(version, buffers_of(tensors.items()))
    seq = controller.next_seq
    controller.call("control", Pull(seq(), version, manifest), Done)
    controller.call("control", Suspend(seq()), Done)
    return controller.call("control", Update(seq(), version, pack_ids(CANARY)), Message)


def test_the_life_and_the_death_of_a_worker_process(
    tmp_path: Path, controller: Controller, worker_process: psutil.Popen
) -> None:
    ready = welcome(controller, tmp_path)
    worker_process.family.extend(worker_process.children(recursive=True))
    assert ready.capacity == config_for().inference.max_num_seqs
    assert ready.facts["eos_token_ids"] == str(EOS)

    refused = controller.call("data", controller.generate(4), Failure)
    assert refused.kind is FailureKind.INFRASTRUCTURE
    assert "no weights yet" in refused.message

    model, store = random_model(1), LocalStore(tmp_path / "store")
    updated = swap(controller, store, 0, weights_of(model))
    assert isinstance(updated, Updated)
    assert updated.version == 0
    assert largest_gap(unpack_floats(updated.canary_logprobs), logprobs_under(model, CANARY, 1)) < EXACT
    controller.call("control", Resume(controller.next_seq()), Done)
    generated = controller.call("data", controller.generate(8), Generated)
    assert [(run.version, run.count) for run in generated.versions] == [(0, 8)]

    # A version that lacks a part of the model: neither old nor new weights are served from then on.
    in_flight = controller.generate(450)
    controller.send("data", in_flight)
    broken = weights_of(random_model(2))
    del broken["model.layers.1.self_attn.v_proj.weight"]
    failed = swap(controller, store, 1, broken)
    assert isinstance(failed, Failure)
    assert "model.layers.1.self_attn.qkv_proj" in failed.message
    lost = controller.receive(Failure, seq=in_flight.seq)
    assert lost.kind is FailureKind.INFRASTRUCTURE
    for request in (controller.generate(4), Resume(controller.next_seq())):
        answer = controller.call("data", request, Failure)
        assert "the update to version 1 failed" in answer.message

    members = [worker_process, *worker_process.family]
    assert len(members) >= 2
    worker_process.send_signal(signal.SIGKILL)
    _gone, alive = psutil.wait_procs(members, timeout=10)
    assert not alive
    assert [path.name for path in (tmp_path / "store").iterdir() if path.name.startswith("engine-")] == []


def test_shutdown_ends_a_worker_process_at_once_and_whole(
    tmp_path: Path, controller: Controller, worker_process: psutil.Popen
) -> None:
    welcome(controller, tmp_path)
    members = [worker_process, *worker_process.children(recursive=True)]
    worker_process.family.extend(members)
    controller.send("control", Shutdown("the test is over"))
    assert controller.receive(Goodbye).reason == "the test is over"
    _, alive = psutil.wait_procs(members, timeout=10)
    assert not alive
    assert worker_process.returncode == 0
    assert list((tmp_path / "store").iterdir()) == []
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log


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
