"""The paper's serverless rewards (R3), simulated: reward GPUs beside a run, or as many generation GPUs instead."""

from __future__ import annotations

import statistics

import msgspec

from benchmarks.parts.report import Row
from rollart.simulation.cluster import cluster_setup
from rollart.simulation.functions import FunctionPool
from rollart.simulation.paper import paper_cluster, paper_config
from rollart.simulation.run import simulate
from rollart.simulation.workload import FAMILIES

__all__ = ["ASSUMPTIONS", "simulated"]

GPUS = 16
"""Half of them generate and half score, or all generate."""
STEPS, WARM_UP = 6, 2
COLD_STARTS_S = (0.5, 2.0, 8.0)
ASSUMPTIONS = (
    "Qwen3-8B on GEM-math with a 7B reward model, batch 512 = 64 groups of 8, 32 H800 train (the paper's task; its "
    "pools and schedule for this experiment are assumed: sync_plus)",
    f"dedicated: {GPUS // 2} H800 generate and {GPUS // 2} hold the reward model; serverless: {GPUS} generate (the "
    "paper: 'rollout GPUs doubled')",
    "a reward call takes what the family's distribution gives (docs/simulation-models.md); an instance starts in 0.5, "
    "2 or 8 s (assumed) and serves one call at a time",
    "the elastic pool is decided by the function host's own scaling code, with at most 64 instances",
)


def simulated(*, seeds: int) -> list[Row]:
    """A row for each case, means over seeds."""
    cases = [("dedicated", GPUS // 2, FunctionPool(warm=GPUS // 2))]
    cases += [
        (f"serverless, starts in {cold_s:g} s", GPUS, FunctionPool(most=64, cold_start_s=cold_s))
        for cold_s in COLD_STARTS_S
    ]
    return [_case(name, gpus, pool, seeds) for name, gpus, pool in cases]


def _case(name: str, gpus: int, pool: FunctionPool, seeds: int) -> Row:
    rows = [_run(gpus, pool, seed) for seed in range(seeds)]
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    return {"rewards": name, "generation_gpus": gpus, "reward_gpus": pool.warm or 0, **mean}


def _run(gpus: int, pool: FunctionPool, seed: int) -> Row:
    cluster = paper_cluster("Qwen3-8B", "sync_plus", baseline_gpus=gpus)
    config = paper_config(cluster, "sync_plus", steps=STEPS, seed=seed, tasks=["GEM-math"])
    setup = msgspec.structs.replace(cluster_setup(cluster, config, FAMILIES), functions=pool)
    result = simulate(setup, seed=seed, check=False)
    if result.outcome != "success" or result.violations:
        raise RuntimeError(
            f"the simulated run ended with {result.outcome}: {result.cause} {result.violations[:1]}"
        )
    steady = result.rows[WARM_UP:]
    functions = result.functions
    assert functions is not None
    paid_s = functions.paid_s(result.seconds)
    return {
        "step_s": statistics.mean(row["step_seconds"] for row in steady),
        "rollout_s": statistics.mean(row["get_batch_seconds"] for row in steady),
        "busy_share": functions.busy_s / paid_s,
        "paid_s_per_step": paid_s / len(result.rows),
        "cold_starts": functions.cold_starts,
        "calls": functions.calls,
    }
