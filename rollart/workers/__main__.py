"""``python -m rollart.workers ROLE --key-file FILE``: one worker process.

``python -m rollart.workers functions FUNCTION…`` is the local function host, which speaks HTTP instead.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from rollart.peer import Peer
from rollart.workers.dialer import ZmqDialer
from rollart.workers.worker import Worker, die_with_parent

ROLES = {
    "inference": "rollart.workers.inference:InferenceWorker",
    "trainer": "rollart.workers.trainer:TrainerWorker",
    "environment": "rollart.workers.environment:EnvironmentWorker",
}
ORPHAN_LOOKS = 20
ORPHAN_LOOK_S = 0.05


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rollart.workers", description=__doc__)
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument(
        "--key-file", required=True, type=Path, help="the run's private/peer.json: address and keys"
    )
    parser.add_argument("--connect", metavar="ADDRESS", help="the controller, instead of the file's address")
    parser.add_argument("--name", help="unique in the run; by default random")
    parser.add_argument("--hardware-class", default="CPU", help="e.g. H800, H20, CPU")
    parser.add_argument(
        "--tasks", metavar="NAME,…", help="of an environment worker: the tasks it holds; by default all"
    )
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the worker; the exit code."""
    if sys.argv[1:2] == ["functions"]:
        from rollart.workers.functions.command_line import main as serve_functions

        return serve_functions(sys.argv[2:])
    options = parse()
    if options.parent:
        die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        peer = Peer.read(options.key_file)
    except (OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"can't read the key file {options.key_file}: {error}\n")
        return 2
    if options.connect:
        peer = msgspec.structs.replace(peer, address=options.connect)
    module, _, name = ROLES[options.role].partition(":")
    worker_class: type[Worker] = getattr(importlib.import_module(module), name)
    own: dict[str, Any] = {"tasks": options.tasks.split(",")} if options.tasks else {}
    worker = worker_class(ZmqDialer(peer), name=options.name, hardware_class=options.hardware_class, **own)
    if options.role == "environment":
        return _run_environments(worker)
    return asyncio.run(_run(worker))


def _run_environments(worker: Worker) -> int:
    """In this process foreign code runs: what it prints is bounded, and no process of it stays behind."""
    from rollart.processes import adopt_orphans, end_all
    from rollart.workers.output import pumped

    adopt_orphans()
    try:
        with pumped():
            return asyncio.run(_run(worker))
    finally:
        end_all()


async def _run(worker: Worker) -> int:
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()

    def end(name: str) -> None:
        signalled.set()
        worker.end(f"signal {name}")

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end, signum.name)
    code = await worker.run()
    if signalled.is_set() and not worker.ordered:
        await _see_whether_orphaned(worker)
    if worker.orphaned and hasattr(worker, "welcome"):
        # Nobody else is left to remove what lies in shared memory, and the last worker to end leaves none of it.
        shutil.rmtree(worker.welcome.store_dir, ignore_errors=True)
    return code


async def _see_whether_orphaned(worker: Worker) -> None:
    """The kernel sends the signal of a parent's end before the child has another parent."""
    for _ in range(ORPHAN_LOOKS):
        if worker.orphaned:
            return
        await asyncio.sleep(ORPHAN_LOOK_S)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
