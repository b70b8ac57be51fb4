"""A ZeroMQ socket on an asyncio loop, without a task or a future per message.

ZeroMQ's file descriptor is edge-triggered: it says only that something may have changed, and a send can eat
the edge that announced a message.  So the socket is drained until it is empty on each edge and again after
each send.  A drain gives the loop back after it has begun ``MAX_DRAIN`` pieces of work, so that a flood never
starves timers, and none of them waits for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import zmq

__all__ = ["Channel", "OnMessage"]

MAX_DRAIN = 16
LARGE_BYTES = 1 << 17
OnMessage = Callable[[list[bytes]], int | None]
"""Takes a message's frames, and says how many pieces of work it began, if not one."""
# As plain numbers: pyzmq's flags are enums, whose every | is a call.
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Channel:
    """Owns ``socket``: calls ``on_message(frames)`` for each message; ``send`` never blocks."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: OnMessage) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_soon: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._drain)
        self._schedule()

    def send(self, frames: list[bytes]) -> None:
        """Queue a message; ``zmq.ZMQError`` where the peer is unknown (EHOSTUNREACH) or its queue full (EAGAIN).

        ``frames`` is emptied on the way: a batch is as large as all its tokens, and is not to be there twice.
        """
        frames.reverse()
        while len(frames) > 1:
            self._socket.send(frames.pop(), MORE)
        self._socket.send(frames.pop(), NOBLOCK)
        self._schedule()

    def close(self, *, linger_ms: int) -> None:
        """Stop receiving and close; unsent messages have ``linger_ms`` to leave."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
        if self._drain_soon is not None:
            self._drain_soon.cancel()
        self._loop = None
        self._socket.close(linger=linger_ms)

    def _receive(self) -> list[bytes]:
        frames: list[bytes] = []
        while True:
            frame = self._socket.recv(NOBLOCK, copy=False)
            # A large one stays where ZeroMQ has it: most are passed on, or dropped, without a look into them.
            # What reads it can't tell the view from bytes.
            frames.append(frame.bytes if len(frame) < LARGE_BYTES else cast(bytes, frame.buffer))
            if not frame.more:
                return frames

    def _schedule(self) -> None:
        if self._drain_soon is None and self._loop is not None:
            self._drain_soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._drain_soon is not None:
            self._drain_soon.cancel()
            self._drain_soon = None
        begun = 0
        while begun < MAX_DRAIN:
            try:
                pieces = self._on_message(self._receive())
            except zmq.Again:
                return
            begun += max(1, pieces or 0)  # also what is dropped takes time
            if self._loop is None:  # closed by the callback
                return
        self._schedule()
