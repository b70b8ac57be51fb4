"""Processes that foreign code starts: found, measured, killed and reaped.

A worker is the reaper of all that its environments leave behind (Linux's ``PR_SET_CHILD_SUBREAPER``): an orphan
becomes the worker's child, and never init's.  And whatever a worker starts inherits a mark in its environment, by
which the launcher finds it when the worker itself was killed.  Where there is no ``/proc`` nothing is found; the kill
of a process group stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "MARK",
    "adopt_orphans",
    "children_of_this_thread",
    "end_all",
    "end_marked",
    "end_trees",
    "tree_usage",
]

MARK = "ROLLART_WORKER"
"""The environment variable that marks a worker's processes."""
PR_SET_CHILD_SUBREAPER = 36
PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
TRACKER = b"from multiprocessing.resource_tracker import main"
TRACKER_LOOKS, TRACKER_LOOK_S = 50, 0.02


def adopt_orphans() -> None:
    """Become the reaper of all that this process's descendants leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of_this_thread() -> frozenset[int]:
    """Processes that this thread started and that have not been reaped."""
    try:
        with open("/proc/thread-self/children", "rb", buffering=0) as file:  # noqa: PTH123 (in every step)
            return frozenset(map(int, file.read().split()))
    except (OSError, ValueError):
        return frozenset()


def end_trees(roots: Iterable[int]) -> None:
    """Kill and reap ``roots``, where they are this process's children still, and all below them."""
    children = _children()
    own = children.get(os.getpid(), frozenset())
    _end(_below([root for root in roots if root in own], children))


def end_all() -> None:
    """Kill and reap every descendant of this process; what is started meanwhile, too."""
    for _ in range(8):
        children = _children()
        doomed = _below(children.get(os.getpid(), frozenset()), children)
        if not doomed:
            return
        _end(doomed)


def end_marked(mark: str) -> None:
    """Kill every process of this user whose environment has ``mark`` (``NAME=value``), but for this one.

    Python's resource trackers come last: a tracker ends by itself when the processes have that it serves, and removes
    what those left in shared memory.
    """
    wanted = mark.encode()

    def marked() -> list[int]:
        return [pid for pid in _pids() if pid != os.getpid() and wanted in _environment(pid)]

    for _ in range(8):
        doomed = [pid for pid in marked() if not _is_tracker(pid)]
        if not doomed:
            break
        _end(doomed)
    for _ in range(TRACKER_LOOKS):
        if not marked():
            return
        time.sleep(TRACKER_LOOK_S)
    _end(marked())


def tree_usage(root: int) -> tuple[int, int]:
    """Process ``root`` and all below it: how many they are, and their resident memory in bytes."""
    processes = _below([root], _children())
    resident = 0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident += int((PROC / str(pid) / "statm").read_bytes().split()[1]) * PAGE
    return len(processes), resident


def _end(doomed: Iterable[int]) -> None:
    doomed = list(doomed)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in doomed:  # parents first: their children are this process's by then
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _below(roots: Iterable[int], children: dict[int, frozenset[int]]) -> list[int]:
    found = list(roots)
    for pid in found:  # it grows meanwhile
        found += children.get(pid, frozenset())
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def _pids() -> list[int]:
    return [int(each.name) for each in PROC.glob("[0-9]*")] if PROC.is_dir() else []


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def _children() -> dict[int, frozenset[int]]:
    """The children of every process, by parent."""
    found: dict[int, set[int]] = {}
    for pid in _pids():
        try:
            after_name = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        found.setdefault(int(after_name[1]), set()).add(pid)
    return {parent: frozenset(pids) for parent, pids in found.items()}
