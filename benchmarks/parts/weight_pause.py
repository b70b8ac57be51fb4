"""The pause of an engine for new weights, for ``benchmarks.weights``: a program of its own, in a network of its own.

``python -m benchmarks.parts.weight_pause FOLDER`` starts a real engine and swaps weights under it while it generates,
from both stores, with one to four that pull at the same time, and with the network made ten times slower; it writes
its rows as JSON to its output.  The network is the loopback of a namespace (``unshare --net``), which ``tc`` slows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.parts.report import Row
from benchmarks.parts.weight_pullers import Pullers, open_store
from rollart.config import Inference, RandomModel
from rollart.launch.mooncake import MooncakeServers
from rollart.packing import pack_ids
from rollart.protocol import Generate
from rollart.random_model import write_model_folder
from rollart.weights.expected import expected_shapes
from rollart.weights.store import WeightStore
from rollart.weights.tensors import buffers_of
from rollart.workers.vllm_engine import VllmEngine

__all__ = ["measure"]

MODEL = RandomModel(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=12,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
)
"""Twelve of SmolLM2-135M's layers, without most of its vocabulary: 42 M parameters."""
CANARY = list(range(1, 33))
IN_FLIGHT = 16
SWAPS = 2
SLOWER = 10
CONDITIONS = (("local", 1), ("mooncake", 1), ("mooncake", 2), ("mooncake", 4))
CHANGED = (0.001, 0.01, 0.05, 0.2)
"""Shares of the elements."""


def measure(folder: Path) -> tuple[list[Row], list[Row]]:
    """Rows of pauses and of deltas, by the program in its own network; none where the system doesn't allow one."""
    if not shutil.which("unshare") or not shutil.which("tc") or not shutil.which("ip"):
        return [], []
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-m", __spec__.name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the pauses could not be measured: {done.stderr[-2000:]}")
    pauses, deltas = json.loads(done.stdout.splitlines()[-1])
    return pauses, deltas


@contextlib.contextmanager
def _slow_network(bytes_per_s: float) -> Iterator[None]:
    """The loopback of this namespace carries so much."""
    rate = f"{int(8 * bytes_per_s / 1e6)}mbit"
    limits = ["rate", rate, "burst", "512kb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


class _Swaps:
    """One engine, and what its pauses take."""

    def __init__(self, engine: VllmEngine, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        self._engine, self._tensors, self._folder = engine, tensors, folder
        self._version = 0
        self._size = sum(tensor.nbytes for tensor in tensors.values())
        self._requests = 0

    async def row(self, kind: str, count: int, address: str) -> Row:
        """Medians over a few swaps."""
        master = address if kind == "mooncake" else ""
        name = f"{kind}-{count}-{self._version}"
        scratch = self._folder / name
        trainer, inference = (open_store(master, scratch, part) for part in ("trainer", "inference"))
        with Pullers(count - 1, master, scratch) as others:
            taken = [await self._swap(trainer, inference, others) for _ in range(2 + SWAPS)][2:]
        inference.close()
        trainer.close()
        pull, suspend, pause, canary, load = (
            statistics.median(column) for column in zip(*taken, strict=True)
        )
        return {
            "store": kind,
            "pullers": count,
            "bytes": self._size,
            "pull_s": pull,
            "suspend_s": suspend,
            "pause_s": pause,
            "canary_s": canary,
            "load_s": load,
        }

    async def _swap(self, trainer: WeightStore, inference: WeightStore, others: Pullers) -> tuple[float, ...]:
        """Seconds of the pull, the suspend, the pause, the canary, and a load into the engine that has nothing to do.

        While it is being suspended the engine completes its step.  In the pause it stands still: until it goes on
        with what was in flight.  It computes their caches again, and the canary waits for its turn beside them.
        """
        self._version += 1
        for tensor in self._tensors.values():
            tensor.view(-1)[0] += 1e-3  # a bucket that is the same would not travel again
        reference = await asyncio.to_thread(trainer.publish, self._version, buffers_of(self._tensors.items()))
        generating = [asyncio.ensure_future(self._engine.generate(self._request())) for _ in range(IN_FLIGHT)]
        beside = asyncio.ensure_future(asyncio.to_thread(others.pull, reference))
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        weights = await asyncio.to_thread(inference.pull, reference)
        pulled = time.perf_counter()
        await self._engine.suspend()
        still = time.perf_counter()
        await self._engine.load(weights.path, self._version)
        await self._engine.resume()
        resumed = time.perf_counter()
        await self._engine.score(CANARY)
        scored = time.perf_counter()
        for request in generating:
            request.cancel()
        await asyncio.wait({*generating, beside})
        await self._engine.suspend()
        idle = time.perf_counter()
        await self._engine.load(weights.path, self._version)
        loaded = time.perf_counter()
        await self._engine.resume()
        weights.close()
        trainer.collect(self._version)
        return pulled - began, still - pulled, resumed - still, scored - resumed, loaded - idle

    def _request(self) -> Generate:
        self._requests += 1
        return Generate(
            seq=self._requests,
            request_id=f"r{self._requests}",
            prompt=pack_ids(CANARY),
            max_tokens=400,
            temperature=1.0,
            allowed_token_ids=b"",
            stop_token_ids=b"",
            ignore_eos=True,
            seed=None,
        )


def _delta_rows(tensors: dict[str, torch.Tensor], folder: Path, address: str) -> list[Row]:
    """Publish versions of which a share of the elements changed; what a pull of the changes takes, and of all."""
    rows = []
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    trainer, inference = (
        open_store(address, folder / "delta", name, delta=True) for name in ("trainer", "inference")
    )
    version = 0
    inference.pull(trainer.publish(version, buffers_of(tensors.items()))).close()
    for share in CHANGED:
        for tensor in tensors.values():
            flat = tensor.view(-1)
            flat[torch.rand(flat.shape) < share] += 0.01
        version += 1
        began = time.perf_counter()
        reference = trainer.publish(version, buffers_of(tensors.items()))
        published = time.perf_counter()
        weights = inference.pull(reference)
        pulled = time.perf_counter()
        fresh = open_store(address, folder / "delta", f"whole-{version}")  # which has no base
        began_whole = time.perf_counter()
        fresh.pull(reference).close()
        whole = time.perf_counter()
        fresh.close()
        rows.append(
            {
                "changed": share,
                "moved_share": weights.moved_bytes / size,
                "publish_s": published - began,
                "pull_s": pulled - published,
                "whole_pull_s": whole - began_whole,
            }
        )
        weights.close()
        trainer.collect(version)
    for store in (inference, trainer):
        store.close()
    return rows


async def _measure(folder: Path) -> tuple[list[Row], list[Row]]:
    model = folder / "model"
    write_model_folder(MODEL, model)
    tensors = {name: torch.randn(shape).mul_(0.02) for name, shape in expected_shapes(model).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "logs").mkdir()
    servers = MooncakeServers(folder / "logs", nodes=1, node_bytes=12 * size)
    settings = Inference(kv_cache_gib=0.5, max_num_seqs=2 * IN_FLIGHT)
    (pool,) = settings.all_pools
    engine = await VllmEngine.start(str(model), settings, pool, seed=0, scratch_in=folder)
    try:
        await servers.start()
        swaps = _Swaps(engine, tensors, folder)
        rows = [await swaps.row(kind, count, servers.address) for kind, count in CONDITIONS]
        plain = next(row for row in rows if row["store"] == "mooncake" and row["pullers"] == 1)
        with _slow_network(size / plain["pull_s"] / SLOWER):
            slow = await swaps.row("mooncake", 1, servers.address)
            deltas = await asyncio.to_thread(_delta_rows, tensors, folder, servers.address)
        pauses = [{**row, "network": "as it is"} for row in rows]
        return [*pauses, {**slow, "network": f"{SLOWER}× slower"}], deltas
    finally:
        await engine.close()
        await servers.stop()


def main() -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rows = asyncio.run(_measure(folder))
    sys.stdout.write(f"\n{json.dumps(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
