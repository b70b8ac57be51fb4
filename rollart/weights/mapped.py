"""Versions that lie in this host's memory: bucket files in a folder, mapped.

``FOLDER/manifest`` says what is in them.  A reader keeps a lock on each bucket that it maps, so none of them is written
over meanwhile, and one that is removed stays what it was until the last mapping goes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import xxhash

from rollart.weights.rooms import read_lock
from rollart.weights.store import (
    Bucket,
    DamagedWeights,
    Manifest,
    MissingWeights,
    StoreError,
    Superseded,
    Tensor,
    decode_manifest,
    never,
)

__all__ = ["MANIFEST", "MappedWeights", "checksum_of", "open_weights"]

MANIFEST = "manifest"
BLOCK_BYTES = 1 << 20
"""Read at once to be checked: it stays in the processor's cache."""


class MappedWeights:
    """A version's buckets, mapped.  A ``HostWeights``."""

    def __init__(self, path: Path, manifest: Manifest, buckets: Sequence[mmap.mmap | None]) -> None:
        self._path = path
        self._manifest = manifest
        self._buckets = list(buckets)

    @property
    def manifest(self) -> Manifest:
        """What the version holds."""
        return self._manifest

    @property
    def path(self) -> str:
        """Of the manifest."""
        return str(self._path)

    @property
    def buckets(self) -> Sequence[mmap.mmap | None]:
        """The mappings, in the manifest's order; ``None`` for one without bytes."""
        return self._buckets

    @property
    def moved_bytes(self) -> int:
        """Nothing comes from elsewhere."""
        return 0

    @property
    def refetched(self) -> int:
        """Nothing is fetched."""
        return 0

    def __iter__(self) -> Iterator[tuple[Tensor, memoryview]]:
        """Each tensor with its bytes, not copied; ``StoreError`` after ``close``."""
        if len(self._buckets) != len(self._manifest.buckets):
            raise StoreError(f"the weights of version {self._manifest.version} are closed")
        for tensor in self._manifest.tensors:
            bucket = self._buckets[tensor.bucket]
            whole = memoryview(bucket if bucket is not None else b"")
            yield tensor, whole[tensor.offset : tensor.offset + tensor.size]

    def close(self) -> None:
        """Let go of the mappings; each is unmapped when its last view is gone."""
        self._buckets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_weights(path: str, *, verify: bool, stop: Callable[[], bool] = never) -> MappedWeights:
    """The version whose manifest is at ``path``, mapped.

    ``MissingWeights`` when it, or one of its buckets, is not there; ``DamagedWeights``, naming the bucket, when
    the bytes are not those that were published.  ``verify=False`` leaves the checksums out, for a version that
    this host has checked already.
    """
    place = Path(path)
    try:
        contents = decode_manifest(place.read_bytes(), path)
    except OSError as error:
        raise MissingWeights(f"no weights at {path}: {error.strerror}") from None
    buckets = []
    for bucket in contents.buckets:
        if stop():
            raise Superseded(f"version {contents.version} is not wanted any more")
        buckets.append(_map(place.parent, bucket, contents.version, verify))
    if not place.exists():  # it was collected before all of its buckets were locked
        raise MissingWeights(f"no weights at {path}: they were removed")
    return MappedWeights(place, contents, buckets)


def checksum_of(data: mmap.mmap | memoryview | bytes) -> int:
    """XXH3-64, which is as fast as memory here."""
    return xxhash.xxh3_64_intdigest(data)


def _map(folder: Path, bucket: Bucket, version: int, verify: bool) -> mmap.mmap | None:
    """The bucket's bytes, ``None`` when it has none."""
    where = f"bucket {bucket.name} of version {version} in {folder}"
    try:
        with (folder / bucket.name).open("rb", 0) as file:
            if not read_lock(file.fileno()):
                raise MissingWeights(f"{where} was removed")
            size = os.fstat(file.fileno()).st_size
            if size != bucket.size:
                raise DamagedWeights(f"{where} has {size} bytes, the manifest says {bucket.size}")
            if verify and _checksum_in(file) != bucket.checksum:
                raise DamagedWeights(
                    f"{where} does not have the checksum in the manifest: its bytes were changed"
                )
            # A private mapping: torch wants writable memory, and nothing written through it reaches the store.
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None
    except OSError as error:
        raise MissingWeights(f"{where} can't be read: {error.strerror}") from None


def _checksum_in(file: BinaryIO) -> int:
    """Of a file from its beginning; read in blocks, since entering it into a page table would take longer."""
    block = memoryview(bytearray(BLOCK_BYTES))
    found = xxhash.xxh3_64()
    while count := file.readinto(block):  # type: ignore[attr-defined]  # a raw file has it
        found.update(block[:count])
    return found.intdigest()
