"""TrainerLine: the run's trainer, whichever process it is now.

A trainer that dies is started again by the launcher.  It loads the last checkpoint and trains the batches since then
once more, in order and without publishing, until it is at the version that the run is at; only then it gets requests.
Requests that were with its predecessor are sent again.  A batch is trained once in what survives: train_steps are
idempotent by their id, and a checkpoint holds the id of its last one (docs/reliability.md).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from rollart.config import Config
from rollart.controller.journal import Batch, Journal
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.errors import RunError
from rollart.protocol import (
    Done,
    FailureKind,
    LoadCheckpoint,
    Loaded,
    Message,
    Shutdown,
    Trained,
    TrainPart,
    TrainStep,
)

__all__ = ["TrainerLine"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
MOST_LOSSES = 3
"""Trainers that one request may cost."""
LEAVING_S = 0.05
PART_BYTES = 1 << 20
"""Of a batch: it leaves in parts, each when the one before has arrived, so that neither side holds it twice."""
PAUSE_BYTES = 1 << 16


class TrainerLine:
    """Requests to the trainer."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        journal: Journal,
        *,
        run: RunContext,
        say: Callable[[str], None],
    ) -> None:
        self._switchboard = switchboard
        self._journal = journal
        self._run = run
        self._say = say
        self._timeout_s = config.trainer.step_timeout_s
        self._verify_share = config.trainer.verify_share
        self._usable: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._restoring: asyncio.Task[None] | None = None
        self._streamed: tuple[Link, int, int] | None = None
        """The trainer that has groups of a batch that is not complete, its step and how many."""

    # --- trainers come and go -------------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """A trainer is ready: it is brought to where the run is, and then gets requests."""
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.get_running_loop().create_task(self._restore(link), name="restore trainer")

    def lost(self, link: Link) -> None:
        """A trainer is gone."""
        if self._usable.done() and self._usable.result() is link:
            self._usable = asyncio.get_running_loop().create_future()

    async def link(self) -> Link:
        """The trainer, as soon as there is one that is where the run is."""
        return await asyncio.shield(self._usable)

    async def close(self) -> None:
        """Stop what is under way."""
        if self._restoring is not None:
            self._restoring.cancel()
            await asyncio.wait({self._restoring})

    async def _restore(self, link: Link) -> None:
        ledger = self._journal.ledger
        try:
            if ledger.checkpoint:
                seq = self._switchboard.next_seq()
                await self._ask(link, LoadCheckpoint(seq, ledger.checkpoint), Loaded)
            for batch in list(ledger.kept):
                await self._train_again(link, batch)
        except CallError as error:
            if not _is_lost(link):
                if error.kind is FailureKind.TIMEOUT:
                    self._take_out(link, str(error))
                else:
                    self._run.bug(RunError(f"the trainer could not be brought to where the run is: {error}"))
            return
        except Exception as error:  # the boundary of this task: nobody else awaits it
            self._run.bug(error)
            return
        if ledger.checkpoint or ledger.kept:
            since = ledger.checkpoint.rpartition("/")[2] or "the beginning"
            self._say(
                f"{link.name} is at version {ledger.version} again: {len(ledger.kept)} train_steps since {since}"
            )
        if not _is_lost(link):
            self._usable.set_result(link)

    async def _train_again(self, link: Link, batch: Batch) -> None:
        await self._send(link, batch.step, self._journal.frames(batch.step))
        request = self._train_step(batch.step, len(batch.groups), batch.before)
        trained = await self._ask(link, request, Trained)
        if trained.version != batch.before + 1:
            raise RunError(
                f"step {batch.step} was trained again after the trainer was lost, and did not succeed this time: "
                f"{trained.skipped or f'it gave version {trained.version}'}"
            )

    # --- requests -------------------------------------------------------------------------------------

    async def call(
        self,
        make: Callable[[Link], Message],
        expect: type[Answer],
        *,
        may_hang: bool = True,
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer to ``make(link)``, of the next trainer where one is lost meanwhile; ``CallError`` when it can't.

        A trainer that does not answer in time is taken out, unless ``may_hang`` is false.
        """

        async def ask(link: Link) -> Answer:
            return await self._switchboard.call(
                link, make(link), expect, timeout_s=timeout_s or self._timeout_s
            )

        return await self._with_trainer(ask, may_hang=may_hang)

    async def stream(self, step: int, first: int, frames: list[bytes]) -> None:
        """Give the trainer, if there is one, groups of a batch that is not complete, from number ``first`` on."""
        if not self._usable.done():
            return
        link = self._usable.result()
        if first and self._streamed != (link, step, first):
            return  # it lacks some: it gets all with the train_step
        try:
            await self._send_part(link, step, first, list(frames))  # which lets go of what it has sent
        except CallError as error:
            logger.warning("groups of step %d did not reach the trainer: %s", step, error)
        else:
            self._streamed = (link, step, first + len(frames))

    async def train(
        self, step: int, version: int, groups: int, first: Iterable[bytes], *, streamed: list[bytes]
    ) -> Trained:
        """Train on the batch of ``step``: its encoded groups are ``streamed``, which the trainer may have already, and
        ``first``; the journal has all of them."""
        sent = False

        async def ask(link: Link) -> Trained:
            nonlocal sent
            if sent:
                await self._send(link, step, self._journal.frames(step))
            else:
                sent = True
                has = len(streamed) if self._streamed == (link, step, len(streamed)) else 0
                await self._send(link, step, itertools.chain(streamed[has:], first), has)
            return await self._ask(link, self._train_step(step, groups, version), Trained)

        return await self._with_trainer(ask, may_hang=True)

    async def _with_trainer(self, ask: Callable[[Link], object], *, may_hang: bool) -> Answer:
        last = ""
        for _ in range(MOST_LOSSES):
            link = await self.link()
            try:
                return await ask(link)  # type: ignore[misc,no-any-return]
            except CallError as error:
                if may_hang and error.kind is FailureKind.TIMEOUT and not _is_lost(link):
                    self._take_out(link, str(error))
                if not _is_lost(link):
                    raise
                last = str(error)
            while self._usable.done() and self._usable.result() is link:  # its goodbye is waited for
                await asyncio.sleep(LEAVING_S)
        raise CallError(
            FailureKind.DETERMINISTIC, f"the trainer was lost {MOST_LOSSES} times in this request; {last}"
        )

    def _take_out(self, link: Link, reason: str) -> None:
        self._switchboard.tell(link, Shutdown(reason))
        self._switchboard.lose(link, f"taken out: {reason}")

    def _train_step(self, step: int, groups: int, version: int) -> TrainStep:
        return TrainStep(self._switchboard.next_seq(), step, groups, version, self._verify_share)

    async def _send(self, link: Link, step: int, frames: Iterable[bytes], first: int = 0) -> None:
        """Bring the groups of a batch to the trainer, from number ``first`` on."""
        part, size, pause_at = list[bytes](), 0, PAUSE_BYTES
        for number, frame in enumerate(frames, first + 1):
            part.append(frame)
            size += len(frame)
            if size >= PART_BYTES:
                await self._send_part(link, step, first, part)
                first, part, size, pause_at = number, [], 0, PAUSE_BYTES
            elif size >= pause_at:
                await asyncio.sleep(0)  # the trajectories must not wait for a large batch
                pause_at = size + PAUSE_BYTES
        if part:
            await self._send_part(link, step, first, part)

    async def _send_part(self, link: Link, step: int, first: int, part: list[bytes]) -> None:
        request = TrainPart(self._switchboard.next_seq(), step, first)
        await self._switchboard.call(link, request, Done, timeout_s=self._timeout_s, payload=part)

    async def _ask(self, link: Link, request: Message, expect: type[Answer]) -> Answer:
        return await self._switchboard.call(link, request, expect, timeout_s=self._timeout_s)


def _is_lost(link: Link) -> bool:
    return link.state is LinkState.GONE or link.leaving is not None
