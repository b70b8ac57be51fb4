"""The inference worker as a process: how it lives, and that it ends whole, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import torch
import zmq

from rollart.packing import pack_ids, unpack_floats
from rollart.peer import Peer
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
    Pulled,
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
from rollart.weights.tensors import buffers_of
from tests.engines import (
    CANARY,
    EOS,
    EXACT,
    PROMPT,
    DrivenWorker,
    config_for,
    largest_gap,
    logprobs_under,
    random_model,
    save_shape,
    until,
    weights_of,
)

pytestmark = pytest.mark.engine

Answer = TypeVar("Answer", bound=Message)


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
            messages = decode_to_controller(self.socket.recv_multipart()[1])
            self.waiting += [message for message in messages if not isinstance(message, Beat)]

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
        "control", Welcome(config, str(folder), str(model_dir), str(folder / "store"), "", "", 0.5, 300.0)
    )
    return controller.receive(Ready, timeout_s=180)


def swap(
    controller: Controller, store: LocalStore, version: int, tensors: dict[str, torch.Tensor]
) -> Message:
    """Publish, pull, suspend and update; the answer to the update."""
    manifest = store.publish(version, buffers_of(tensors.items()))
    seq = controller.next_seq
    controller.call("control", Pull(seq(), version, manifest), Pulled)
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


def test_an_idle_worker_whose_engine_dies_fails_with_the_reason(
    tmp_path: Path, controller: Controller, worker_process: psutil.Popen
) -> None:
    welcome(controller, tmp_path)
    members = worker_process.children(recursive=True)
    worker_process.family.extend(members)
    (engine,) = [each for each in members if "EngineCore" in " ".join([each.name(), *each.cmdline()])]
    engine.send_signal(signal.SIGKILL)
    assert controller.receive(Goodbye, timeout_s=5).reason == "the engine's process died (exit code -9)"
    assert worker_process.wait(10) == 1
    assert _engines(set(members)) == []
    assert list((tmp_path / "store").iterdir()) == []
    log = (tmp_path / "log").read_text()
    assert "worker engine fails: the engine's process died (exit code -9)" in log
