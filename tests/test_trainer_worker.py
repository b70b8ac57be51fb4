"""The trainer worker as its controller sees it: a process at the other end of encrypted sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
import zmq

from rollart.batch_file import batch_path, read_batch
from rollart.config import Config, Trainer
from rollart.packing import pack_floats, pack_ids, unpack_floats
from rollart.peer import Peer
from rollart.protocol import (
    Attach,
    Beat,
    Collect,
    Done,
    Export,
    Failure,
    FailureKind,
    Goodbye,
    Hello,
    Message,
    PruneCheckpoints,
    Publish,
    Published,
    Ready,
    SaveCheckpoint,
    Shutdown,
    Suspend,
    Trained,
    TrainPart,
    TrainStep,
    Welcome,
    decode_to_controller,
    encode,
)
from rollart.weights.local import LocalStore
from rollart.weights.tensors import tensors_of
from tests.trainer_case import frames_of, make_config, make_groups, reference_model, replaced, write_model

Answer = TypeVar("Answer", bound=Message)
CANARY = list(range(3, 30))


class Controller:
    """One ROUTER socket and one trainer process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, secret = zmq.curve_keypair()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = public, secret
        self.router.bind("tcp://127.0.0.1:*")
        client_public, client_secret = zmq.curve_keypair()
        address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        peer = Peer(address, public.decode(), client_public.decode(), client_secret.decode())
        (folder / "peer.json").write_bytes(msgspec.json.encode(peer))
        self.log = (folder / "log").open("wb")
        options = ["--key-file", str(folder / "peer.json"), "--name", "t", "--parent", str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollart.workers", "trainer", *options],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stderr=self.log,
        )
        self.beats: list[float] = []
        self.messages: list[Message] = []
        self.waiting: list[Message] = []

    def receive(self, timeout_s: float) -> Message:
        """The next message but beats, whose times are noted."""
        end = time.monotonic() + timeout_s
        while self.waiting or self.router.poll(max(0, int(1000 * (end - time.monotonic())))):
            if self.waiting:
                return self.waiting.pop(0)
            for message in decode_to_controller(self.router.recv_multipart()[1]):
                if isinstance(message, Beat):
                    self.beats.append(time.monotonic())
                else:
                    self.waiting.append(message)
        raise TimeoutError(f"silent for {timeout_s} s: {(self.folder / 'log').read_text()[-2000:]}")

    def send(self, message: Message, payload: Sequence[bytes] = (), channel: str = "control") -> None:
        self.router.send_multipart([f"{channel}:t".encode(), encode(message), *payload])

    def ask(self, kind: type[Answer], message: Message, payload: Sequence[bytes] = ()) -> Answer:
        """The answer to ``message``, which must be of that kind."""
        self.send(message, payload, "data" if payload else "control")
        answer = self.receive(60)
        assert isinstance(answer, kind), answer
        assert getattr(answer, "seq", None) == getattr(message, "seq", None)
        return answer

    def start(self, model: Path, config: Config | None = None) -> Ready:
        """Shake hands, and wait until it is ready."""
        first = [self.receive(60), self.receive(60)]
        assert {type(message) for message in first} == {Hello, Attach}
        encoded = msgspec.msgpack.encode(config or make_config())
        self.send(
            Welcome(encoded, str(self.folder), str(model), str(self.folder / "store"), "", "", 0.05, 60.0)
        )
        ready = self.receive(120)
        assert isinstance(ready, Ready), ready
        return ready

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path_factory.mktemp("run"))
    try:
        ready = controller.start(model)
        assert ready.facts["model"] == "qwen3"
        yield controller
        controller.send(Shutdown("the test is over"))
        assert isinstance(controller.receive(30), Goodbye)
        assert controller.process.wait(30) == 0
    finally:
        controller.close()


def canary_of(folder: Path) -> list[float]:
    with torch.no_grad():
        known = reference_model(folder)(torch.tensor([CANARY])).logits[0].log_softmax(-1)
    return [known[place, token].item() for place, token in enumerate(CANARY[1:])]


def test_train_publish_checkpoint_export_and_collect(controller: Controller, model: Path) -> None:
    """The life of two versions, each request asked twice where it is idempotent."""
    folder = controller.folder
    start = controller.ask(Published, Publish(1, 0, 0, pack_ids(CANARY)))
    assert unpack_floats(start.canary_logprobs) == pytest.approx(canary_of(model), abs=1e-4)
    expected = reference_model(model).state_dict()
    del expected["lm_head.weight"]
    with LocalStore(folder / "store").pull(start.manifest) as weights:
        stored = dict(tensors_of(weights))
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], expected[name]) for name in stored)
        assert start.size_bytes == sum(value.nbytes for value in stored.values())
        del stored

    groups = make_groups(reference_model(model), make_config())
    frames = frames_of(groups)
    assert controller.ask(Done, TrainPart(20, 40, 0), frames[:1]) == Done(20)
    early = controller.ask(Failure, TrainStep(21, 40, len(frames), 0, 1.0))
    assert early.message == f"the batch of step 40 has {len(frames)} group(s), but 1 came"
    for seq in (22, 23):
        assert controller.ask(Done, TrainPart(seq, 40, 1), frames[1:]) == Done(seq)
    trained = controller.ask(Trained, TrainStep(2, 40, len(frames), 0, 1.0))
    assert (trained.step_id, trained.version, trained.skipped) == (40, 1, "")
    assert trained.metrics["logprob_gap_max"] < 1e-4
    again = controller.ask(Trained, TrainStep(3, 40, len(frames), 0, 1.0))
    assert again == msgspec.structs.replace(trained, seq=3)
    controller.ask(Done, TrainPart(24, 41, 0), frames)
    refused = controller.ask(Failure, TrainStep(4, 41, len(frames), 0, 1.0))
    assert refused.kind is FailureKind.DETERMINISTIC
    assert "at version 1" in refused.message

    assert controller.ask(Done, Export(5, str(folder / "export"))) == Done(5)
    published = controller.ask(Published, Publish(6, 1, 0, pack_ids(CANARY)))
    assert unpack_floats(published.canary_logprobs) == pytest.approx(canary_of(folder / "export"), abs=1e-4)
    assert published.blocked_s < 5
    repeated = controller.ask(Published, Publish(7, 1, 0, pack_ids(CANARY)))
    assert repeated == msgspec.structs.replace(published, seq=7)
    with LocalStore(folder / "store").pull(published.manifest) as weights:
        bucket = weights.manifest.buckets[0].name
    (Path(published.manifest).parent / bucket).unlink()
    anew = controller.ask(Published, Publish(25, 1, 1, pack_ids(CANARY)))
    assert controller.ask(Published, Publish(26, 1, 1, pack_ids(CANARY))).manifest == anew.manifest
    old = controller.ask(Published, Publish(27, 0, 1, pack_ids(CANARY)))
    assert old.canary_logprobs == start.canary_logprobs, "of the weights of then"
    for stored in (anew, old):
        LocalStore(folder / "store").pull(stored.manifest).close()
    assert "at 1" in controller.ask(Failure, Publish(8, 2, 0, pack_ids(CANARY))).message

    assert controller.ask(Done, Collect(9, 1)) == Done(9)
    assert {each.name.partition("-")[0] for each in (folder / "store").glob("v*")} == {"v1"}
    for seq in (10, 11):
        assert controller.ask(Done, SaveCheckpoint(seq, str(folder / "checkpoint"))) == Done(seq)
    assert (folder / "checkpoint" / "rollart.json").is_file()
    for seq in (20, 21, 22):
        path = folder / "checkpoints" / f"step-{seq:06}"
        assert controller.ask(Done, SaveCheckpoint(seq, str(path))) == Done(seq)
        prune = PruneCheckpoints(seq + 10, str(path), 2)
        assert controller.ask(Done, prune) == Done(seq + 10)
    assert sorted(each.name for each in path.parent.iterdir()) == ["step-000021", "step-000022"]
    assert controller.ask(Failure, Export(12, str(folder / "export"))).kind is FailureKind.DETERMINISTIC
    assert controller.beats


def test_the_batch_of_a_skipped_step_is_kept(controller: Controller, model: Path) -> None:
    (group,) = make_groups(reference_model(model), make_config(), version=1, groups=1)
    never = pack_floats([-1000.0] * sum(group.samples[0].mask))  # as good as impossible for the engine
    group = replaced(replaced(group, 0, reward=-1.0, logprobs=never), 1, reward=1.0)
    controller.ask(Done, TrainPart(50, 60, 0), frames_of([group]))
    trained = controller.ask(Trained, TrainStep(51, 60, 1, 1, 0.0))
    assert trained.skipped
    assert trained.version == 1
    assert read_batch(batch_path(controller.folder, 60)) == [group]


def test_what_a_trainer_does_not_serve_is_refused(controller: Controller) -> None:
    failure = controller.ask(Failure, Suspend(20))
    assert failure.kind is FailureKind.DETERMINISTIC
    assert "Suspend" in failure.message


# --- of several processes ----------------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(each)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        if thread.name != str(pid)
        for each in (thread / "children").read_text().split()
    ]


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.05)


@pytest.fixture
def pair(tmp_path: Path, model: Path) -> Iterator[Controller]:
    """A trainer worker of two processes."""
    controller = Controller(tmp_path)
    try:
        options = Trainer(learning_rate=1e-3, data_parallel=2, distributed_optimizer=True)
        assert controller.start(model, make_config(trainer=options)).facts["processes"] == "2"
        yield controller
    finally:
        controller.close()


def test_two_processes_train_and_publish_and_none_outlives_the_first(pair: Controller, model: Path) -> None:
    frames = frames_of(make_groups(reference_model(model), make_config()))
    assert pair.ask(Done, TrainPart(1, 0, 0), frames) == Done(1)
    assert pair.ask(Trained, TrainStep(2, 0, len(frames), 0, 1.0)).skipped == ""
    published = pair.ask(Published, Publish(3, 1, 0, pack_ids(CANARY)))
    assert pair.ask(Done, Export(4, str(pair.folder / "export"))) == Done(4)
    assert unpack_floats(published.canary_logprobs) == pytest.approx(
        canary_of(pair.folder / "export"), abs=1e-4
    )
    assert pair.ask(Done, SaveCheckpoint(5, str(pair.folder / "checkpoint"))) == Done(5)
    (other,) = children_of(pair.process.pid)
    pair.process.kill()
    wait_for_end(other)


def test_a_trainer_that_lost_a_process_says_so_and_ends(pair: Controller) -> None:
    (other,) = children_of(pair.process.pid)
    os.kill(other, signal.SIGKILL)
    farewell = pair.receive(30)
    assert isinstance(farewell, Goodbye)
    assert farewell.reason == "process 1 of the trainer ended with exit code -9"
    assert pair.process.wait(30) == 1
    assert list((pair.folder / "private").iterdir()) == []
