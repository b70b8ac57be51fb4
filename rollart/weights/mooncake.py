"""The weight store of many machines: buckets in the memory of Mooncake's storage nodes.

Every key is written once and holds the publishing attempt's random id, since a key that is written again, or removed by
force, can be read torn.  A version's manifest is put after its buckets are known to be there, and ``latest``, the only
key that changes, after the manifest.  A pulled version lies in a folder of this host's shared memory, in the form of
the local store, so that engines map it without knowing where it came from.

Mooncake's calls release the GIL and wait busily: call from a thread, and a few large calls rather than many.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.weights.local import BUCKET_BYTES, LocalStore, LocalWeights, open_weights
from rollart.weights.store import (
    Bucket,
    DamagedWeights,
    Manifest,
    MissingWeights,
    NamedBuffer,
    StoreError,
    Superseded,
    TransferFailed,
    decode_manifest,
    never,
)

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

__all__ = ["MooncakeStore", "UnreachableStore"]

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
NOT_FOUND, NO_SPACE = -704, -200
MEANINGS = {
    NO_SPACE: "the storage nodes have no room",
    NOT_FOUND: "it is not there",
    -707: "the transfer took longer than the master's lease",
    -800: "a storage node can't be reached",
}
"""Of Mooncake's error codes, for people."""
PORTION_BYTES = 64 << 20
SMALL_BYTES = 16 << 20
"""Of the client's own buffer, for manifests."""


class UnreachableStore(TransferFailed):
    """Nobody answers at the store's address."""


class MooncakeStore:
    """A ``WeightStore`` over ``mooncake.store``; one object for each process, which publishes or pulls."""

    def __init__(
        self,
        master: str,
        scratch: Path,
        *,
        run: str,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        replicas: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """``master`` is its address, ``scratch`` a folder in shared memory, ``run`` what keeps runs apart in one store.

        ``UnreachableStore`` within ``CONNECT_S`` when nobody answers.
        """
        self.refetched = 0
        """Versions that were pulled again because bytes were wrong."""
        self._master = master
        self._run = run
        self._replicas = replicas
        self._staging = LocalStore(scratch / "staged", bucket_bytes=bucket_bytes)
        self._pulled = scratch / "pulled"
        self._pulled.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._published: set[int] = set()
        self._keys: dict[int, list[str]] = {}
        """Of each version, what this process wrote, or began to, and has not removed."""
        self._spare = _Spare(scratch / "spare")
        self._client = _connect(master, host, protocol)

    # --- publishing -----------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Iterable[NamedBuffer], *, anew: bool = False) -> str:
        """Put a version into the store; ``StoreError`` when it exists, or when it can't be stored whole."""
        if version in self._published and not anew:
            raise StoreError(f"version {version} is in the store already; versions never change")
        self._staging.collect(version + 1)  # what a failed attempt left
        path = self._staging.publish(version, tensors)
        try:
            with open_weights(path, verify=False) as weights:
                return self._put(version, weights, Path(path).read_bytes())
        finally:
            self._staging.collect(version + 1)

    def _put(self, version: int, weights: LocalWeights, manifest: bytes) -> str:
        keys = [self._key(version, bucket.name) for bucket in weights.manifest.buckets if bucket.size]
        reference = self._key(version, f"{uuid.uuid4().hex[:12]}-manifest")
        written = [*keys, reference]
        try:
            with self._registered(weights.buckets) as places:
                self._check(keys, self._client.batch_put_from(keys, *places, self._replication()))
            self._check([reference], [self._client.put(reference, manifest, self._replication())])
            there = self._client.batch_is_exist(written)
            if any(found != 1 for found in there):  # a put can answer 0 and store nothing
                lost = [key for key, found in zip(written, there, strict=True) if found != 1]
                raise MissingWeights(f"the store took {lost[0]} and does not have it")
        finally:  # also of what failed: some of it may be there, and under a lease
            self._keys.setdefault(version, []).extend(written)
        self._published.add(version)
        code = self._client.upsert(self._latest, reference.encode(), self._replication())
        if code:  # the run goes by references; the next version's pointer comes soon
            logger.warning(
                "%s still points to an older version than %d (code %d)", self._latest, version, code
            )
        return reference

    def _replication(self) -> object:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = True  # or a full store would let go of weights by itself
        return config

    # --- pulling --------------------------------------------------------------------------------------

    def pull(self, reference: str, *, stop: Callable[[], bool] = never) -> LocalWeights:
        """Bring a version to this host and check it, a second time when bytes are wrong.

        ``MissingWeights`` when it, or a part of it, is not in the store; ``DamagedWeights`` when its bytes are
        wrong twice.  When the weights are closed their memory is used again, for the version after the next.
        """
        contents = self._client.get(reference)
        if not contents:
            where = f"{reference} in the store at {self._master}"
            if self._client.is_exist(reference) != 0:  # ``get`` doesn't say why it has nothing
                raise TransferFailed(f"can't get {where}")
            raise MissingWeights(f"no weights at {where}")
        manifest = decode_manifest(contents, reference)
        try:
            return self._fetch(manifest, contents, stop)
        except DamagedWeights as error:
            self.refetched += 1
            logger.warning("%s; pulling version %d again", error, manifest.version)
            return self._fetch(manifest, contents, stop)

    def latest(self) -> str | None:
        """The reference of the version that was published last."""
        found = self._client.get(self._latest)
        return found.decode() if found else None

    def _fetch(self, manifest: Manifest, contents: bytes, stop: Callable[[], bool]) -> LocalWeights:
        folder = self._pulled / f"v{manifest.version}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(mode=0o700)
        try:
            rooms = [self._spare.take(folder / bucket.name, bucket.size) for bucket in manifest.buckets]
            buckets = [bucket for bucket in manifest.buckets if bucket.size]
            keys = [self._key(manifest.version, bucket.name) for bucket in buckets]
            with self._registered(rooms) as (addresses, sizes):
                for few in _portions(sizes):
                    if stop():
                        raise Superseded(f"version {manifest.version} is not wanted any more")
                    codes = self._client.batch_get_into(keys[few], addresses[few], sizes[few])
                    self._check(keys[few], codes, buckets[few])
            path = folder / "manifest"
            path.write_bytes(contents)
            return _Pulled(open_weights(str(path), verify=True, stop=stop), self._spare)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    # --- removing -------------------------------------------------------------------------------------

    def collect(self, below: int) -> None:
        """Remove the versions below ``below`` that this process published.

        One that is being read is not removed now; a later call does it.
        """
        for version in [version for version in self._keys if version < below]:
            left = self._remove(self._keys.pop(version))
            if left:
                self._keys[version] = left

    def close(self) -> None:
        """Leave the store, and remove what this process put there and its files."""
        keys = [key for keys in self._keys.values() for key in keys]
        if self._published:
            keys.append(self._latest)
        if keys and self._remove(keys, force=True):  # nobody reads any more what a run leaves behind
            logger.warning("some weights of %s stay in the store at %s", self._run, self._master)
        self._client.close()
        shutil.rmtree(self._staging.root, ignore_errors=True)
        shutil.rmtree(self._pulled, ignore_errors=True)
        self._spare.close()

    # --- Mooncake -------------------------------------------------------------------------------------

    @property
    def _latest(self) -> str:
        return f"{self._run}/latest"

    def _remove(self, keys: list[str], *, force: bool = False) -> list[str]:
        """Those of ``keys`` that are still there: somebody reads them."""
        codes = self._client.batch_remove(keys, force)
        return [key for key, code in zip(keys, codes, strict=True) if code not in (0, NOT_FOUND)]

    def _key(self, version: int, name: str) -> str:
        return f"{self._run}/v{version}/{name}"

    def _check(
        self, keys: Sequence[str], codes: Sequence[int], buckets: Sequence[Bucket] | None = None
    ) -> None:
        """``StoreError`` for the first key whose transfer failed, or that has another size than its bucket."""
        expected = [0] * len(keys) if buckets is None else [bucket.size for bucket in buckets]
        for key, code, wanted in zip(keys, codes, expected, strict=True):
            if code == wanted:
                continue
            where = f"{key} in the store at {self._master}"
            if code == NOT_FOUND:
                raise MissingWeights(f"{where} is not there")
            if code >= 0:
                raise DamagedWeights(f"{where} has {code} bytes, the manifest says {wanted}")
            hint = (
                "; larger or more nodes (weights.node_gib, weights.nodes) give it" if code == NO_SPACE else ""
            )
            raise TransferFailed(f"{where}: {MEANINGS.get(code, 'the transfer failed')} (code {code}){hint}")

    @contextlib.contextmanager
    def _registered(self, buckets: Sequence[mmap.mmap | None]) -> Iterator[tuple[list[int], list[int]]]:
        """Addresses and sizes of ``buckets``, which Mooncake may write to or read from meanwhile."""
        held = [ctypes.c_char.from_buffer(bucket) for bucket in buckets if bucket is not None]
        places = [(ctypes.addressof(at), len(b)) for at, b in zip(held, filter(None, buckets), strict=True)]
        done = 0
        try:
            for address, size in places:
                if self._client.register_buffer(address, size):
                    raise StoreError(f"Mooncake can't use {size} bytes of this process's memory")
                done += 1
            yield [address for address, _ in places], [size for _, size in places]
        finally:
            for address, _ in places[:done]:
                self._client.unregister_buffer(address)
            held.clear()


def _portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Neighbours of up to ``PORTION_BYTES`` together: large enough for Mooncake, small enough to stop in between."""
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if total and total + size > PORTION_BYTES:
            yield slice(first, number)
            first, total = number, 0
        total += size
    if total:
        yield slice(first, len(sizes))


class _Spare:
    """Bucket files that nobody uses now: new memory has to be zeroed by the system, which costs as much as a pull."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[Path]] = {}
        """By size."""
        self._lock = threading.Lock()  # a pull that nobody waits for may end while the next has begun
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def take(self, path: Path, size: int) -> mmap.mmap | None:
        """A file of ``size`` bytes at ``path``, mapped to be written; ``None`` for none."""
        with self._lock:
            free = self._free.get(size)
            if free:
                free.pop().rename(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not size:
                return None
            os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm is an error here, and SIGBUS later
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def give(self, folder: Path, buckets: Sequence[Bucket]) -> None:
        """The buckets' files in ``folder`` may be used again, and the folder is not needed."""
        with self._lock, contextlib.suppress(OSError):  # where the store is closed
            for bucket in buckets:
                place = self._folder / uuid.uuid4().hex  # the same version may have been pulled twice
                (folder / bucket.name).rename(place)
                self._free.setdefault(bucket.size, []).append(place)
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all."""
        self._free.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Pulled(LocalWeights):
    """Weights whose files are used again when they are closed."""

    def __init__(self, weights: LocalWeights, spare: _Spare) -> None:
        super().__init__(Path(weights.path), weights.manifest, weights.buckets)
        self._spare: _Spare | None = spare

    def close(self) -> None:
        """Let go of the mappings and of the files."""
        super().close()
        if self._spare is not None:
            self._spare.give(Path(self.path).parent, self.manifest.buckets)
            self._spare = None


def _connect(master: str, host: str, protocol: str) -> MooncakeDistributedStore:
    """A client without a segment of its own; ``UnreachableStore`` when the master doesn't answer."""
    address, _, port = master.rpartition(":")
    try:
        socket.create_connection((address, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UnreachableStore(f"no Mooncake master answers at {master!r}: {error}") from None
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(host, "P2PHANDSHAKE", 0, SMALL_BYTES, protocol, "", master)
    if code:
        raise UnreachableStore(f"the Mooncake master at {master!r} refused this client (code {code})")
    return client
