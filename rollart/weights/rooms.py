"""Bucket files in shared memory that are used again.

New memory has to be zeroed by the system and entered into a page table, which takes longer than to fill it.  So what a
store wrote or pulled stays mapped, and when nobody needs it the next version is written over it.  Whoever maps a bucket
to read it holds a shared ``flock`` on it, which ends with the mapping, however its process ends: nothing that is being
read is written over.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["Room", "Rooms", "power_of_two", "read_lock", "whole_pages"]

PAGE_BYTES = 4096


def whole_pages(size: int) -> int:
    """``size`` bytes, rounded up to pages; at least one."""
    return max(PAGE_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)


def power_of_two(size: int) -> int:
    """The next one, at least a page: rooms for changes are used again though no two have the same size."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())


class Room:
    """A file of this process, mapped to be written, for a bucket of up to ``capacity`` bytes."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self.size = 0
        """Bytes of the file; ``OSError`` when memory ends comes from ``grow``, not as a signal from a write."""
        self.holds: int | None = None
        """Checksum of the bucket it holds; ``None`` while that changes."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._descriptor, capacity)
            self.mapped = mmap.mmap(self._descriptor, capacity)
            os.ftruncate(self._descriptor, 0)
        except BaseException:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return memoryview(self.mapped)[: self.size]

    def grow(self, size: int) -> None:
        """Have memory for ``size`` bytes; ``OSError`` when there is none."""
        if size > self.size:
            os.posix_fallocate(self._descriptor, self.size, size - self.size)
            self.size = size

    def cut(self, size: int) -> None:
        """Give back what is beyond ``size`` bytes."""
        if size != self.size:
            os.ftruncate(self._descriptor, size)
            self.size = size

    def move(self, path: Path) -> None:
        """Give it another place."""
        self.path.rename(path)
        self.path = path

    @property
    def read(self) -> bool:
        """Whether somebody maps it to read it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let go of the mapping, and remove the file."""
        with contextlib.suppress(BufferError):  # a view is left: the last one to go unmaps it
            self.mapped.close()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self.path.unlink()


def read_lock(descriptor: int) -> bool:
    """Keep the bucket's bytes as they are while ``descriptor``, or a mapping made of it, is open.

    False when it is being written over: then it is no bucket of a version any more.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Rooms:
    """The rooms of a store: those that nobody uses, and at most ``spare_bytes`` of them."""

    def __init__(
        self,
        folder: Path,
        *,
        on_new: Callable[[Room], None] = lambda room: None,
        on_end: Callable[[Room], None] = lambda room: None,
    ) -> None:
        """``on_new`` and ``on_end`` hear of each room that begins and ends."""
        self.spare_bytes = 0
        """Rises to what was given back at once."""
        self._folder = folder
        self._on_new, self._on_end = on_new, on_end
        self._free: list[Room] = []
        self._lock = threading.Lock()  # a pull that nobody waits for may end while the next has begun
        self._closed = False

    def take(self, path: Path, capacity: int, *, holding: Iterable[int] = ()) -> Room:
        """A room at ``path``: one that holds a bucket of such a checksum, else another spare, else a new one."""
        wanted = set(holding)
        with self._lock:
            fits = [room for room in self._free if room.capacity == capacity]
            fits.sort(key=lambda room: room.holds not in wanted)
            if fits:
                room = fits[0]  # in the order in which they were given: what comes now has the same sizes
                self._free.remove(room)
            else:
                room = Room(path, capacity)
                self._on_new(room)
        if room.path != path:
            room.move(path)
        return room

    def give(self, rooms: Iterable[Room]) -> None:
        """These are not used any more, but by who reads them: those go, and the readers keep what they map."""
        given = list(rooms)
        with self._lock:
            self.spare_bytes = max(self.spare_bytes, sum(room.size for room in given))
            for room in given:
                kept = sum(other.size for other in self._free) + room.size <= self.spare_bytes
                if self._closed or room.read or not kept:
                    self._end(room)
                    continue
                try:
                    self._folder.mkdir(
                        mode=0o700, exist_ok=True
                    )  # no parents: a store that was removed stays so
                    room.move(self._folder / uuid.uuid4().hex)
                except OSError:  # somebody removed the file, or the store
                    self._end(room)
                else:
                    self._free.append(room)

    def end(self, rooms: Iterable[Room]) -> None:
        """Remove these."""
        for room in rooms:
            self._end(room)

    def close(self) -> None:
        """Remove all that are spare, and those that are given back from now on."""
        with self._lock:
            self._closed = True
            self.end(self._free)
            self._free.clear()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _end(self, room: Room) -> None:
        self._on_end(room)
        room.close()
