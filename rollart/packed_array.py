"""A MessagePack array that grows: what each frame of the wire and each block of the event stream is."""

from __future__ import annotations

import struct

import msgspec

__all__ = ["PackedArray"]

_HEADER = b"\xdd\0\0\0\0"
"""An array with a 32-bit count, which is filled in at the end."""
_COUNT = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


class PackedArray:
    """Encodes each item as it comes; ``size`` is in bytes."""

    __slots__ = ("_buffer", "count")

    def __init__(self) -> None:
        self._buffer = bytearray(_HEADER)
        self.count = 0

    @property
    def size(self) -> int:
        """Bytes so far."""
        return len(self._buffer)

    def append(self, item: msgspec.Struct) -> None:
        """Add ``item``; one that can't be encoded (a text that is no Unicode) leaves all as it was, and raises."""
        before = len(self._buffer)
        try:
            _encoder.encode_into(item, self._buffer, -1)
        except BaseException:
            del self._buffer[before:]  # else nothing after it could be read
            raise
        self.count += 1

    def take(self) -> bytearray:
        """All of it; it is empty then."""
        packed = self._buffer
        _COUNT.pack_into(packed, 1, self.count)
        self._buffer, self.count = bytearray(_HEADER), 0
        return packed
