"""Outbox: the messages of one turn of the event loop leave in one frame.

A frame has a price (a system call, a signature, a wake-up of the receiver) that many small messages share
this way.  The frame leaves as soon as what is ready now has been done, and before that when it is full or when its
first message has waited for ``LONGEST_S`` as the next is added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.packed_array import PackedArray
from rollart.protocol import Message, encode

__all__ = ["MOST_ANSWERS", "MOST_MESSAGES", "Outbox"]

MOST_MESSAGES = 64
MOST_ANSWERS = 32
"""In a worker's frame: the controller takes up a frame whole, and all trajectories wait for as long."""
MOST_BYTES = 1 << 16
LONGEST_S = 0.002


class Outbox:
    """One for each connection; ``send(frames)`` takes the frames of a ZeroMQ message."""

    __slots__ = ("_flush_soon", "_frame", "_loop", "_most", "_send", "_since")

    def __init__(self, send: Callable[[list[bytes]], None], *, most_messages: int = MOST_MESSAGES) -> None:
        self._send = send
        self._most = most_messages
        self._frame = PackedArray()
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._flush_soon = False

    def add(self, message: Message) -> None:
        """Send ``message`` soon, after what was added before."""
        self._frame.append(message)
        now = self._loop.time()
        if self._frame.count == 1:
            self._since = now
        if self._frame.count >= self._most or self._frame.size >= MOST_BYTES or now - self._since > LONGEST_S:
            self.flush()
        elif not self._flush_soon:
            self._flush_soon = True
            self._loop.call_soon(self._flush_now)

    def add_with(self, message: Message, payload: list[bytes]) -> None:
        """Send ``message`` with its payload frames, now, after what was added before; ``payload`` is emptied."""
        self.flush()
        payload.insert(0, encode(message))
        self._send(payload)
        payload.clear()

    def flush(self) -> None:
        """Send what is here now."""
        if self._frame.count:
            self._send([bytes(self._frame.take())])

    def _flush_now(self) -> None:
        self._flush_soon = False
        self.flush()
