"""The paper's set-up (arXiv 2512.22560): its models, clusters, task mix and schedules, ready to be simulated.

What the paper gives is taken from it, what it leaves open is assumed here, and ``ASSUMPTIONS`` says which is which.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollart.config import Config
from rollart.simulation.cluster import Cluster, Pool
from rollart.simulation.hardware import MODELS
from rollart.simulation.training import Parallelism
from rollart.simulation.workload import FAMILIES
from rollart.simulation.world import Timings

__all__ = [
    "ASSUMPTIONS",
    "CLEAN_STEP_S",
    "CLEAN_STEP_TRAINING",
    "SCHEDULES",
    "clean_step",
    "paper_cluster",
    "paper_config",
]

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync", "update_at": "publish", "staleness_bound": 0},
    "sync_plus": {"update_at": "publish", "staleness_bound": 0},
    "one_off": {"schedule": "one_off", "update_at": "batch", "staleness_bound": 1},
    "areal": {"schedule": "areal", "update_at": "publish", "staleness_bound": 1},
    "rollart": {"update_at": "batch", "staleness_bound": 1},
    # At an equal bound on train_lag: batch with alpha bounds it by alpha + 1.
    "rollart_plus": {"update_at": "publish", "staleness_bound": 2},
}
"""The settings of ``rollout`` that make each schedule."""
DISAGGREGATED = ("rollart", "rollart_plus")
"""They have H20s too; the others have one cluster of H800."""

PUSH_S = {"Qwen3-8B": 32.4, "Qwen3-14B": 67.8, "Qwen3-32B": 127.3}
PULL_S = {"Qwen3-8B": 6.2, "Qwen3-14B": 16.3, "Qwen3-32B": 29.7}
"""The paper's table of weight transfers through Mooncake, across clusters."""
LOAD_S = 1.0
TRAINER_UTILIZATION = 0.16
"""Calibrated: the paper's clean step (8B, SWE-bench, batch 128, 32 H800) trains for 23% of 365.7 s.  Megatron-LM's
published 0.41 is for pretraining; an RL trainer pads, recomputes log-probabilities and loads between steps."""
TENSOR_PARALLEL = {"Qwen3-8B": 1, "Qwen3-14B": 2, "Qwen3-32B": 4}
TRAINER_TENSOR_PARALLEL = {"Qwen3-8B": 4, "Qwen3-14B": 4, "Qwen3-32B": 8}
TRAINER_GPUS = 32
CONTEXT = 32_768

ASSUMPTIONS = (
    "batch 512 = 64 groups of 8, context 32k, alpha 1, tasks drawn uniformly, 32 H800 train (the paper)",
    "SWE-bench only with 32B (the paper)",
    "generation: tensor parallel 1/2/4 for 8B/14B/32B; 96 H800 for the baselines, 64 H800 + 32 H20 for RollArt "
    "(the paper's pools; which engine gets how many of them is assumed)",
    "weights: push and pull as the paper measured them, in every schedule, in the background where the schedule has "
    "something to do meanwhile; loading takes 1 s (assumed)",
    "the trainer's utilisation (0.16) and SWE-bench's latencies are calibrated on the paper's clean step (8B, "
    "SWE-bench, batch 128, 32 H800: 365.7 s), on no ratio",
    "no member or group is redundant, in any schedule",
    "rewards and environments take what the families' distributions give, with as many at once as there are (as "
    "serverless ones would), in every schedule",
    "no affinity and no prefill/decode split: a request goes where its prefix is, else to the least loaded engine",
    "lengths, turns and latencies of the families: docs/simulation-models.md",
)


AFFINITY = {
    "SWE-bench": "H800",
    "WebShop": "H800",
    "FrozenLake": "H800",
    "GEM-math": "H20",
    "GEM-game": "H20",
}
"""The paper: prefill-heavy tasks on compute-optimised GPUs, decode-heavy ones on bandwidth-optimised ones."""


def paper_cluster(
    model: str, schedule: str, *, baseline_gpus: int = 96, h800: int = 64, h20: int = 32
) -> Cluster:
    """The cluster that ``schedule`` has for ``model``."""
    shape, width = MODELS[model], TENSOR_PARALLEL[model]
    if schedule in DISAGGREGATED:
        pools = [Pool("H800", h800, width), *([Pool("H20", h20, width)] if h20 else [])]
    else:
        pools = [Pool("H800", baseline_gpus, width)]
    timings = Timings(publish_s=PUSH_S[model], pull_s=PULL_S[model], load_s=LOAD_S, save_s=0.0)
    tensor = TRAINER_TENSOR_PARALLEL[model]
    return Cluster(
        model=shape,
        generation=pools,
        trainer_class="H800",
        trainer=Parallelism(tensor=tensor, data=TRAINER_GPUS // tensor),
        timings=timings,
        trainer_utilization=TRAINER_UTILIZATION,
    )


def clean_step() -> tuple[Cluster, Config]:
    """The paper's measured iteration: 8B, SWE-bench, batch 128, 32 H800 that generate and then train."""
    cluster = msgspec.structs.replace(paper_cluster("Qwen3-8B", "sync_plus"), generation=[Pool("H800", 32)])
    config = paper_config(cluster, "sync_plus", steps=6, seed=0, tasks=["SWE-bench"], groups_per_batch=16)
    return cluster, config


CLEAN_STEP_S = 365.7
CLEAN_STEP_TRAINING = 0.23
"""The paper: seconds of that iteration without environment failures, and the trainer's share."""


def paper_config(
    cluster: Cluster,
    schedule: str,
    *,
    steps: int,
    seed: int,
    tasks: list[str] | None = None,
    affinity: str | None = None,
    **rollout: Any,
) -> Config:
    """The run of ``schedule`` on ``cluster``; ``rollout`` changes settings of that section.

    ``affinity``: ``paper`` binds each task to the class that the paper gives it, ``auto`` has it proposed; by default
    requests go to all engines alike.
    """
    if tasks is None:
        tasks = [name for name in FAMILIES if name != "SWE-bench" or cluster.model.name == "Qwen3-32B"]
    raw = {
        "name": schedule,
        "seed": seed,
        "steps": steps,
        "model": {"path": cluster.model.name},
        "tasks": [
            {
                "name": name,
                "environment": "simulated:Family",
                "max_turns": 100,
                "reset_timeout_s": 900.0,
                "step_timeout_s": 300.0,
            }
            for name in tasks
        ],
        "sampling": {"max_tokens": 16_384},
        "rollout": {"groups_per_batch": 64, "group_size": 8, **SCHEDULES[schedule], **rollout},
        "inference": {
            "workers": len(cluster.engines),
            "max_model_len": CONTEXT,
            "max_num_seqs": 256,
            "generate_timeout_s": 36_000.0,
            "update_timeout_s": 3600.0,
        },
        "environments": {"workers": 8},
        "start_timeout_s": 3600.0,
        "heartbeat_s": 60.0,
        "heartbeat_timeout_s": 3600.0,
    }
    if affinity is not None and len(cluster.generation) > 1:
        inference: dict[str, Any] = raw["inference"]  # type: ignore[assignment]
        inference["pools"] = [
            {"hardware": pool.hardware_class, "workers": pool.engines} for pool in cluster.generation
        ]
        labels = {task: hardware for task, hardware in AFFINITY.items() if task in tasks}
        inference["hw_affinity"] = "auto" if affinity == "auto" else labels
    return msgspec.convert(raw, Config)
