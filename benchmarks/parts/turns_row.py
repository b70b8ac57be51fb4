"""One row of ``benchmarks.controller``, in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial

import uvloop

from benchmarks.parts import turns_bare, turns_rollart
from benchmarks.parts.turns_launch import SidePayloads
from benchmarks.parts.turns_peer import write_row

SYSTEMS = {
    "rollart": turns_rollart.measure,
    "bare": turns_bare.measure,
    "bare_framed": partial(turns_bare.measure, framed=True),
}


def main() -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("live", type=int)
    parser.add_argument("turns", type=int)
    parser.add_argument("--side-bytes", type=int, default=0)
    parser.add_argument("--side-share", type=float, default=0.0)
    options = parser.parse_args()
    side = SidePayloads(options.side_bytes, options.side_share)
    measure = SYSTEMS[options.system](options.live, turns_wanted=options.turns, side=side)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        write_row(runner.run(measure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
