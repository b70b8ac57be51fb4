"""The workers that are connected, and calls to them.

Knows the handshake, beats, deadlines and who answers what; knows nothing of what the messages are for.
A call ends in its answer or in a ``CallError`` that says whether the request may succeed elsewhere.  A lost
worker fails all its calls at once; an answer that comes too late finds no call and is dropped and counted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rollart.controller.deadlines import Deadlines
from rollart.controller.run_context import RunContext
from rollart.controller.transport import Transport, Unreachable
from rollart.outbox import Outbox
from rollart.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Beat,
    Cancel,
    Close,
    ControllerBeat,
    Execute,
    Failure,
    FailureKind,
    Generate,
    Goodbye,
    Hello,
    Message,
    Play,
    Progress,
    Publish,
    Ready,
    Refused,
    Release,
    Reset,
    Role,
    Shutdown,
    Step,
    ToController,
    TrainPart,
    TrainStep,
    Welcome,
    decode_to_controller,
    encode,
    salvage_to_controller,
)

__all__ = ["CallError", "Link", "LinkState", "Switchboard"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
DATA_MESSAGES = frozenset(
    {Execute, Generate, Release, Reset, Step, Close, Play, TrainPart, TrainStep, Publish}
)
"""What must keep its order goes one way: a Close after its Reset, a TrainStep after its parts."""
GOODBYE_PATIENCE_S = 0.2
"""For the last message of a worker that ends; it is on its way when the end shows, and knows the reason."""
LEAVING_PATIENCE_S = 5.0
"""For a worker to say that it has dropped what was cancelled; then it counts as dropped."""


class CallError(Exception):
    """A call without its answer; ``kind`` says why, the text what happened at which worker."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def retry(self) -> bool:
        """Whether the same request may succeed elsewhere."""
        return self.kind in (FailureKind.INFRASTRUCTURE, FailureKind.LOST, FailureKind.TIMEOUT)


class LinkState(enum.StrEnum):
    """How far a worker is."""

    JOINING = "joining"
    READY = "ready"
    GONE = "gone"


class Link:
    """One connected worker."""

    __slots__ = (
        "beat",
        "capacity",
        "control",
        "data",
        "facts",
        "failures_in_a_row",
        "hello",
        "last_heard",
        "leaving",
        "ready",
        "sessions",
        "state",
        "tasks",
    )

    def __init__(self, hello: Hello, now: float, *, control: Outbox, data: Outbox) -> None:
        self.hello = hello
        self.control = control
        self.data = data
        self.state = LinkState.JOINING
        self.last_heard = now
        self.capacity = 0
        self.facts: dict[str, str] = {}
        self.beat = Beat(0, 0)
        self.ready: Ready | None = None
        self.failures_in_a_row = 0
        self.leaving: asyncio.TimerHandle | None = None
        """Set while an end that has shown waits for the worker's own word on it."""
        self.tasks: frozenset[str] = frozenset()
        """Those whose episodes it holds; empty: all (environment workers)."""
        self.sessions = 0
        """Episodes placed on it (environment workers)."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        return self.hello.name

    @property
    def role(self) -> Role:
        """What it does."""
        return self.hello.role

    def outbox(self, kind: type[Message]) -> Outbox:
        """Where messages of that kind go."""
        return self.data if kind in DATA_MESSAGES else self.control


class _Call:
    """A request that waits for its answer; the request itself may be large, and is not kept."""

    __slots__ = ("answer", "link", "on_left", "on_progress", "request", "timeout_s")

    def __init__(
        self,
        answer: asyncio.Future[Message],
        link: Link,
        request: type[Message],
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None,
        on_left: Callable[[], None] | None,
    ) -> None:
        self.answer = answer
        self.link = link
        self.request = request
        self.timeout_s = timeout_s
        self.on_progress = on_progress
        self.on_left = on_left


class Switchboard:
    """All links of a run."""

    def __init__(
        self,
        transport: Transport,
        welcome: Welcome,
        *,
        run: RunContext,
        on_change: Callable[[Link, str], None],
        on_leaving: Callable[[Link], None] = lambda link: None,
    ) -> None:
        """``on_change(link, reason)`` hears each change of a link's state, ``on_leaving`` of one about to go."""
        self.links: dict[str, Link] = {}
        self.refused_frames = 0
        """Frames from workers that did not decode."""
        self.refused_frames_at_workers = 0
        """Frames to workers that did not decode, by the workers' own count."""
        self.late_answers = 0
        """Answers to calls that had ended without them."""
        self._transport = transport
        self._welcome = welcome
        self._run = run
        self._on_change = on_change
        self._on_leaving = on_leaving
        self._pending: dict[int, _Call] = {}
        self._leaving: dict[int, tuple[Link, Callable[[], None]]] = {}
        """Calls that were given up, of which the worker has yet to say that it has dropped them."""
        self._by_identity: dict[bytes, Link] = {}
        """Of both of its connections."""
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._expire)
        self._attached: set[str] = set()
        """Names whose data connection is there."""
        self._last_seq = 0
        self._beats: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept workers from now on."""
        self._transport.start(self._receive)
        self._beats = asyncio.get_running_loop().create_task(self._beat(), name="beats")

    async def close(self) -> None:
        """Fail what is pending and stop."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait({self._beats})
        for link in list(self.links.values()):
            self.lose(link, "the run is over")
        self._deadlines.close()
        self._transport.close()

    def of(self, role: Role) -> list[Link]:
        """The ready workers of a role, in the order they came."""
        return [
            link
            for link in self.links.values()
            if link.role is role and link.state is LinkState.READY and link.leaving is None
        ]

    def next_seq(self) -> int:
        """A sequence id for a request; never used twice."""
        self._last_seq += 1
        return self._last_seq

    # --- calls ----------------------------------------------------------------------------------------

    async def call(
        self,
        link: Link,
        request: Message,
        expect: type[Answer],
        *,
        timeout_s: float,
        payload: list[bytes] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_left: Callable[[], None] | None = None,
    ) -> Answer:
        """Send ``request``, which carries a fresh ``seq``, and wait for its answer.

        ``CallError`` when the worker fails it, is lost or is silent for ``timeout_s``; a caller that is
        cancelled, or that times out, cancels the request at the worker too.  ``on_left`` hears, once, that the worker
        does not have the request any more: that can be later than the end of the call.
        """
        if link.state is LinkState.GONE or link.leaving is not None:
            if on_left is not None:
                on_left()
            raise CallError(FailureKind.INFRASTRUCTURE, f"{link.name} is gone")
        seq: int = request.seq  # type: ignore[attr-defined]
        asked = type(request)
        future: asyncio.Future[Message] = self._loop.create_future()
        call = self._pending[seq] = _Call(future, link, asked, timeout_s, on_progress, on_left)
        self._deadlines.set(seq, timeout_s)
        try:
            self.tell(link, request, payload)
            del (
                request,
                payload,
            )  # they are as large as a prompt or a batch, and this coroutine waits for long
            answer = await future
        except asyncio.CancelledError:
            self._cancel(call, seq)
            raise
        finally:
            self._deadlines.clear(seq, timeout_s)
            self._pending.pop(seq, None)
            if call.on_left is not None:
                call.on_left()
            # An error holds this frame, and the future holds the error: a cycle, and a trajectory hangs on it.
            del future, call
        if type(answer) is expect:
            return answer
        if isinstance(answer, Failure):
            raise CallError(answer.kind, f"{link.name}: {answer.message}")
        raise CallError(
            FailureKind.INFRASTRUCTURE,
            f"{link.name} answered {asked.__name__} with {type(answer).__name__}",
        )

    def tell(self, link: Link, message: Message, payload: list[bytes] | None = None) -> None:
        """Send without an answer, and empty ``payload``; a worker that can't be reached is lost."""
        if link.state is LinkState.GONE:
            return
        outbox = link.outbox(type(message))
        if payload:
            outbox.add_with(message, payload)
        else:
            outbox.add(message)

    def _cancel(self, call: _Call, seq: int) -> None:
        """Behind the request, on its own connection: a cancel that overtook it would find nothing."""
        if call.link.state is LinkState.GONE:
            return
        call.link.outbox(call.request).add(Cancel(seq))
        if call.on_left is not None and not isinstance(_result_of(call.answer), Message):
            self._leaving[seq] = call.link, call.on_left
            call.on_left = None
            self._deadlines.set(-seq, LEAVING_PATIENCE_S)

    def _left(self, seq: int) -> bool:
        """The worker has dropped request ``seq``, as far as anybody can know; whether somebody waited for that."""
        waited = self._leaving.pop(seq, None)
        if waited is None:
            return False
        self._deadlines.clear(-seq, LEAVING_PATIENCE_S)
        waited[1]()
        return True

    def _outbox(self, connection: str, name: str) -> Outbox:
        identity = f"{connection}:{name}".encode()

        def send(frames: list[bytes]) -> None:
            link = self._by_identity.get(identity)
            if link is None:
                return
            try:
                self._transport.send(identity, frames)
            except Unreachable as error:
                if link.leaving is None and link.state is not LinkState.GONE:
                    self.lose_soon(link, f"unreachable: {error}")

        return Outbox(send)

    def lose_soon(self, link: Link, reason: str) -> None:
        """Count ``link`` as gone for ``reason`` in a moment, unless its goodbye tells a better one first."""
        if link.leaving is not None:
            link.leaving.cancel()
        link.leaving = self._loop.call_later(GOODBYE_PATIENCE_S, self.lose, link, reason)
        self._on_leaving(link)

    def lose(self, link: Link, reason: str) -> None:
        """Count ``link`` as gone, and fail its calls."""
        if link.state is LinkState.GONE:
            return
        link.state = LinkState.GONE
        if link.leaving is not None:
            link.leaving.cancel()
        link.control.flush()  # it may have been told to end just now
        self.links.pop(link.name, None)
        for identity in _identities(link.name):
            self._by_identity.pop(identity, None)
        self._attached.discard(link.name)
        self._fail_calls(link, reason)
        self._on_change(link, reason)

    def shut_down(self, reason: str) -> None:
        """Tell every worker to end."""
        for link in list(self.links.values()):
            self.tell(link, Shutdown(reason))

    def _fail_calls(self, link: Link, reason: str) -> None:
        for call in list(self._pending.values()):
            if call.link is link and not call.answer.done():
                said = f"{link.name} is lost: {reason}"
                call.answer.set_exception(CallError(FailureKind.INFRASTRUCTURE, said))
        for seq in [seq for seq, (where, _) in self._leaving.items() if where is link]:
            self._left(seq)

    def _expire(self, seq: int) -> None:
        if seq < 0:
            self._left(-seq)
            return
        call = self._pending.get(seq)
        if call is None or call.answer.done():
            return
        said = f"{call.link.name} did not answer {call.request.__name__} within {call.timeout_s:g} s"
        call.answer.set_exception(CallError(FailureKind.TIMEOUT, said))
        self._cancel(call, seq)

    # --- what comes in --------------------------------------------------------------------------------

    def _receive(self, identity: bytes, frames: list[bytes]) -> int:
        try:
            messages = decode_to_controller(frames[0])
        except msgspec.DecodeError:
            messages = salvage_to_controller(frames[0])
            self.refused_frames += 1
        link = self._by_identity.get(identity)
        if link is not None and messages:
            link.last_heard = self._loop.time()
        for message in messages:
            try:
                self._heard(identity, link, message)
            except (
                Exception
            ) as error:  # the boundary of a socket's callback, whose exceptions nobody else sees
                self._run.bug(error)
        return len(messages)

    def _heard(self, identity: bytes, link: Link | None, message: ToController) -> None:
        if type(message) not in _NO_ANSWERS:
            call = self._pending.get(message.seq)  # type: ignore[union-attr]
            if call is not None and call.link is link and not call.answer.done():
                call.answer.set_result(message)
            elif link is not None and link.state is not LinkState.GONE:
                waited = self._left(message.seq)  # type: ignore[union-attr]
                if not (waited and isinstance(message, Failure) and message.kind is FailureKind.CANCELLED):
                    self.late_answers += 1
            return
        if isinstance(message, Progress):
            call = self._pending.get(message.seq)
            if (
                call is not None
                and call.link is link
                and call.on_progress is not None
                and not call.answer.done()
            ):
                call.on_progress(message)
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        name = identity.partition(b":")[2].decode(errors="replace")
        if isinstance(message, Attach):
            self._attached.add(name)  # it may come before the hello, which takes the other connection
        link = self.links.get(name)
        if link is not None:
            self._heard_of(link, message)

    def _heard_of(self, link: Link, message: ToController) -> None:
        match message:
            case Attach():
                self._welcome_ready(link)
            case Beat():
                self.refused_frames_at_workers += message.refused_frames - link.beat.refused_frames
                link.beat = message
            case Ready():
                link.ready = message
                self._welcome_ready(link)
            case Goodbye(reason=reason):
                self.lose(link, f"it left: {reason}")
            case _:
                raise AssertionError(f"{type(message).__name__} is an answer")

    def _welcome_ready(self, link: Link) -> None:
        """A worker is ready when it says so and both of its connections are there."""
        if link.ready is not None and link.name in self._attached and link.state is LinkState.JOINING:
            link.capacity, link.facts, link.state = link.ready.capacity, link.ready.facts, LinkState.READY
            link.tasks = frozenset(link.ready.tasks)
            self._on_change(link, "")

    def _greet(self, identity: bytes, hello: Hello) -> None:
        reason = ""
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"protocol {hello.protocol}, this controller speaks {PROTOCOL_VERSION}: install the same rollart"
        elif identity != f"control:{hello.name}".encode():
            reason = "the name in the hello is not the connection's"
        elif hello.name in self.links:
            reason = f"a worker named {hello.name} is here already"
        answer: Message = Refused(reason) if reason else self._welcome
        try:
            self._transport.send(identity, [encode(answer)])
        except Unreachable:
            return
        if reason:
            logger.warning("refused worker %s: %s", hello.name, reason)
            return
        name = hello.name
        link = Link(
            hello, self._loop.time(), control=self._outbox("control", name), data=self._outbox("data", name)
        )
        self.links[name] = link
        self._by_identity.update((identity, link) for identity in _identities(name))
        self._on_change(link, "")

    async def _beat(self) -> None:
        try:
            await self._beat_for_ever()
        except Exception as error:  # the boundary of the beats: without them all workers would end
            self._run.bug(error)

    async def _beat_for_ever(self) -> None:
        loop = self._loop
        silence = self._welcome.controller_timeout_s
        while True:
            await asyncio.sleep(self._welcome.heartbeat_s)
            for link in list(self.links.values()):
                self.tell(link, ControllerBeat())
                # A joining worker may be deep in an engine's start; its start has a deadline of its own.
                if link.state is LinkState.READY and loop.time() - link.last_heard > silence:
                    self.lose(link, f"silent for {silence:g} s")


_NO_ANSWERS = frozenset({Hello, Attach, Ready, Beat, Goodbye, Progress})


def _result_of(answer: asyncio.Future[Message]) -> Message | None:
    """What came, if anything did."""
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        return answer.result()
    return None


def _identities(name: str) -> tuple[bytes, bytes]:
    """Of a worker's connections."""
    return f"control:{name}".encode(), f"data:{name}".encode()
