"""The weight store of many machines: buckets in the memory of Mooncake's storage nodes.

Every key is written once and holds the publishing attempt's random id, since a key that is written again, or removed by
force, can be read torn.  A version's manifest is put after its buckets are known to be there, and ``latest``, the only
key that changes, after the manifest.  A pulled version lies in a folder of this host's shared memory, in the form of
the local store, so that engines map it without knowing where it came from.

With ``delta`` a bucket that did not change is not stored again, and of one that changed little the changes are stored
beside it, for who has the version before.

Mooncake's calls release the GIL and wait busily: call from a thread, and a few large calls rather than many.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollart.weights.fetch import Fetch, Pulled, address_of
from rollart.weights.local import BUCKET_BYTES
from rollart.weights.packer import pack
from rollart.weights.rooms import Room, Rooms, power_of_two
from rollart.weights.store import (
    DTYPE_BYTES,
    FORMAT,
    Bucket,
    DamagedWeights,
    Delta,
    Manifest,
    MissingWeights,
    NamedBuffer,
    StoreError,
    Tensor,
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
SMALL_BYTES = 16 << 20
"""Of the client's own buffer, for manifests."""
DELTA_SHARE = 0.5
"""Changes of a bucket are stored when they take at most this share of its bytes."""


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
        delta: bool = False,
    ) -> None:
        """``master`` is its address, ``scratch`` a folder in shared memory, ``run`` what keeps runs apart in one store.

        ``UnreachableStore`` within ``CONNECT_S`` when nobody answers.
        """
        self._master = master
        self._run = run
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self._scratch = scratch
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._published: set[int] = set()
        self._keys: dict[int, list[str]] = {}
        """Of each version, what this process wrote for it, or began to, or uses of an older one."""
        self._base: list[tuple[Bucket, Room]] = []
        """The version that was published last, to compare the next one with."""
        self._held: dict[int, Room] = {}
        """Pulled buckets that are not closed, by checksum."""
        self._client = _connect(master, host, protocol)
        self._rooms = Rooms(scratch / "spare", on_new=self._register, on_end=self._unregister)

    # --- publishing -----------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Iterable[NamedBuffer], *, anew: bool = False) -> str:
        """Put a version into the store; ``StoreError`` when it exists, or when it can't be stored whole."""
        if version in self._published and not anew:
            raise StoreError(f"version {version} is in the store already; versions never change")
        attempt = f"v{version}-{uuid.uuid4().hex[:12]}"
        folder = self._scratch / attempt
        folder.mkdir(mode=0o700)
        rooms: list[Room] = []
        try:
            rooms, buckets, parts = pack(tensors, self._rooms, folder, attempt, self._bucket_bytes)
            base = (
                [] if anew else self._base
            )  # of what is stored anew something was lost, and who knows what else
            stored, changes = self._changes(base, buckets, rooms, parts, folder / f"{attempt}-changes")
            reference = self._put(version, attempt, [*rooms, *changes], stored, parts)
            rooms = self._keep(stored, rooms) + changes
            return reference
        finally:
            self._rooms.give(rooms)
            shutil.rmtree(folder, ignore_errors=True)

    def _changes(
        self,
        base: Sequence[tuple[Bucket, Room]],
        buckets: Sequence[Bucket],
        rooms: Sequence[Room],
        parts: Sequence[Tensor],
        path: Path,
    ) -> tuple[list[Bucket], list[Room]]:
        """The buckets as they are to be stored, compared with ``base``, and a room with the changes at ``path``."""
        if not base:
            return list(buckets), []
        from rollart.weights.delta import encode

        stored, encoded, total = [], [], 0
        reusable = self._there([before.name for before, _ in base])
        for number, (bucket, room) in enumerate(zip(buckets, rooms, strict=True)):
            before, old = base[number] if number < len(base) else (bucket, room)
            if before.size != bucket.size or before.name not in reusable:
                stored.append(bucket)
            elif before.checksum == bucket.checksum:
                stored.append(msgspec.structs.replace(before, delta=None))
            else:
                width = min(DTYPE_BYTES[part.dtype] for part in parts if part.bucket == number)
                data = encode(old.view, room.view, width, int(DELTA_SHARE * bucket.size))
                if data is not None:
                    name = f"{bucket.name}-changes"
                    bucket = msgspec.structs.replace(
                        bucket, delta=Delta(name, len(data), before.checksum, width)
                    )
                    encoded.append(data)
                    total += len(data)
                stored.append(bucket)
        if not total:
            return stored, []
        changes = self._rooms.take(path, power_of_two(total))
        changes.holds = None
        changes.grow(total)
        changes.view[:total] = b"".join(encoded)
        return stored, [changes]

    def _put(
        self,
        version: int,
        attempt: str,
        rooms: Sequence[Room],
        buckets: Sequence[Bucket],
        parts: list[Tensor],
    ) -> str:
        """Store what is new of ``buckets``, then the manifest; its key."""
        keys, addresses, sizes = [], [], []
        for bucket, room in zip(buckets, rooms, strict=False):
            if bucket.size and bucket.name.startswith(attempt):
                keys.append(self._key(bucket.name))
                addresses.append(address_of(room))
                sizes.append(bucket.size)
        at = 0
        for delta in [bucket.delta for bucket in buckets if bucket.delta]:
            keys.append(self._key(delta.name))
            addresses.append(address_of(rooms[-1]) + at)
            sizes.append(delta.size)
            at += delta.size
        reference = self._key(f"{attempt}-manifest")
        used = {*keys, *(self._key(bucket.name) for bucket in buckets if bucket.size), reference}
        try:
            if keys:
                codes = self._client.batch_put_from(keys, addresses, sizes, self._replication())
                self.check(keys, codes, [0] * len(keys))
            manifest = msgspec.json.encode(Manifest(FORMAT, version, list(buckets), parts))
            self.check([reference], [self._client.put(reference, manifest, self._replication())], [0])
            lost = used - {self._key(name) for name in self._there([self._name(key) for key in used])}
            if lost:  # a put can answer 0 and store nothing
                raise MissingWeights(f"the store took {min(lost)} and does not have it")
        finally:  # also of what failed: some of it may be there, and under a lease
            self._keys.setdefault(version, []).extend(used)
        self._published.add(version)
        code = self._client.upsert(self._latest, reference.encode(), self._replication())
        if code:  # the run goes by references; the next version's pointer comes soon
            logger.warning(
                "%s still points to an older version than %d (code %d)", self._latest, version, code
            )
        return reference

    def _keep(self, buckets: Sequence[Bucket], rooms: list[Room]) -> list[Room]:
        """Keep what the next version is compared with; what is not needed any more."""
        if not self._delta:
            return rooms
        idle = [room for _, room in self._base]
        for room in rooms:  # the folder goes
            room.move(self._scratch / room.path.name)
        self._base = list(zip(buckets, rooms, strict=True))
        return idle

    def _there(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that the store has."""
        if not names:
            return set()
        found = self._client.batch_is_exist([self._key(name) for name in names])
        return {name for name, there in zip(names, found, strict=True) if there == 1}

    def _replication(self) -> object:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = True  # or a full store would let go of weights by itself
        return config

    # --- pulling --------------------------------------------------------------------------------------

    def pull(self, reference: str, *, stop: Callable[[], bool] = never) -> Pulled:
        """Bring a version to this host and check it, bad buckets a second time.

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
        folder = self._scratch / f"pulled-v{manifest.version}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(mode=0o700)
        fetch = Fetch(manifest, folder, self._rooms, self._held, self._get, stop)
        try:
            fetch.run()
            (folder / "manifest").write_bytes(contents)
            return Pulled(folder, fetch, self._rooms, self._held)
        except BaseException:
            self._rooms.give(fetch.rooms)
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _get(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Bring stored bytes to ``addresses``."""
        keys = [self._key(name) for name in names]
        self.check(keys, self._client.batch_get_into(keys, list(addresses), list(sizes)), sizes)

    def latest(self) -> str | None:
        """The reference of the version that was published last."""
        found = self._client.get(self._latest)
        return found.decode() if found else None

    # --- removing -------------------------------------------------------------------------------------

    def collect(self, below: int) -> None:
        """Remove the versions below ``below`` that this process published, but for what newer ones use of them.

        One that is being read is not removed now; a later call does it.
        """
        used = {key for version, keys in self._keys.items() if version >= below for key in keys}
        for version in [version for version in self._keys if version < below]:
            left = self._remove([key for key in self._keys.pop(version) if key not in used])
            if left:
                self._keys[version] = left

    def close(self) -> None:
        """Leave the store, and remove what this process put there and its files."""
        keys = list({key for keys in self._keys.values() for key in keys})
        if self._published:
            keys.append(self._latest)
        if keys and self._remove(keys, force=True):  # nobody reads any more what a run leaves behind
            logger.warning("some weights of %s stay in the store at %s", self._run, self._master)
        self._rooms.close()
        self._rooms.end([*(room for _, room in self._base), *self._held.values()])
        self._client.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # --- Mooncake -------------------------------------------------------------------------------------

    @property
    def _latest(self) -> str:
        return f"{self._run}/latest"

    def _remove(self, keys: list[str], *, force: bool = False) -> list[str]:
        """Those of ``keys`` that are still there: somebody reads them."""
        if not keys:
            return []
        codes = self._client.batch_remove(keys, force)
        return [key for key, code in zip(keys, codes, strict=True) if code not in (0, NOT_FOUND)]

    def _key(self, name: str) -> str:
        return f"{self._run}/{name}"

    def _name(self, key: str) -> str:
        return key.removeprefix(f"{self._run}/")

    def check(self, keys: Sequence[str], codes: Sequence[int], expected: Sequence[int]) -> None:
        """``StoreError`` for the first of ``keys`` whose transfer failed, or gave another size than expected."""
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

    def _register(self, room: Room) -> None:
        """Let Mooncake write to and read from a room."""
        if self._client.register_buffer(address_of(room), room.capacity):
            raise StoreError(f"Mooncake can't use {room.capacity} bytes of this process's memory")

    def _unregister(self, room: Room) -> None:
        self._client.unregister_buffer(address_of(room))


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
