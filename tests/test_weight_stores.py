"""What holds for every weight store, and what Mooncake's deaths do to it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from rollart.launch.mooncake import MooncakeServers
from rollart.weights.local import LocalStore
from rollart.weights.mapped import open_weights
from rollart.weights.mooncake import MooncakeStore, UnreachableStore
from rollart.weights.store import MissingWeights, StoreError, Superseded, TransferFailed, WeightStore
from rollart.weights.tensors import buffers_of, tensors_of
from tests.test_weights import assert_same, model

LEASE_S = 0.5
"""After which what was read may be removed."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory, where the product has its own."""
    with tempfile.TemporaryDirectory(prefix="rollart-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
async def servers(memory: Path) -> AsyncIterator[MooncakeServers]:
    (memory / "logs").mkdir()
    servers = MooncakeServers(memory / "logs", nodes=1, node_bytes=64 << 20, lease_s=LEASE_S)
    try:
        await servers.start()
        yield servers
    finally:
        await servers.stop()


def mooncake(servers: MooncakeServers, memory: Path, worker: str) -> MooncakeStore:
    return MooncakeStore(servers.address, memory / worker, run="test", bucket_bytes=1024)


@pytest.fixture(params=["local", "mooncake"])
async def stores(
    request: pytest.FixtureRequest, memory: Path
) -> AsyncIterator[tuple[WeightStore, WeightStore]]:
    """The trainer's and an inference worker's."""
    if request.param == "local":
        yield LocalStore(memory / "store", bucket_bytes=1024), LocalStore(memory / "store")
        return
    (memory / "logs").mkdir()
    servers = MooncakeServers(memory / "logs", nodes=1, node_bytes=64 << 20, lease_s=LEASE_S)
    try:
        await servers.start()
        both = mooncake(servers, memory, "trainer"), mooncake(servers, memory, "inference")
        yield both
        for store in both:
            store.close()
    finally:
        await servers.stop()


async def test_what_one_publishes_another_pulls(stores: tuple[WeightStore, WeightStore]) -> None:
    trainer, inference = stores
    for version in range(3):
        reference = trainer.publish(version, buffers_of(model(version).items()))
        with inference.pull(reference) as weights:
            assert weights.manifest.version == version
            assert len(weights.manifest.buckets) > 1
            assert_same(dict(tensors_of(weights)), model(version))
            assert Path(weights.path).exists()


async def test_a_version_never_changes(stores: tuple[WeightStore, WeightStore]) -> None:
    trainer, inference = stores
    reference = trainer.publish(1, buffers_of(model(1).items()))
    with pytest.raises(StoreError, match="version 1 is in the store"):
        trainer.publish(1, buffers_of(model(2).items()))
    with inference.pull(reference) as weights:
        assert_same(dict(tensors_of(weights)), model(1))


async def test_a_failed_publication_can_be_repeated(stores: tuple[WeightStore, WeightStore]) -> None:
    trainer, inference = stores

    def broken() -> Iterator[tuple[str, str, tuple[int, ...], object]]:
        yield "weight", "float32", (2,), bytes(8)
        raise RuntimeError("the trainer broke")

    with pytest.raises(RuntimeError, match="the trainer broke"):
        trainer.publish(0, broken())
    with pytest.raises(StoreError, match=r"tensor 'weight' has 4 bytes, float32 of shape \(2,\) needs 8"):
        trainer.publish(0, [("weight", "float32", (2,), bytes(4))])
    with inference.pull(trainer.publish(0, buffers_of(model().items()))) as weights:
        assert_same(dict(tensors_of(weights)), model())


async def test_what_was_pulled_outlives_its_version(stores: tuple[WeightStore, WeightStore]) -> None:
    trainer, inference = stores
    references = [trainer.publish(version, buffers_of(model(version).items())) for version in range(3)]
    weights = inference.pull(references[0])
    await asyncio.sleep(3 * LEASE_S if isinstance(trainer, MooncakeStore) else 0)
    trainer.collect(2)
    assert_same(dict(tensors_of(weights)), model(0))
    weights.close()
    for gone in references[:2]:
        with pytest.raises(MissingWeights):
            inference.pull(gone)
    inference.pull(references[2]).close()


async def test_a_pull_that_nobody_wants_any_more_stops_and_leaves_nothing(
    stores: tuple[WeightStore, WeightStore], memory: Path
) -> None:
    trainer, inference = stores
    reference = trainer.publish(0, buffers_of(model(0).items()))
    left = []
    for _ in range(3):
        with pytest.raises(Superseded, match="version 0 is not wanted"):
            inference.pull(reference, stop=lambda: True)
        left.append(sum(1 for _ in memory.rglob("*")))
    assert left == [left[0]] * 3  # memory for the next pull, and nothing of this one
    assert not list(memory.rglob("pulled-*"))
    with inference.pull(reference) as weights:
        assert_same(dict(tensors_of(weights)), model(0))


async def test_a_version_stored_anew_has_another_reference(stores: tuple[WeightStore, WeightStore]) -> None:
    trainer, inference = stores
    first = trainer.publish(0, buffers_of(model(0).items()))
    held = inference.pull(first)
    anew = trainer.publish(0, buffers_of(model(0).items()), anew=True)
    assert anew != first
    for weights in (inference.pull(anew), held, open_weights(held.path, verify=True)):
        assert_same(dict(tensors_of(weights)), model(0))
        weights.close()


async def test_memory_is_used_again_and_never_while_it_is_read(
    stores: tuple[WeightStore, WeightStore], memory: Path
) -> None:
    trainer, inference = stores
    lease_s = 3 * LEASE_S if isinstance(trainer, MooncakeStore) else 0
    reader = inference.pull(trainer.publish(0, buffers_of(model(0).items())))
    engine = open_weights(reader.path, verify=False)  # an engine that outlives its worker's interest
    reader.close()
    sizes = []
    for version in range(1, 6):
        with inference.pull(trainer.publish(version, buffers_of(model(version).items()))) as weights:
            assert_same(dict(tensors_of(weights)), model(version))
        assert_same(dict(tensors_of(engine)), model(0))
        await asyncio.sleep(lease_s)
        trainer.collect(version)
        files = [path for path in memory.rglob("*") if path.is_file() and path.suffix != ".log"]
        files = [path for path in files if path.name != "manifest"]
        sizes.append(sum(path.stat().st_size for path in files))
    assert sizes[2:] == [sizes[2]] * 3
    engine.close()


# --- Mooncake --------------------------------------------------------------------------------------------


async def test_an_address_that_does_not_answer_is_named_at_once(memory: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UnreachableStore, match=r"no Mooncake master answers at '127\.0\.0\.1:9'"):
        MooncakeStore("127.0.0.1:9", memory, run="test")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("server", ["mooncake-node-0", "mooncake-master"])
async def test_after_a_server_was_killed_the_trainer_publishes_again(
    servers: MooncakeServers, memory: Path, server: str
) -> None:
    trainer, inference = (mooncake(servers, memory, name) for name in ("trainer", "inference"))
    lost = trainer.publish(0, buffers_of(model().items()))
    os.kill(servers.pid(server), signal.SIGKILL)
    await asyncio.sleep(0.2)

    def again() -> None:
        """What the controller has them do: pull, and where that fails publish anew."""
        reference, end = lost, time.monotonic() + 40
        while True:
            try:
                with inference.pull(reference) as weights:
                    assert_same(dict(tensors_of(weights)), model())
                return
            except TransferFailed:
                assert time.monotonic() < end
            time.sleep(0.5)
            try:
                reference = trainer.publish(0, buffers_of(model().items()), anew=True)
            except TransferFailed:
                assert time.monotonic() < end

    await asyncio.to_thread(again)
    assert servers.restarts == 1
    trainer.close()
    inference.close()


async def test_a_store_that_is_full_says_what_to_do_and_keeps_what_it_has(
    servers: MooncakeServers, memory: Path
) -> None:
    trainer, inference = (mooncake(servers, memory, name) for name in ("trainer", "inference"))
    kept = trainer.publish(0, buffers_of(model().items()))
    large = {"weight": torch.zeros(80 << 20, dtype=torch.uint8)}
    with pytest.raises(TransferFailed, match=r"no room.*weights\.node_gib"):
        trainer.publish(1, buffers_of(large.items()))
    inference.pull(kept).close()
    trainer.close()
    inference.close()


def changed(tensors: dict[str, torch.Tensor], elements: int) -> dict[str, torch.Tensor]:
    """The same, but for so many elements of each tensor of floats."""
    after = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    for tensor in after.values():
        if tensor.is_floating_point():
            tensor.view(-1)[:elements] += 1
    return after


@pytest.mark.parametrize("held", [False, True])
async def test_only_changes_travel_to_who_has_the_version_before(
    servers: MooncakeServers, memory: Path, held: bool
) -> None:
    trainer, inference, late = (
        MooncakeStore(servers.address, memory / name, run="test", bucket_bytes=1024, delta=True)
        for name in ("trainer", "inference", "late")
    )
    versions = [model(0), changed(model(0), 1), changed(model(0), 1), changed(model(0), 3), model(1)]
    before, moved = None, []
    for version, tensors in enumerate(versions):
        reference = trainer.publish(version, buffers_of(tensors.items()))
        weights = inference.pull(reference)
        assert_same(dict(tensors_of(weights)), tensors)
        moved.append(weights.moved_bytes)
        if before is not None:
            before.close()
        if held:
            before = weights
        else:
            weights.close()
        trainer.collect(version)
        with late.pull(reference) as fresh:  # it may have any version, or none
            assert_same(dict(tensors_of(fresh)), tensors)
        late.close()
        late = MooncakeStore(servers.address, memory / "late", run="test", bucket_bytes=1024, delta=True)
    assert moved[1] < moved[0] / 10
    assert moved[2] == 0
    assert moved[3] < moved[0] / 10
    assert moved[4] > moved[0] / 2
    if before is not None:
        before.close()
    await asyncio.sleep(3 * LEASE_S)
    trainer.collect(len(versions))
    for store in (trainer, inference, late):
        store.close()


@pytest.mark.parametrize("delta", [False, True])
async def test_wrong_bytes_are_fetched_again_and_counted(
    servers: MooncakeServers, memory: Path, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, inference = (
        MooncakeStore(servers.address, memory / name, run="test", bucket_bytes=1024, delta=delta)
        for name in ("trainer", "inference")
    )
    inference.pull(trainer.publish(0, buffers_of(model(0).items()))).close()
    reference = trainer.publish(1, buffers_of(changed(model(0), 2).items()))
    get, calls = inference._get, []

    def garbled(names: list[str], addresses: list[int], sizes: list[int]) -> None:
        get(names, addresses, sizes)
        calls.append(names)
        if len(calls) == 1:
            ctypes.memset(addresses[0], 0x5A, 3)

    monkeypatch.setattr(inference, "_get", garbled)
    with inference.pull(reference) as weights:
        assert weights.refetched == 1
        assert_same(dict(tensors_of(weights)), changed(model(0), 2))
    assert any(name.endswith("-changes") for name in calls[0]) == delta
    trainer.close()
    inference.close()


async def test_nothing_is_left(servers: MooncakeServers, memory: Path) -> None:
    trainer, inference = (mooncake(servers, memory, name) for name in ("trainer", "inference"))
    pids = [servers.pid("mooncake-master"), servers.pid("mooncake-node-0")]
    inference.pull(trainer.publish(0, buffers_of(model().items()))).close()
    trainer.close()
    inference.close()
    await servers.stop()
    assert [path for path in memory.rglob("*") if path.is_file() and path.suffix != ".log"] == []
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
