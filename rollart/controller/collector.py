"""Python's garbage collector, and the allocator under it, in a process that is a controller.

What a trajectory holds is freed by reference counts; the collector finds next to nothing, but by itself it walks
through everything alive again and again, and all trajectories wait meanwhile (docs/performance.md).  So it looks only
as rarely as makes its share of the time ``SHARE``.  And what a batch held goes back to the system: glibc keeps the
pages of freed tokens unless it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Iterator

__all__ = ["collecting_rarely"]

logger = logging.getLogger(__name__)

LEAST_S = 60.0
SHARE = 0.001
TRIM_EVERY_S = 1.0
"""Takes under a millisecond where there is nothing to give back, and 10 for 100 MB."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """While it lasts, on the running loop, collections are few; for a process whose main work is a run."""
    loop = asyncio.get_running_loop()
    before = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now stays: it need not be looked at again
    gc.disable()
    timer: asyncio.TimerHandle
    trim_timer: asyncio.TimerHandle
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: 0)  # glibc's

    def give_back() -> None:
        nonlocal trim_timer
        trim(0)
        trim_timer = loop.call_later(TRIM_EVERY_S, give_back)

    def collect() -> None:
        nonlocal timer
        started = time.perf_counter()
        found = gc.collect()
        took_s = time.perf_counter() - started
        logger.info("collected %d objects in %.0f ms", found, took_s * 1e3)
        timer = loop.call_later(max(LEAST_S, took_s / SHARE), collect)

    timer = loop.call_later(LEAST_S, collect)
    trim_timer = loop.call_later(TRIM_EVERY_S, give_back)
    try:
        yield
    finally:
        timer.cancel()
        trim_timer.cancel()
        gc.unfreeze()
        if before:
            gc.enable()
