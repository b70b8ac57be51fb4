"""What goes between the host and an instance: frames of a number, a length and bytes, on a socket of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import cast

__all__ = ["READY", "FrameProtocol", "receive", "send"]

HEAD = struct.Struct("<QQ")
"""Number of the call, bytes that follow.  From the host an empty frame cancels that call."""

READY = 0
"""The number of an instance's first frame, which says that it can serve; no call has it."""


def send(connection: socket.socket, number: int, body: bytes) -> None:
    """Send a frame, blocking."""
    connection.sendall(HEAD.pack(number, len(body)) + body)


def receive(connection: socket.socket) -> tuple[int, bytes] | None:
    """The next frame, blocking; ``None`` when the other side has closed."""
    head = _exactly(connection, HEAD.size)
    if head is None:
        return None
    number, length = HEAD.unpack(head)
    body = _exactly(connection, length)
    return None if body is None else (number, bytes(body))


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


class FrameProtocol(asyncio.Protocol):
    """The host's side, on its event loop."""

    def __init__(self, on_frame: Callable[[int, bytes], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._data = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of ``asyncio.Protocol``."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one, but not by its class

    def data_received(self, data: bytes) -> None:
        """Of ``asyncio.Protocol``."""
        self._data += data
        while len(self._data) >= HEAD.size:
            number, length = HEAD.unpack_from(self._data)
            end = HEAD.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[HEAD.size : end])
            del self._data[:end]
            self._on_frame(number, body)

    def connection_lost(self, error: Exception | None) -> None:
        """Of ``asyncio.Protocol``."""
        self._transport = None
        self._on_end()

    def send(self, number: int, body: bytes) -> None:
        """Send a frame; nothing when the connection is gone."""
        if self._transport is not None:
            self._transport.writelines((HEAD.pack(number, len(body)), body))

    def close(self) -> None:
        """Close the connection: the instance ends."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.close()
