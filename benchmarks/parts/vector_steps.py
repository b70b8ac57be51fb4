"""Gymnasium's vector API by itself: ``python -m benchmarks.parts.vector_steps sync|async COUNT SECONDS``; one row."""

from __future__ import annotations

import json
import resource
import sys
import time

import gymnasium


def main() -> None:
    """Step FrozenLake by random actions, and say how fast that was."""
    kind, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    vector = gymnasium.make_vec("FrozenLake-v1", num_envs=count, vectorization_mode=kind)
    vector.reset(seed=0)
    for _ in range(20):
        vector.step(vector.action_space.sample())
    steps, started, before = 0, time.monotonic(), time.process_time()
    while time.monotonic() < started + seconds:
        vector.step(vector.action_space.sample())
        steps += count
    took, cpu = time.monotonic() - started, time.process_time() - before
    vector.close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # their start, which is small, included
    cpu += children.ru_utime + children.ru_stime if kind == "async" else 0.0
    row = {"live": count, "steps_per_second": steps / took, "steps_per_core_second": steps / cpu}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
