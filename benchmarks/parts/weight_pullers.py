"""Processes that pull weights, for ``benchmarks.weights``: each does what it is told and says how long it took."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from rollart.weights.local import LocalStore
from rollart.weights.mapped import checksum_of
from rollart.weights.mooncake import MooncakeStore
from rollart.weights.store import WeightStore

__all__ = ["RUN", "Pullers", "open_store"]

RUN = "benchmark"
"""What the store's keys begin with."""

Order = tuple[str, list[str], list[int]]
"""``pull`` with a reference, or ``raw`` with keys and sizes."""


def open_store(master: str, scratch: Path, name: str, *, delta: bool = False) -> WeightStore:
    """The local store below ``scratch``, or where there is a ``master`` Mooncake's."""
    if not master:
        return LocalStore(scratch / "store")
    return MooncakeStore(master, scratch / name, run=RUN, delta=delta)


class Pullers:
    """``count`` processes."""

    def __init__(self, count: int, master: str, scratch: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, master, scratch, f"puller-{number}"), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        for end in self._ends:
            end.recv()

    def pull(self, reference: str) -> list[float]:
        """Seconds that each took for the version, all at the same time."""
        return self._all(("pull", [reference], []))

    def raw(self, keys: Sequence[str], sizes: Sequence[int]) -> list[float]:
        """The same bytes by Mooncake's own batch get into memory that is there and registered, with the checksum."""
        return self._all(("raw", list(keys), list(sizes)))

    def _all(self, order: Order) -> list[float]:
        for end in self._ends:
            end.send(order)
        return [end.recv() for end in self._ends]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(30)


def _serve(end: Connection, master: str, scratch: Path, name: str) -> None:
    store = open_store(master, scratch, name)
    end.send("ready")
    raw: _Raw | None = None
    while True:
        try:
            order, keys, sizes = end.recv()
        except EOFError:
            store.close()
            return
        if order == "pull":
            started = time.perf_counter()
            store.pull(keys[0]).close()
            end.send(time.perf_counter() - started)
            continue
        raw = raw or _Raw(master, sum(sizes))
        end.send(raw.get(keys, sizes))


class _Raw:
    """Mooncake's client and nothing else."""

    def __init__(self, master: str, size: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
        self._buffer = np.ones(size, np.uint8)  # written to: its pages are there
        self._client.register_buffer(self._buffer.ctypes.data, size)

    def get(self, keys: list[str], sizes: list[int]) -> float:
        """Seconds to get all, and compute the checksums."""
        started = time.perf_counter()
        first = self._buffer.ctypes.data
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        found = self._client.batch_get_into(keys, [first + offset for offset in offsets], sizes)
        if list(found) != sizes:
            raise RuntimeError(f"Mooncake's batch get gave {found}")
        for offset, size in zip(offsets, sizes, strict=True):
            checksum_of(memoryview((ctypes.c_char * size).from_address(first + offset)))
        return time.perf_counter() - started
