"""The run's private key file: where the controller is, and the CURVE keys to reach it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Peer"]


class Peer(msgspec.Struct, frozen=True):
    """What a worker needs to reach its controller.  Keys are Z85 text."""

    address: str
    server_public: str
    client_public: str
    client_secret: str

    @classmethod
    def read(cls, path: Path) -> Peer:
        """The peer a key file describes; ``OSError`` or ``msgspec.DecodeError`` when it can't be read."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """Write it for the owner's eyes only; an existing file is an error."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self))
