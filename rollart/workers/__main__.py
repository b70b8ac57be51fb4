"""``python -m rollart.workers ROLE --key-file FILE``: one worker process.

``python -m rollart.workers functions FUNCTION…`` is the local function host, which speaks HTTP instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

logger = logging.getLogger(__name__)

ROLES = {
    "inference": "rollart.workers.inference:InferenceWorker",
    "trainer": "rollart.workers.trainer:TrainerWorker",
    "environment": "rollart.workers.environment:EnvironmentWorker",
}
ORPHAN_LOOKS = 20
ORPHAN_LOOK_S = 0.05
KEY_FILE_LOOK_S = 1.0


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
    parser.add_argument(
        "--on-controller-loss",
        choices=["end", "wait"],
        default="end",
        help="wait: for the controller that resumes the run, in the same run folder",
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
    if options.role == "environment":
        return _run_environments(options, peer)
    return asyncio.run(_run(options, peer))


def _make(options: argparse.Namespace, peer: Peer) -> Worker:
    if options.connect:
        peer = msgspec.structs.replace(peer, address=options.connect)
    module, _, name = ROLES[options.role].partition(":")
    worker_class: type[Worker] = getattr(importlib.import_module(module), name)
    own: dict[str, Any] = {"tasks": options.tasks.split(",")} if options.tasks else {}
    return worker_class(ZmqDialer(peer), name=options.name, hardware_class=options.hardware_class, **own)


def _run_environments(options: argparse.Namespace, peer: Peer) -> int:
    """In this process foreign code runs: what it prints is bounded, and no process of it stays behind."""
    from rollart.processes import adopt_orphans, end_all
    from rollart.workers.output import pumped

    adopt_orphans()
    try:
        with pumped():
            return asyncio.run(_run(options, peer))
    finally:
        end_all()


async def _run(options: argparse.Namespace, peer: Peer) -> int:
    """Serve one controller, or with ``--on-controller-loss wait`` one after the other."""
    signalled = asyncio.Event()
    worker = _make(options, peer)

    def end(name: str) -> None:
        signalled.set()
        worker.end(f"signal {name}")

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end, signum.name)
    while True:
        code = await worker.run()
        lost = not worker.ordered and (worker.forsaken or await _parent_ends(options.parent, signalled))
        if lost and hasattr(worker, "welcome"):
            # Nobody else is left to remove what lies in shared memory, and the last worker to end leaves none of it.
            shutil.rmtree(worker.welcome.store_dir, ignore_errors=True)
        if options.on_controller_loss == "end" or not lost or signalled.is_set():
            return code
        logger.info("%s waits for the run's next controller, which %s tells", worker.name, options.key_file)
        following = await _next_peer(options.key_file, peer, signalled)
        if following is None:
            return code
        peer = following
        worker = _make(options, peer)


async def _next_peer(key_file: Path, before: Peer, signalled: asyncio.Event) -> Peer | None:
    """What the key file says when it says something new; ``None`` when a signal comes first."""
    while not signalled.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signalled.wait(), KEY_FILE_LOOK_S)
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # not there, or not whole, yet
            peer = Peer.read(key_file)
            if peer != before:
                return peer
    return None


async def _parent_ends(parent: int | None, signalled: asyncio.Event) -> bool:
    """Whether ``parent``, the controller, is gone; the kernel signals its end before the child has another parent."""
    if parent is None:  # by hand: whose child it is says nothing of the controller
        return False
    for _ in range(ORPHAN_LOOKS if signalled.is_set() else 1):
        if os.getppid() != parent:
            return True
        await asyncio.sleep(ORPHAN_LOOK_S)
    return False


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
