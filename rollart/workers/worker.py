"""The base of every worker: one connection to the controller, beats, dispatch, a clean end.

A worker dials the controller, says what it is, sets itself up and serves requests until it is told to shut
down or the controller falls silent.  It never outlives the controller.  Requests are served concurrently:
``serve`` is a coroutine, and what blocks runs in a thread, so that beats and control never wait for work.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from rollart.config import Config
from rollart.outbox import MOST_ANSWERS, Outbox
from rollart.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Beat,
    Cancel,
    ControllerBeat,
    Execute,
    Failure,
    FailureKind,
    Goodbye,
    Hello,
    Message,
    Ready,
    Refused,
    Role,
    Shutdown,
    ToWorker,
    Welcome,
    decode_to_worker,
    salvage_to_worker,
)
from rollart.workers.declared import execute
from rollart.workers.dialer import Dialer
from rollart.workers.failures import Deterministic, Lost

__all__ = ["Deterministic", "Lost", "Worker", "die_with_parent"]

logger = logging.getLogger(__name__)

WELCOME_PATIENCE_S = 30.0
CANCEL_PATIENCE_S = 2.0
"""For requests in progress to end when the worker does; a thread that computes can't be stopped."""


class Worker:
    """Subclasses give ``role``, ``packages``, ``setup``, ``serve`` and, where needed, ``teardown``."""

    role: ClassVar[Role]
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions the hello tells."""

    def __init__(self, dialer: Dialer, *, name: str | None = None, hardware_class: str = "CPU") -> None:
        self._dialer = dialer
        self.name = name or f"{self.role}-{uuid.uuid4().hex[:8]}"
        self.hardware_class = hardware_class
        self.welcome: Welcome
        self.config: Config
        self.refused_frames = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._declared: dict[str, Any] = {}
        self._background: dict[asyncio.Task[None], None] = {}
        self._end: asyncio.Future[str]
        self._heard = 0.0
        self._closed = False
        self._exit_code = 0
        self._why = "failed"
        self._ordered = False
        self._forsaken = False

    # --- what a role fills in -------------------------------------------------------------------------

    async def setup(self) -> Ready:
        """Get ready to serve; ``self.welcome`` and ``self.config`` are there."""
        raise NotImplementedError

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request and return its answer, which has the request's ``seq``.

        ``asyncio.CancelledError`` reaches it when the controller cancels the request.  ``Deterministic``
        becomes a ``Failure`` that is not retried; any other exception an infrastructure failure.
        """
        raise NotImplementedError

    async def teardown(self) -> None:
        """Release what ``setup`` took; called once, also after a failed setup."""

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until the end; the process's exit code."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._control = self._dialer.dial("control", self.name, self._on_control)
        self._data = self._dialer.dial("data", self.name, self._on_data)
        self._say, self._say_data = (
            Outbox(connection.send, most_messages=MOST_ANSWERS) for connection in (self._control, self._data)
        )
        try:
            await self._serve_until_end(loop)
        except Exception as error:  # the boundary of a worker: recorded, and told
            logger.exception("worker %s failed", self.name)
            said = str(error).splitlines() or [""]
            self._why = f"failed: {type(error).__name__}: {said[0]}"
            self._exit_code = 1
        finally:
            await self._close()
        return self._exit_code

    @property
    def ordered(self) -> bool:
        """The controller told it to end."""
        return self._ordered

    @property
    def forsaken(self) -> bool:
        """It ends because the controller fell silent."""
        return self._forsaken

    def end(self, reason: str) -> None:
        """Ask the worker to finish; the first reason counts."""
        if not self._end.done():
            self._end.set_result(reason)

    def fail(self, reason: str) -> None:
        """Ask the worker to finish for a failure, which its exit code tells; the first reason counts."""
        if not self._end.done():
            self._exit_code = 1
            logger.error("worker %s fails: %s", self.name, reason)
            self.end(reason)

    async def _serve_until_end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._welcomed: asyncio.Future[Welcome] = loop.create_future()
        self._say.add(self._hello())
        self._say_data.add(Attach(self.name))
        await self._first_of(self._welcomed, timeout_s=WELCOME_PATIENCE_S)
        if self._end.done():
            return
        if not self._welcomed.done():
            raise ConnectionError(
                f"no answer from the controller at {self._dialer.address} within {WELCOME_PATIENCE_S:g} s: "
                "is it running, and does the key file belong to this run?"
            )
        self.welcome = self._welcomed.result()
        self.config = msgspec.msgpack.decode(self.welcome.config, type=Config)
        setup = asyncio.ensure_future(self.setup())
        try:
            await self._first_of(setup)
        finally:
            setup.cancel()  # nothing happens when it is done
        if self._end.done():
            return
        self._say.add(setup.result())
        self._heard = loop.time()
        beats = asyncio.ensure_future(self._beat())
        try:
            await self._first_of(beats)
        finally:
            beats.cancel()
        if self._end.done():
            logger.info("worker %s ends: %s", self.name, self._end.result())
        else:
            beats.result()

    async def _first_of(self, other: asyncio.Future[Any], *, timeout_s: float | None = None) -> None:
        """Wait for ``other`` or for the order to end."""
        waited: set[asyncio.Future[Any]] = {other, self._end}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _hello(self) -> Hello:
        from importlib.metadata import PackageNotFoundError, version

        versions = {"python": sys.version.split()[0]}
        for package in self.packages:
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        return Hello(PROTOCOL_VERSION, self.role, self.name, os.getpid(), self.hardware_class, versions)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._say.add(Beat(len(self._tasks), self.refused_frames))
            await asyncio.sleep(self.welcome.heartbeat_s)
            if loop.time() - self._heard > self.welcome.controller_timeout_s:
                self._forsaken = True
                self.end(f"controller silent for {self.welcome.controller_timeout_s:g} s")

    async def _close(self) -> None:
        self._closed = True  # what is cancelled now was not cancelled by the controller: no answer says so
        serving = [*self._tasks.values(), *self._background]
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving, timeout=CANCEL_PATIENCE_S)
        try:
            await self.teardown()
        except Exception:  # the boundary of teardown: whatever breaks there, the sockets still close
            logger.exception("worker %s: teardown failed", self.name)
        reason = self._end.result() if self._end.done() else self._why
        self._say.add(Goodbye(reason))
        self._say.flush()
        self._control.close(linger_ms=500)
        self._data.close(linger_ms=0)
        self._dialer.close()

    # --- messages -------------------------------------------------------------------------------------

    def _on_control(self, frames: list[bytes]) -> int:
        return self._receive(frames, self._say)

    def _on_data(self, frames: list[bytes]) -> int:
        return self._receive(frames, self._say_data)

    def _receive(self, frames: list[bytes], answers: Outbox) -> int:
        try:
            messages = decode_to_worker(frames[0])
        except msgspec.DecodeError:
            messages = salvage_to_worker(frames[0])
            self.refused_frames += 1
        if messages:
            self._heard = asyncio.get_running_loop().time()
        for message in messages:
            self._take(message, frames[1:], answers)
        return len(messages)

    def _take(self, message: ToWorker, payload: list[bytes], answers: Outbox) -> None:
        match message:
            case ControllerBeat():
                pass
            case Shutdown(reason=reason):
                self._ordered = True
                self.end(reason)
            case Welcome():
                if not self._welcomed.done():
                    self._welcomed.set_result(message)
            case Refused(reason=reason):
                if not self._welcomed.done():
                    self._welcomed.set_exception(ConnectionRefusedError(f"the controller refused: {reason}"))
            case Cancel(seq=seq):
                task = self._tasks.get(seq)
                if task is not None:
                    task.cancel()
            case _:
                self._start(message, payload, answers)

    def _start(self, message: ToWorker, payload: list[bytes], answers: Outbox) -> None:
        seq = getattr(message, "seq", None)
        task = asyncio.get_running_loop().create_task(self._answer(message, payload, answers, seq))
        if seq is None:
            self._background[task] = None
            task.add_done_callback(self._background.pop)
        else:
            self._tasks[seq] = task
            # Not in the task itself: one that is cancelled before it begins runs none of its code.
            task.add_done_callback(lambda _: self._tasks.pop(seq))
            task.add_done_callback(lambda done: self._never_begun(done, seq, answers))

    def _never_begun(self, task: asyncio.Task[None], seq: int, answers: Outbox) -> None:
        if task.cancelled() and not self._closed:
            answer = Failure(seq, FailureKind.CANCELLED, "cancelled by the controller before it began")
            answers.add(answer)

    async def _answer(
        self, message: ToWorker, payload: list[bytes], answers: Outbox, seq: int | None
    ) -> None:
        answer: Message | None
        try:
            if isinstance(message, Execute):
                answer = await execute(message, self, self._declared)
            else:
                answer = await self.serve(message, payload)
        except asyncio.CancelledError:
            answer = self._failure(seq, FailureKind.CANCELLED, "cancelled by the controller")
        except Deterministic as error:
            answer = self._failure(seq, FailureKind.DETERMINISTIC, str(error))
        except Lost as error:
            answer = self._failure(seq, FailureKind.LOST, str(error))
        except TimeoutError as error:
            answer = self._failure(seq, FailureKind.TIMEOUT, str(error) or "deadline passed")
        except Exception as error:  # the boundary of a request: recorded here, told to the controller
            logger.exception("%s: request %r failed", self.name, type(message).__name__)
            answer = self._failure(seq, FailureKind.INFRASTRUCTURE, f"{type(error).__name__}: {error}")
        if answer is not None and not self._closed:
            self._say_answer(answer, answers, seq)

    def _say_answer(self, answer: Message, answers: Outbox, seq: int | None) -> None:
        try:
            answers.add(answer)
        except (ValueError, TypeError, OverflowError) as error:
            logger.exception("%s: answer %r can't be encoded", self.name, type(answer).__name__)
            said = f"its answer can't be sent: {type(error).__name__}: {error}"
            failure = self._failure(seq, FailureKind.INFRASTRUCTURE, said)
            if failure is not None:
                answers.add(failure)

    @staticmethod
    def _failure(seq: int | None, kind: FailureKind, text: str) -> Failure | None:
        # A text of a user's code may be no Unicode, which the wire can't carry.
        return None if seq is None else Failure(seq, kind, text.encode("utf-8", "backslashreplace").decode())


def die_with_parent(parent: int) -> None:
    """On Linux, have the kernel send SIGTERM to this process when process ``parent`` ends."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the call
        os.kill(os.getpid(), signal.SIGTERM)
