"""Frames between the controller and its workers: a ZeroMQ ROUTER with CURVE, and the interface it fills.

The rest of the controller knows only ``Transport``; the simulator fills the same interface in virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils import z85

from rollart.channel import Channel
from rollart.peer import Peer

__all__ = ["Transport", "Unreachable", "ZmqTransport"]

logger = logging.getLogger(__name__)

OnFrames = Callable[[bytes, list[bytes]], int | None]
"""Called with the sender's identity and the frames of a message; says what ``Channel`` wants to know."""


class Unreachable(Exception):
    """Nobody is connected under that identity, or its queue is full."""


class Transport(Protocol):
    """Moves frames; knows nothing of their meaning."""

    refused_peers: int
    """Handshakes refused for a wrong key, since the start."""

    def start(self, on_frames: OnFrames) -> None:
        """Begin to receive on the running loop."""

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        """Send, without waiting, and empty ``frames``; ``Unreachable`` when it can't."""

    def close(self) -> None:
        """Stop; what was sent has a moment to leave."""


SEND_QUEUE_MESSAGES = 100_000


class ZmqTransport:
    """A ROUTER socket that only accepts peers with this run's client key."""

    def __init__(self, *, bind: str = "tcp://127.0.0.1:*") -> None:
        """Bind at once, to a port that the system picks unless ``bind`` names one."""
        self.refused_peers = 0
        self._context = zmq.Context()
        self._server_public, self._server_secret = zmq.curve_keypair()
        self._client_public, self._client_secret = zmq.curve_keypair()
        self._gate = self._bind_gate()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"rollart")
        socket.curve_server = True
        socket.curve_secretkey = self._server_secret
        socket.curve_publickey = self._server_public
        socket.bind(bind)
        self.address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._channel = Channel(socket, self._receive)
        self._on_frames: OnFrames | None = None

    @property
    def peer_file(self) -> Peer:
        """How workers reach this transport."""
        return Peer(
            self.address,
            self._server_public.decode(),
            self._client_public.decode(),
            self._client_secret.decode(),
        )

    def start(self, on_frames: OnFrames) -> None:
        """Begin to receive on the running loop."""
        self._on_frames = on_frames
        self._gate.start()
        self._channel.start()

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        """Queue a message; ``Unreachable`` when nobody has that identity or its queue is full."""
        try:
            frames.insert(0, identity)
            self._channel.send(frames)
        except zmq.Again:
            raise Unreachable(f"{SEND_QUEUE_MESSAGES} messages are queued already") from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable("not connected") from None

    def close(self) -> None:
        """Close the sockets; sent messages have half a second to leave."""
        self._channel.close(linger_ms=500)
        self._gate.close(linger_ms=0)
        self._context.term()

    def _receive(self, frames: list[bytes]) -> int | None:
        if self._on_frames is None or len(frames) < 2:
            return None
        return self._on_frames(frames[0], frames[1:])

    # ZeroMQ asks a handler inside this process (RFC 27, ZAP) whether a client's key is welcome.

    def _bind_gate(self) -> Channel:
        socket = self._context.socket(zmq.ROUTER)
        socket.bind("inproc://zeromq.zap.01")
        return Channel(socket, self._authenticate)

    def _authenticate(self, frames: list[bytes]) -> None:
        sender, empty, version, request, _domain, _address, _identity, mechanism, *credentials = frames
        welcome = mechanism == b"CURVE" and credentials == [z85.decode(self._client_public)]
        if not welcome:
            self.refused_peers += 1
            logger.warning("refused a peer with an unknown key")
        status = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        self._gate.send([sender, empty, version, request, *status, b"", b""])
