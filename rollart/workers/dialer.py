"""How a worker reaches its controller: two ZeroMQ DEALERs with CURVE, and the interface they fill.

The worker base knows only ``Dialer``; the simulator fills the same interface in virtual time.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import zmq

from rollart.channel import Channel, OnMessage
from rollart.peer import Peer

__all__ = ["Connection", "Dialer", "OnMessage", "ZmqDialer"]


class Connection(Protocol):
    """One way to the controller and back."""

    def send(self, frames: list[bytes]) -> None:
        """Queue a message, and empty ``frames``; one that can't be delivered is lost."""

    def close(self, *, linger_ms: int) -> None:
        """Receive no more; what was sent has ``linger_ms`` to leave."""


class Dialer(Protocol):
    """Makes a worker's connections."""

    address: str
    """Of the controller, for people."""

    def dial(self, kind: str, name: str, on_message: OnMessage) -> Connection:
        """The connection ``kind`` (``control`` or ``data``) of worker ``name``, on the running loop."""

    def close(self) -> None:
        """Let go of everything; all connections are closed."""


class ZmqDialer:
    """Dials the controller that ``peer`` describes."""

    def __init__(self, peer: Peer) -> None:
        self.address = peer.address
        self._peer = peer
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def dial(self, kind: str, name: str, on_message: OnMessage) -> Connection:
        """A DEALER socket with the identity that the controller's switchboard expects."""
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{kind}:{name}".encode())
        socket.curve_serverkey = self._peer.server_public.encode()
        socket.curve_publickey = self._peer.client_public.encode()
        socket.curve_secretkey = self._peer.client_secret.encode()
        connection = _Dealer(socket, on_message)
        socket.connect(self.address)
        connection.start()
        return connection

    def close(self) -> None:
        """End the context; waits for what lingers."""
        if self._context is not None:
            self._context.term()
            self._context = None


class _Dealer(Channel):
    def send(self, frames: list[bytes]) -> None:
        """A full queue means that nobody has read for long: the controller is gone, and beats will say so."""
        with contextlib.suppress(zmq.Again):
            super().send(frames)
