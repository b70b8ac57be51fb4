"""The weight store of one machine: files in a shared-memory folder.

``ROOT/vN-ATTEMPT/`` holds version N: its bucket files and then, linked into place when all of them are written,
``manifest``.  Readers map the buckets; a mapping stays what it was until it is closed, so ``collect`` never waits for a
reader and never breaks one.  Files are readable by their owner only.  Written bytes are not synced: shared memory
doesn't outlive the machine, and neither does a run's store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rollart.weights.mapped import MANIFEST, MappedWeights, open_weights
from rollart.weights.packer import pack
from rollart.weights.rooms import Room, Rooms
from rollart.weights.store import FORMAT, Manifest, NamedBuffer, StoreError, never

__all__ = ["BUCKET_BYTES", "LocalStore"]

BUCKET_BYTES = 64 << 20


class LocalStore:
    """Versions below ``root``, a folder in shared memory.  A ``WeightStore``."""

    def __init__(self, root: Path, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """``bucket_bytes`` is where a bucket ends and the next begins; a larger tensor has one of its own."""
        self.root = root
        self._bucket_bytes = bucket_bytes
        self._written: dict[Path, list[Room]] = {}
        """Of each folder that this process wrote."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rooms: Rooms | None = None

    def publish(self, version: int, tensors: Iterable[NamedBuffer], *, anew: bool = False) -> str:
        """Write a version and return the path of its manifest.

        ``StoreError`` when the version exists or a buffer is not what its type and shape say, ``OSError``
        when there is no room; then nothing of it is left.  What a killed publisher left is removed.
        """
        for earlier in self.root.glob(f"v{version}-*"):
            if not (earlier / MANIFEST).exists():  # a killed publisher's
                shutil.rmtree(earlier, ignore_errors=True)
            elif not anew:  # else it stays for those who have it, and goes when its version is collected
                raise StoreError(
                    f"version {version} is in the store {self.root} already; versions never change"
                )
        if self._rooms is None:
            self._rooms = Rooms(self.root / f"spare-{uuid.uuid4().hex[:12]}")
        attempt = uuid.uuid4().hex[:12]
        folder = self.root / f"v{version}-{attempt}"
        folder.mkdir(mode=0o700)
        try:
            rooms, buckets, parts = pack(tensors, self._rooms, folder, attempt, self._bucket_bytes)
            self._written[folder] = rooms
            _write_last(folder / MANIFEST, msgspec.json.encode(Manifest(FORMAT, version, buckets, parts)))
        except BaseException:
            self._remove(folder)
            raise
        return str(folder / MANIFEST)

    def pull(self, reference: str, *, stop: Callable[[], bool] = never) -> MappedWeights:
        """Map the version whose manifest is at ``reference``, and check it; errors as of ``open_weights``."""
        return open_weights(reference, verify=True, stop=stop)

    def close(self) -> None:
        """Let go of the memory that would be used again; versions stay."""
        if self._rooms is not None:
            self._rooms.close()

    def collect(self, below: int) -> None:
        """Remove every version below ``below``.

        The manifest goes first, so that a reader finds either a whole version or none; one that has mapped
        the version keeps it.
        """
        for folder in self.root.glob("v*-*"):
            number = folder.name[1:].partition("-")[0]
            if number.isdigit() and int(number) < below:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        (folder / MANIFEST).unlink(missing_ok=True)
        written = self._written.pop(folder, [])
        if self._rooms is not None:
            self._rooms.give(written)
        shutil.rmtree(folder, ignore_errors=True)


def _write_last(path: Path, data: bytes) -> None:
    """Make ``path`` appear whole, or fail when it is there."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise StoreError(f"{path} was published by another process meanwhile") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
