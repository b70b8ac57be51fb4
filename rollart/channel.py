"""A ZeroMQ socket on an asyncio loop, without a task or a future per message.

ZeroMQ's file descriptor is edge-triggered: it says only that something may have changed, and a send can eat
the edge that announced a message.  So the socket is drained until it is empty on each edge and again after
each send.  A drain gives the loop back after ``MAX_DRAIN`` messages, so that a flood never starves timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

__all__ = ["Channel"]

MAX_DRAIN = 512


class Channel:
    """Owns ``socket``: calls ``on_message(frames)`` for each message; ``send`` never blocks."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_soon: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._drain)
        self._schedule()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message; ``zmq.ZMQError`` where the peer is unknown (EHOSTUNREACH) or its queue full (EAGAIN)."""
        if len(frames) == 1:
            self._socket.send(frames[0], zmq.NOBLOCK)
        else:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        self._schedule()

    def close(self, *, linger_ms: int) -> None:
        """Stop receiving and close; unsent messages have ``linger_ms`` to leave."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        if self._drain_soon is not None:
            self._drain_soon.cancel()
        self._loop = None
        self._socket.close(linger=linger_ms)

    def _schedule(self) -> None:
        if self._drain_soon is None and self._loop is not None:
            self._drain_soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._drain_soon is not None:
            self._drain_soon.cancel()
            self._drain_soon = None
        for _ in range(MAX_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
            if self._loop is None:  # closed by the callback
                return
        self._schedule()
