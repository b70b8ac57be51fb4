"""Pulls: published versions on their way to the hosts of the inference workers, in the background.

A pull that another version supersedes is left, though never twice in a row: one that is slower than the publications
would never end.  What fails is tried again with growing pauses until the deadline.  Of a version that is not whole in
the store any more, the trainer stores another copy.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

from rollart.config import Config
from rollart.controller import events
from rollart.controller.llm_proxy import Engine
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trainer_line import TrainerLine
from rollart.errors import RunError
from rollart.protocol import FailureKind, Publish, Published, Pull, Pulled

__all__ = ["Pulls"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""After a transfer that failed, before it is tried again."""


def _pauses() -> Iterator[float]:
    """Seconds between tries, for ever: twice as long each time, to a limit."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Pulls:
    """What is in the store, and who is bringing it where."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        trainer: TrainerLine,
        *,
        canary: bytes,
        run: RunContext,
        wanted: Callable[[Engine], int],
        next_change: Callable[[], asyncio.Future[None]],
    ) -> None:
        """``wanted`` is the version that a worker needs next, which may change whenever ``next_change()`` is done."""
        self.published: dict[int, Published] = {}
        """The versions that are in the store, or were."""
        self._switchboard = switchboard
        self._canary = canary
        self._run = run
        self._wanted = wanted
        self._next_change = next_change
        self._timeout_s = config.inference.update_timeout_s
        self._publish_timeout_s = config.trainer.step_timeout_s  # it may wait for a train_step
        self._jitter_s = config.weights.pull_jitter_s
        self._jitter = random.Random(f"{config.seed}/pulls")
        self._turns = asyncio.Semaphore(config.weights.pulls_at_once)
        self._attempts: dict[int, int] = {}
        """How often a version was stored anew."""
        self._asked: dict[int, Link] = {}
        """The trainer that was asked for a version last; of the versions that are wanted."""
        self._storing: dict[int, asyncio.Future[None]] = {}
        self._trainer = trainer

    async def publish(self, version: int) -> Published:
        """Have the trainer put its current weights into the store as ``version``; ``RunError`` when it can't."""
        give_up_at = self._run.clock() + self._timeout_s
        for pause_s in _pauses():
            try:
                self.published[version] = await self._ask(version)
                break
            except CallError as error:
                if not error.retry or self._run.clock() + pause_s > give_up_at:
                    raise RunError(f"publishing version {version} failed: {error}") from error
                logger.warning("version %d is not published yet: %s", version, error)
                await asyncio.sleep(pause_s)
        return self.published[version]

    def forget(self, below: int) -> None:
        """Versions below ``below`` are of no use any more."""
        for known in (self.published, self._attempts, self._asked):
            for version in [version for version in known if version < below]:
                del known[version]

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._storing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def pull(self, engine: Engine, version: int, *, to_the_end: bool) -> float | None:
        """Seconds that the worker took to bring ``version`` to its host; ``None``: another is wanted by now.

        ``to_the_end``: also when another is wanted.  ``CallError`` when it doesn't get it in time.
        """
        clock = self._run.clock
        give_up_at = clock() + self._timeout_s
        await asyncio.sleep(self._jitter.uniform(0.0, self._jitter_s))
        for pause_s in _pauses():
            lost = ""
            async with self._turns:
                if self._wanted(engine) != version:
                    return None
                began, manifest = clock(), self.published[version].manifest
                try:
                    return await self._unless_superseded(engine, version, manifest, to_the_end)
                except CallError as error:
                    if not error.retry or clock() + pause_s > give_up_at:
                        raise
                    logger.warning("%s could not pull version %d: %s", engine.link.name, version, error)
                    lost = manifest if error.kind is FailureKind.LOST else ""
            if lost:
                began = clock()
                await self._store_anew(version, lost)
                give_up_at += clock() - began  # that was not the worker's time
            await asyncio.sleep(pause_s)
        raise AssertionError("the pauses never end")

    async def _unless_superseded(
        self, engine: Engine, version: int, manifest: str, to_the_end: bool
    ) -> float | None:
        """Have the worker pull ``version``; ``None`` when another was wanted before it had it, and it may be left."""
        began = self._run.clock()
        request = Pull(self._switchboard.next_seq(), version, manifest)
        call = self._switchboard.call(engine.link, request, Pulled, timeout_s=self._timeout_s)
        pull = asyncio.ensure_future(call)
        try:
            while not pull.done():
                if not to_the_end and self._wanted(engine) != version:
                    self._tell(engine, version, began, None)
                    return None
                waited: set[asyncio.Future[Any]] = {pull, self._next_change()}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return self._tell(engine, version, began, pull.result())
        finally:
            pull.cancel()

    def _tell(self, engine: Engine, version: int, began: float, pulled: Pulled | None) -> float:
        """Write the pull's event; how long it took."""
        now = self._run.clock()
        size, moved, refetched = (
            (0, 0, 0) if pulled is None else (pulled.size_bytes, pulled.moved_bytes, pulled.refetched)
        )
        self._run.write(
            events.Pulled(now, engine.link.name, version, now - began, pulled is None, size, moved, refetched)
        )
        return now - began

    async def _store_anew(self, version: int, lost: str) -> None:
        """Have the trainer store ``version`` again, of whose copy ``lost`` a part is gone; once for all who miss it."""
        if self.published[version].manifest != lost:
            return
        storing = self._storing.get(version)
        if storing is None:
            storing = asyncio.ensure_future(self._store_again(version))
            self._storing[version] = storing
            storing.add_done_callback(lambda _: self._storing.pop(version))
        await asyncio.wait({storing})

    async def _store_again(self, version: int) -> None:
        self._attempts[version] = self._attempts.get(version, 0) + 1
        try:
            self.published[version] = await self._ask(version)
        except CallError as error:
            logger.warning("version %d could not be stored again: %s", version, error)

    async def _ask(self, version: int) -> Published:
        """Another trainer than the one before stores a copy of its own: the other's may be there, or half of it."""
        seq = self._switchboard.next_seq

        def request(link: Link) -> Publish:
            asked = self._asked.setdefault(version, link)
            if asked is not link:
                self._asked[version] = link
                self._attempts[version] = self._attempts.get(version, 0) + 1
            return Publish(seq(), version, self._attempts.get(version, 0), self._canary)

        return await self._trainer.call(request, Published, may_hang=False, timeout_s=self._publish_timeout_s)
