"""Frames, keys, calls and deadlines over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from rollart.controller.events import Event
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.controller.transport import ZmqTransport
from rollart.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Close,
    Done,
    Failure,
    FailureKind,
    Hello,
    Message,
    Pull,
    Pulled,
    Ready,
    Role,
    Suspend,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)

WELCOME = Welcome(b"", "", "", "", "", "", heartbeat_s=0.05, controller_timeout_s=1.0)


class Client:
    """A worker's end of the wire, by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], transport: ZmqTransport, name: str) -> None:
        self.name = name
        self.heard: list[ToWorker] = []
        self.sockets = {kind: self.dial(context, transport, kind) for kind in ("control", "data")}

    def dial(
        self, context: zmq.Context[zmq.Socket[bytes]], transport: ZmqTransport, kind: str
    ) -> zmq.Socket[bytes]:
        peer = transport.peer_file
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{kind}:{self.name}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_serverkey = peer.server_public.encode()
        socket.curve_publickey, socket.curve_secretkey = (
            peer.client_public.encode(),
            peer.client_secret.encode(),
        )
        socket.connect(peer.address)
        return socket

    def say(self, message: Message, kind: str = "control") -> None:
        self.sockets[kind].send(encode(message))

    def hello(self, **changes: object) -> None:
        fields = {
            "protocol": PROTOCOL_VERSION,
            "role": Role.TRAINER,
            "name": self.name,
            "pid": 1,
            "hardware_class": "CPU",
            "packages": {},
        }
        self.say(Hello(**{**fields, **changes}))  # type: ignore[arg-type]
        self.say(Attach(self.name), "data")

    async def hears(self, kind: type[Message]) -> ToWorker:
        """The next message of that kind on the control connection."""
        while True:
            with contextlib.suppress(zmq.Again):
                self.heard += decode_to_worker(self.sockets["control"].recv(zmq.NOBLOCK))
            while self.heard:
                message = self.heard.pop(0)
                if isinstance(message, kind):
                    return message
            await asyncio.sleep(0.002)


class Wire:
    """A switchboard on a real transport, and clients to it."""

    def __init__(self) -> None:
        self.transport = ZmqTransport()
        self.changes: list[tuple[str, LinkState, str]] = []
        self.events: list[Event] = []
        self.bugs: list[BaseException] = []
        self.switchboard = Switchboard(
            self.transport,
            WELCOME,
            run=RunContext(write=self.events.append, bug=self.bugs.append),
            on_change=self.changed,
        )
        self.context = zmq.Context()

    def changed(self, link: Link, reason: str) -> None:
        self.changes.append((link.name, link.state, reason))

    async def join(self, name: str) -> tuple[Client, Link]:
        client = Client(self.context, self.transport, name)
        client.hello()
        await client.hears(Welcome)
        client.say(Ready(1, {}))
        await until(
            lambda: name in self.switchboard.links and self.switchboard.links[name].state is LinkState.READY
        )
        return client, self.switchboard.links[name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    wire.switchboard.start()
    yield wire
    await wire.switchboard.close()
    assert wire.bugs == []
    wire.context.destroy(linger=0)


async def test_a_peer_without_the_key_is_refused_and_counted(wire: Wire) -> None:
    sockets = []
    for keys in (zmq.curve_keypair(), None):
        socket = wire.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.curve_serverkey = wire.transport.peer_file.server_public.encode()
            socket.curve_publickey, socket.curve_secretkey = keys
        socket.connect(wire.transport.address)
        socket.send(encode(Hello(PROTOCOL_VERSION, Role.TRAINER, "intruder", 1, "CPU", {})))
        sockets.append(socket)
    await until(lambda: wire.transport.refused_peers >= 1)
    await asyncio.sleep(0.2)
    assert wire.switchboard.links == {}


async def test_a_wrong_protocol_or_a_taken_name_is_refused(wire: Wire) -> None:
    await wire.join("one")
    other = Client(wire.context, wire.transport, "two")
    other.hello(protocol=99)
    assert "this controller speaks" in (await other.hears(Message)).reason  # type: ignore[union-attr]
    other.hello(name="one")
    assert "not the connection's" in (await other.hears(Message)).reason  # type: ignore[union-attr]


async def test_frames_that_are_no_message_are_counted_and_dropped(wire: Wire) -> None:
    client, link = await wire.join("one")
    for frame in (b"", b"\xff", b"\x93\x01\x02\x03", encode(Close("x"))):
        client.sockets["control"].send(frame)
    await until(lambda: wire.switchboard.refused_frames == 4)
    assert link.state is LinkState.READY


async def test_a_call_ends_in_its_answer_or_in_its_failure(wire: Wire) -> None:
    client, link = await wire.join("one")
    calls = [
        asyncio.create_task(
            wire.switchboard.call(link, Suspend(wire.switchboard.next_seq()), Done, timeout_s=5)
        )
        for _ in range(3)
    ]
    seqs = [(await client.hears(Suspend)).seq for _ in calls]  # type: ignore[union-attr]
    client.say(Failure(seqs[0], FailureKind.DETERMINISTIC, "no"))
    client.say(Done(seqs[2]))
    client.say(Ready(3, {}))
    client.say(Done(seqs[1]))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], CallError) and not results[0].retry and "one: no" in str(results[0])
    assert [type(r) for r in results[1:]] == [Done, Done]


async def test_a_late_answer_is_dropped_and_the_request_cancelled(wire: Wire) -> None:
    client, link = await wire.join("one")
    with pytest.raises(CallError, match=r"one did not answer Suspend within 0.05 s") as caught:
        await wire.switchboard.call(link, Suspend(wire.switchboard.next_seq()), Done, timeout_s=0.05)
    assert caught.value.kind is FailureKind.TIMEOUT and caught.value.retry
    cancel = await client.hears(Cancel)
    client.say(Done(cancel.seq))  # type: ignore[union-attr]
    await until(lambda: wire.switchboard.late_answers == 1)


async def test_a_silent_worker_is_lost_and_its_calls_fail_at_once(wire: Wire) -> None:
    _, link = await wire.join("one")
    with pytest.raises(CallError, match="one is lost: silent for 1 s"):
        await wire.switchboard.call(link, Pull(wire.switchboard.next_seq(), 1, "m"), Pulled, timeout_s=60)
    assert wire.changes[-1] == ("one", LinkState.GONE, "silent for 1 s")
    with pytest.raises(CallError, match="gone"):
        await wire.switchboard.call(link, Pull(wire.switchboard.next_seq(), 1, "m"), Pulled, timeout_s=60)


async def test_nobody_listens_beyond_loopback_and_the_key_file_is_private(wire: Wire, tmp_path: Path) -> None:
    assert wire.transport.address.startswith("tcp://127.0.0.1:")
    path = tmp_path / "peer.json"
    wire.transport.peer_file.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        wire.transport.peer_file.write(path)
