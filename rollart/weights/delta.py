"""What changed between two buckets of the same layout: the elements that differ, and how far apart they lie.

After a step with a small learning rate most bfloat16 weights are what they were, since the step is smaller than their
last digit.  A changed element costs its own width and 2 bytes.  Here alone the weight plane uses numpy.
"""

from __future__ import annotations

import numpy as np

__all__ = ["apply", "encode"]

GAP_BYTES = 2
LARGEST_GAP = (1 << 16) - 1
Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


def encode(old: memoryview, new: memoryview, width: int, most_bytes: int) -> bytes | None:
    """What turns ``old`` into ``new``, as elements of ``width`` bytes; ``None`` if it takes over ``most_bytes``."""
    before, after = (np.frombuffer(view, f"u{width}") for view in (old, new))
    positions = np.flatnonzero(before != after)
    if len(positions) * (width + GAP_BYTES) > most_bytes:
        return None
    positions = np.concatenate([positions, _between(positions)])
    positions.sort()
    if len(positions) * (width + GAP_BYTES) > most_bytes:
        return None
    gaps = np.diff(positions, prepend=0).astype("<u2")
    return after[positions].tobytes() + gaps.tobytes()


def _between(
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Elements to name though they did not change, where the next change is further than a gap can say."""
    before = np.concatenate([[0], positions[:-1]]) if len(positions) else positions
    wide = np.flatnonzero(positions - before > LARGEST_GAP)
    parts = [np.arange(before[at] + LARGEST_GAP, positions[at], LARGEST_GAP) for at in wide]
    between: Positions = np.concatenate([np.empty(0, np.int64), *parts])
    return between


def apply(target: memoryview, width: int, data: memoryview) -> None:
    """Change ``target`` by what ``encode`` gave; ``ValueError`` when it does not fit."""
    count, rest = divmod(len(data), width + GAP_BYTES)
    if rest:
        raise ValueError(f"{len(data)} bytes are no number of changes of {width + GAP_BYTES} bytes")
    values = np.frombuffer(data, f"u{width}", count)
    positions = np.cumsum(np.frombuffer(data, "<u2", count, count * width), dtype=np.int64)
    elements = np.frombuffer(target, f"u{width}")
    if count and positions[-1] >= len(elements):
        raise ValueError(f"a change at element {positions[-1]} of {len(elements)}")
    elements[positions] = values
