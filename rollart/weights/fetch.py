"""One pull from a store that is far: what is fetched, what is here already, and what it is checked against."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollart.weights.mapped import MappedWeights, checksum_of, open_weights
from rollart.weights.rooms import Room, Rooms, power_of_two, whole_pages
from rollart.weights.store import Bucket, DamagedWeights, Delta, Manifest, Superseded

__all__ = ["Fetch", "Pulled", "address_of"]

PORTION_BYTES = 64 << 20
Get = Callable[[Sequence[str], Sequence[int], Sequence[int]], None]
"""Brings the named bytes of the store to addresses, of given sizes."""
Piece = TypeVar("Piece")


def address_of(room: Room) -> int:
    """Of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(room.mapped))


class Fetch:
    """Fills a room for each bucket of ``manifest``.

    A bucket that a room holds already is kept; one whose base is here and that has a delta is made from them; the
    others are fetched.  Each is checked while the next ones come.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        rooms: Rooms,
        held: MutableMapping[int, Room],
        get: Get,
        stop: Callable[[], bool],
    ) -> None:
        """``held`` are rooms that are in use, by what they hold; ``get`` raises what the store's pull may."""
        self.manifest = manifest
        self.rooms: list[Room] = []
        """One for each bucket, then those for changes."""
        self.moved_bytes = 0
        """What came from the store."""
        self.refetched = 0
        """Buckets that came a second time, because their bytes were wrong."""
        self._folder, self._all, self._held = folder, rooms, held
        self._get, self._stop = get, stop

    def run(self) -> None:
        """``DamagedWeights`` when a bucket is wrong twice; ``Superseded`` when nobody wants it any more."""
        whole, changed, ready = self._plan()
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as checker:
            checks = [(bucket, room, checker.submit(self._checked, bucket, room)) for bucket, room in ready]
            checks += self._fetch_changes(changed, checker)
            checks += self._fetch_whole(whole, checker)
            wrong = [(bucket, room) for bucket, room, check in checks if not check.result()]
            self.refetched = len(wrong)
            again = self._fetch_whole(wrong, checker)
            for bucket, _, check in again:
                if not check.result():
                    raise DamagedWeights(
                        f"bucket {bucket.name} of version {self.manifest.version} does not have the checksum in the "
                        "manifest, also when fetched again: its bytes were changed"
                    )

    def _plan(
        self,
    ) -> tuple[list[tuple[Bucket, Room]], list[tuple[Bucket, Room, Delta]], list[tuple[Bucket, Room]]]:
        """Buckets to fetch whole, to make from their bases, and that are here."""
        whole, changed, ready = [], [], []
        for bucket in self.manifest.buckets:
            bases = [bucket.checksum] + ([bucket.delta.base] if bucket.delta else [])
            capacity = whole_pages(bucket.size)
            room = self._all.take(self._folder / bucket.name, capacity, holding=bases)
            self.rooms.append(room)
            base = room.holds if room.holds in bases and room.size == bucket.size else None
            room.holds = None
            room.grow(bucket.size)
            room.cut(bucket.size)
            if base is None:
                base = next((known for known in bases if known in self._held), None)
                if base is not None and self._held[base].size == bucket.size:
                    room.view[:] = self._held[base].view
            if base == bucket.checksum:
                ready.append((bucket, room))
            elif base is not None and bucket.delta:
                changed.append((bucket, room, bucket.delta))
            elif bucket.size:
                whole.append((bucket, room))
        return whole, changed, ready

    def _fetch_changes(
        self, changed: list[tuple[Bucket, Room, Delta]], checker: ThreadPoolExecutor
    ) -> list[tuple[Bucket, Room, Future[bool]]]:
        if not changed:
            return []
        total = sum(delta.size for _, _, delta in changed)
        room = self._all.take(self._folder / "changes", power_of_two(total))
        self.rooms.append(room)
        room.holds = None
        room.grow(total)
        starts, at = [], 0
        for _, _, delta in changed:
            starts.append(at)
            at += delta.size
        places = [
            (delta.name, address_of(room) + start, delta.size)
            for start, (_, _, delta) in zip(starts, changed, strict=True)
        ]
        for few in _portions(places, [size for _, _, size in places]):
            self._bring(few)
        return [
            (
                bucket,
                target,
                checker.submit(self._made, bucket, target, delta, room.view[start : start + delta.size]),
            )
            for start, (bucket, target, delta) in zip(starts, changed, strict=True)
        ]

    def _fetch_whole(
        self, wanted: list[tuple[Bucket, Room]], checker: ThreadPoolExecutor
    ) -> list[tuple[Bucket, Room, Future[bool]]]:
        checks = []
        for few in _portions(wanted, [bucket.size for bucket, _ in wanted]):
            self._bring([(bucket.name, address_of(room), bucket.size) for bucket, room in few])
            checks += [(bucket, room, checker.submit(self._checked, bucket, room)) for bucket, room in few]
        return checks

    def _bring(self, places: Sequence[tuple[str, int, int]]) -> None:
        if self._stop():
            raise Superseded(f"version {self.manifest.version} is not wanted any more")
        names, addresses, sizes = zip(*places, strict=True)
        self._get(names, addresses, sizes)
        self.moved_bytes += sum(sizes)

    def _made(self, bucket: Bucket, room: Room, delta: Delta, changes: memoryview) -> bool:
        """Apply changes; whether the bucket is right then."""
        from rollart.weights.delta import apply

        try:
            apply(room.view, delta.width, changes)
        except ValueError:  # they are damaged: the bucket is fetched whole
            return False
        return self._checked(bucket, room)

    def _checked(self, bucket: Bucket, room: Room) -> bool:
        right = checksum_of(room.view) == bucket.checksum
        room.holds = bucket.checksum if right else None
        return right


class Pulled(MappedWeights):
    """Weights whose memory is used again when they are closed."""

    def __init__(self, folder: Path, fetch: Fetch, rooms: Rooms, held: MutableMapping[int, Room]) -> None:
        opened = open_weights(str(folder / "manifest"), verify=False)
        super().__init__(folder / "manifest", opened.manifest, opened.buckets)
        opened.close()
        self._fetch = fetch
        self._rooms, self._all, self._held = fetch.rooms, rooms, held
        held.update({room.holds: room for room in fetch.rooms if room.holds is not None})

    @property
    def moved_bytes(self) -> int:
        """What came from the store."""
        return self._fetch.moved_bytes

    @property
    def refetched(self) -> int:
        """Buckets that came a second time."""
        return self._fetch.refetched

    def close(self) -> None:
        """Let go of the mappings and of the files."""
        super().close()
        folder, rooms = Path(self.path).parent, self._rooms
        self._rooms = []
        for room in rooms:
            if room.holds is not None and self._held.get(room.holds) is room:
                del self._held[room.holds]
        if rooms:
            Path(self.path).unlink(missing_ok=True)  # first: who opens it now must find nothing
            self._all.give(rooms)
            shutil.rmtree(folder, ignore_errors=True)


def _portions(pieces: Sequence[Piece], sizes: Sequence[int]) -> Iterator[Sequence[Piece]]:
    """Neighbours of up to ``PORTION_BYTES`` together: large enough for Mooncake, small enough to stop in between."""
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if total and total + size > PORTION_BYTES:
            yield pieces[first:number]
            first, total = number, 0
        total += size
    if total:
        yield pieces[first:]
