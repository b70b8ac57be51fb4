"""Python's garbage collector in a process that is a controller.

What a trajectory holds is freed by reference counts; the collector finds next to nothing, but by default it
walks through everything alive again and again, and all trajectories wait meanwhile (docs/performance.md).
"""

from __future__ import annotations

import gc

__all__ = ["spare_collections"]

YOUNG_OBJECTS = 20_000
"""New objects between two looks at the new ones; Python's own value is 700."""


def spare_collections() -> None:
    """Look at what is there now no more, and at what comes more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
