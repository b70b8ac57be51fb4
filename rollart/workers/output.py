"""What environments print: it goes to the worker's log, but no episode may flood it.

Python's own prints are counted by episode (``Tally``); what arrives at the file descriptors by other ways, such as from
processes that an environment started, passes a pump that lets only so much through.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TextIO

__all__ = ["Tally", "TooMuchOutput", "counting", "metered", "pumped"]

BURST_BYTES = 64 << 20
BYTES_PER_SECOND = 256 << 10
"""What the log may grow by in the long run."""


class TooMuchOutput(Exception):
    """An episode printed more than it may."""


class Tally:
    """What one episode has printed."""

    __slots__ = ("most", "used")

    def __init__(self, most: int) -> None:
        """``most`` characters are let through."""
        self.most = most
        self.used = 0

    def check(self) -> None:
        """``TooMuchOutput`` when it was too much."""
        if self.used > self.most:
            raise TooMuchOutput(
                f"printed more than {self.most / 2**20:g} MiB (environments.max_output_mib): remove the prints, or "
                "what floods stdout"
            )


_current: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextlib.contextmanager
def counting(tally: Tally) -> Iterator[None]:
    """What this thread or task prints meanwhile counts for ``tally``."""
    token = _current.set(tally)
    try:
        yield
    finally:
        _current.reset(token)


class _Metered:
    """A text stream that counts; for the rest it is ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        tally = _current.get()
        if tally is not None:
            tally.used += len(text)
            tally.check()
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def metered() -> Callable[[], None]:
    """Count what is printed by Python from now on; what is returned ends it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Metered(sys.stdout), _Metered(sys.stderr)

    def end() -> None:
        sys.stdout, sys.stderr = before

    return end


@contextlib.contextmanager
def pumped(burst: int = BURST_BYTES, per_second: int = BYTES_PER_SECOND) -> Iterator[None]:
    """While it lasts, what arrives at file descriptors 1 and 2 of this process and its children is let through only
    ``burst`` bytes at once and ``per_second`` in the long run."""
    kept = os.dup(1), os.dup(2)
    reader, writer = os.pipe()
    pump = threading.Thread(target=_pump, args=(reader, kept[0], burst, per_second), daemon=True)
    pump.start()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        pump.join(timeout=1.0)  # a process that was left behind may hold the other end


def _pump(reader: int, log: int, burst: int, per_second: int) -> None:
    allowed, dropped, at = float(burst), 0, time.monotonic()
    while data := os.read(reader, 1 << 16):
        now = time.monotonic()
        allowed, at = min(burst, allowed + (now - at) * per_second), now
        if len(data) > allowed:
            if not dropped:
                _write(log, b"\n[from here on output is left out: there is too much of it]\n")
            dropped += len(data)
            continue
        if dropped:
            _write(log, f"\n[{dropped} bytes of output were left out]\n".encode())
            dropped = 0
        allowed -= len(data)
        _write(log, data)


def _write(log: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the disk is full: an environment must not block for that
        while data:
            data = data[os.write(log, data) :]
