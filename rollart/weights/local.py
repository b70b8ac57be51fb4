"""The weight store of one machine: files in a shared-memory folder.

``ROOT/vN-ATTEMPT/`` holds version N: its bucket files and then, linked into place when all of them are written,
``manifest``.  Readers map the buckets; on Linux a mapping stays valid after the file is removed, so
``collect`` never waits for a reader and never breaks one.  Files are readable by their owner only.
Written bytes are not synced: shared memory doesn't outlive the machine, and neither does a run's store.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import xxhash

from rollart.weights.store import (
    ALIGNMENT,
    FORMAT,
    Bucket,
    DamagedWeights,
    Manifest,
    MissingWeights,
    NamedBuffer,
    StoreError,
    Superseded,
    Tensor,
    decode_manifest,
    never,
    tensor_bytes,
)

__all__ = ["BUCKET_BYTES", "LocalStore", "LocalWeights", "checksum_of", "open_weights"]

MANIFEST = "manifest"
BUCKET_BYTES = 64 << 20


class LocalWeights:
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


class LocalStore:
    """Versions below ``root``, a folder in shared memory.  A ``WeightStore``."""

    def __init__(self, root: Path, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """``bucket_bytes`` is where a bucket ends and the next begins; a larger tensor has one of its own."""
        self.root = root
        self._bucket_bytes = bucket_bytes
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

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
        folder = self.root / f"v{version}-{uuid.uuid4().hex[:12]}"
        path = folder / MANIFEST
        folder.mkdir(mode=0o700)
        try:
            with _Writer(folder, self._bucket_bytes) as writer:
                for tensor in tensors:
                    writer.add(*tensor)
            manifest = Manifest(FORMAT, version, writer.buckets, writer.tensors)
            _write_last(path, msgspec.json.encode(manifest))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return str(path)

    def pull(self, reference: str, *, stop: Callable[[], bool] = never) -> LocalWeights:
        """Map the version whose manifest is at ``reference``, and check it; errors as of ``open_weights``."""
        return open_weights(reference, verify=True, stop=stop)

    def close(self) -> None:
        """Nothing is held."""

    def collect(self, below: int) -> None:
        """Remove every version below ``below``.

        The manifest goes first, so that a reader finds either a whole version or none; one that has mapped
        the version keeps it.
        """
        for folder in self.root.glob("v*-*"):
            number = folder.name[1:].partition("-")[0]
            if number.isdigit() and int(number) < below:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)


def open_weights(path: str, *, verify: bool, stop: Callable[[], bool] = never) -> LocalWeights:
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
    return LocalWeights(place, contents, buckets)


def checksum_of(data: mmap.mmap | memoryview | bytes) -> int:
    """XXH3-64, which is as fast as memory here."""
    return xxhash.xxh3_64_intdigest(data)


class _Writer:
    """Packs tensors into bucket files."""

    def __init__(self, folder: Path, bucket_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self.tensors: list[Tensor] = []
        self._folder = folder
        self._limit = bucket_bytes
        self._attempt = uuid.uuid4().hex[:12]
        self._file: BinaryIO | None = None
        self._size = 0
        self._hash = xxhash.xxh3_64()

    def add(self, name: str, dtype: str, shape: Sequence[int], buffer: object) -> None:
        """Write one tensor."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # anything with the buffer protocol
        if view.nbytes != tensor_bytes(dtype, shape):
            raise StoreError(
                f"tensor {name!r} has {view.nbytes} bytes, {dtype} of shape {tuple(shape)} needs "
                f"{tensor_bytes(dtype, shape)}"
            )
        offset = -(-self._size // ALIGNMENT) * ALIGNMENT
        if self._file is not None and offset + view.nbytes > self._limit:
            self._finish()
            offset = 0
        self._write(bytes(offset - self._size))
        self._write(view)
        self.tensors.append(Tensor(name, dtype, tuple(shape), len(self.buckets), offset, view.nbytes))

    def _write(self, data: memoryview | bytes) -> None:
        if self._file is None:
            path = self._folder / self._name
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0)
        view = memoryview(data)
        self._hash.update(view)
        self._size += view.nbytes
        while view:
            view = view[self._file.write(view) :]

    @property
    def _name(self) -> str:
        return f"{self._attempt}-{len(self.buckets):05d}"

    def _finish(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self.buckets.append(Bucket(self._name, self._size, self._hash.intdigest()))
        self._file, self._size, self._hash = None, 0, xxhash.xxh3_64()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()


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


def _map(folder: Path, bucket: Bucket, version: int, verify: bool) -> mmap.mmap | None:
    """The bucket's bytes, ``None`` when it has none."""
    where = f"bucket {bucket.name} of version {version} in {folder}"
    try:
        with (folder / bucket.name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != bucket.size:
                raise DamagedWeights(f"{where} has {size} bytes, the manifest says {bucket.size}")
            if not size:
                return None
            # A private mapping: torch wants writable memory, and nothing written through it reaches the store.
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise MissingWeights(f"{where} can't be read: {error.strerror}") from None
    if verify and checksum_of(mapped) != bucket.checksum:
        raise DamagedWeights(f"{where} does not have the checksum in the manifest: its bytes were changed")
    return mapped
