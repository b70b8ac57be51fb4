"""A whole run on this machine: the controller in this process, its workers as processes beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rollart.config import Config, StoreKind
from rollart.controller.controller import Controller, Outcome
from rollart.controller.loop_watch import LoopWatch
from rollart.controller.progress import Progress
from rollart.controller.run_folder import RunFolder
from rollart.controller.transport import ZmqTransport
from rollart.declare import Cluster
from rollart.launch.functions import LocalFunctions, local_rewards
from rollart.launch.local import LocalLauncher, WorkerExit
from rollart.launch.mooncake import MooncakeServers
from rollart.random_model import vocabulary_size, write_model_folder

__all__ = ["run_locally"]


async def run_locally(
    config: Config,
    folder: RunFolder,
    *,
    stream: TextIO,
    launcher: type[LocalLauncher] = LocalLauncher,
    clusters: Sequence[Cluster] = (),
    resume: bool = False,
) -> Outcome:
    """Run ``config`` in ``folder``, with progress on ``stream``; SIGINT, SIGTERM and SIGHUP end it in order.

    ``launcher`` may start its workers in a way of its own.  ``resume``: the run that is in ``folder``, which was
    reopened, goes on.

    ``RunError`` with the first cause when the run fails, ``ConfigError`` when the folder can't be made.
    """
    if not resume:
        folder.create(config)
    try:
        if config.model.random is not None:
            shutil.rmtree(
                folder.model, ignore_errors=True
            )  # a run that was killed may have written half of it
            write_model_folder(config.model.random, folder.model)
        transport = ZmqTransport()
        transport.peer_file.write(folder.key_file)
        progress = Progress(stream, config.steps)
        with _logging_to(folder):
            async with (
                LoopWatch(progress.say) as watch,
                _store_master(config, folder) as store_master,
                _functions(config, folder) as functions,
            ):
                controller = Controller(
                    config,
                    folder,
                    transport,
                    launch=_launch_in(folder, launcher),
                    progress=progress,
                    vocabulary_size=vocabulary_size(
                        Path(config.model.path) if config.model.path else folder.model
                    ),
                    store_master=store_master,
                    clusters=clusters,
                    functions=functions,
                    resume=resume,
                    loop_lag=watch.take_lag,
                )
                with _signals(controller.interrupt):
                    return await controller.run()
    finally:
        folder.clean()


@contextlib.asynccontextmanager
async def _store_master(config: Config, folder: RunFolder) -> AsyncIterator[str]:
    """The address of the Mooncake master, which is started here unless the config names one; empty without any."""
    weights = config.weights
    if weights.store is StoreKind.LOCAL or weights.master is not None:
        yield weights.master or ""
        return
    node_bytes = int((weights.node_gib or 1.0) * 2**30)
    servers = MooncakeServers(folder.logs, nodes=weights.nodes or 1, node_bytes=node_bytes)
    try:
        await servers.start()
        yield servers.address
    finally:
        await servers.stop()


@contextlib.asynccontextmanager
async def _functions(config: Config, folder: RunFolder) -> AsyncIterator[LocalFunctions | None]:
    """The function host, where a reward is ``local``."""
    rewards = local_rewards(config)
    if not rewards:
        yield None
        return
    host = LocalFunctions(rewards, folder.private, folder.logs)
    try:
        await host.start()
        yield host
    finally:
        await host.stop()


def _launch_in(
    folder: RunFolder, launcher: type[LocalLauncher]
) -> Callable[[Callable[[WorkerExit], None]], LocalLauncher]:
    store = folder.store
    assert store is not None
    return lambda on_exit: launcher(folder.key_file, folder.logs, store, on_exit=on_exit)


@contextlib.contextmanager
def _signals(interrupt: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for signum in signals:
        loop.add_signal_handler(signum, interrupt)
    try:
        yield
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


@contextlib.contextmanager
def _logging_to(folder: RunFolder) -> Iterator[None]:
    """The controller's log goes to a file of the run folder."""
    handler = logging.FileHandler(folder.logs / "controller.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("rollart")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    propagated, root.propagate = root.propagate, False
    try:
        yield
    finally:
        root.propagate = propagated
        root.removeHandler(handler)
        handler.close()
