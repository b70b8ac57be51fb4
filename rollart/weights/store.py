"""What a weight store is: immutable versions of a model's weights, published once and pulled by many.

A version is a set of buckets (runs of bytes) and a manifest, which says where each tensor lies and what each
bucket's checksum is.  The manifest is written last, so a version that can be found is whole; nothing of it
ever changes afterwards.  This module knows no torch: tensors are names, types, shapes and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "FORMAT",
    "Bucket",
    "DamagedWeights",
    "Delta",
    "HostWeights",
    "Manifest",
    "MissingWeights",
    "NamedBuffer",
    "StoreError",
    "Superseded",
    "Tensor",
    "TransferFailed",
    "WeightStore",
    "decode_manifest",
    "never",
    "tensor_bytes",
]

FORMAT = 3
"""Of the manifest; readers refuse another."""
ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple of it."""
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by the names that torch gives its types."""

NamedBuffer = tuple[str, str, Sequence[int], object]
"""A tensor to publish: name, dtype, shape, and its elements as a contiguous buffer."""


def never() -> bool:
    """A pull that is never stopped."""
    return False


class StoreError(ValueError):
    """A version can't be published or used; the message says which and why."""


class TransferFailed(StoreError):
    """The store could not do it now; another time, or the version stored anew, may help."""


class Superseded(TransferFailed):
    """Nobody wants the version any more that was being pulled."""


class MissingWeights(TransferFailed):
    """A version, or a part of it, is not in the store."""


class DamagedWeights(TransferFailed):
    """A version's bytes are not the ones that were published."""


class Delta(msgspec.Struct, frozen=True):
    """What turns another bucket, of the same size, into this one; ``rollart.weights.delta`` has the format."""

    name: str
    size: int
    base: int
    """Checksum of the bucket that it changes."""
    width: int
    """Bytes of an element."""


class Bucket(msgspec.Struct, frozen=True):
    """One piece of a version's bytes."""

    name: str
    """Unique in the store: it holds the publishing attempt's random id."""
    size: int
    checksum: int
    """XXH3-64 of the bytes."""
    delta: Delta | None = None
    """A shorter way to it, for who has its base."""


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor's elements lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's buckets."""
    offset: int
    size: int
    """Bytes."""


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a version."""

    format: int
    version: int
    buckets: list[Bucket]
    tensors: list[Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.size for bucket in self.buckets)


class HostWeights(Protocol):
    """A version in this host's memory, until it is closed."""

    @property
    def manifest(self) -> Manifest:
        """What the version holds."""

    @property
    def path(self) -> str:
        """Of its manifest on this host, by which another process maps it with ``local.open_weights``."""

    @property
    def moved_bytes(self) -> int:
        """What came to this host for it."""

    @property
    def refetched(self) -> int:
        """Buckets that came a second time, because their bytes were wrong."""

    def __iter__(self) -> Iterator[tuple[Tensor, memoryview]]:
        """Each tensor with its bytes, not copied."""

    def close(self) -> None:
        """Let go of the memory, which the store may use again: views must not be used any more."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class WeightStore(Protocol):
    """Where versions are published and pulled.  One process publishes; any number pull."""

    def publish(self, version: int, tensors: Iterable[NamedBuffer], *, anew: bool = False) -> str:
        """Store a new version and return its reference for ``pull``; ``StoreError`` when the version exists.

        ``anew`` is for one of which a part was lost: it gets another reference.  What is left of the old one goes
        when the version is collected.
        """

    def pull(self, reference: str, *, stop: Callable[[], bool] = never) -> HostWeights:
        """Bring a version to this host and check it; ``MissingWeights`` or ``DamagedWeights`` when it is not whole.

        ``Superseded`` when ``stop()``, which is asked now and then, says so.
        """

    def collect(self, below: int) -> None:
        """Remove every version below ``below``.  Weights that are pulled stay valid."""

    def close(self) -> None:
        """The process has done with the store: let go of what is held for it."""


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """The size of a tensor; ``StoreError`` for a type that stores don't know."""
    if dtype not in DTYPE_BYTES:
        raise StoreError(f"dtype {dtype!r} can't be stored; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype] * math.prod(shape)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The manifest found at ``where``; ``DamagedWeights`` when it is none, ``StoreError`` for another format."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise DamagedWeights(f"{where} is no manifest: {error}") from None
    if manifest.format != FORMAT:
        raise StoreError(f"{where} has format {manifest.format}, this program reads format {FORMAT}")
    return manifest
