"""A scenario: a small run drawn from a seed, with the faults that befall it, and whether it has to succeed."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from rollart.config import Config, Schedule
from rollart.config.rewards import Reward
from rollart.launch.local import Placement
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.faults import Fault, FaultKind
from rollart.simulation.hardware import CPU, dense_model
from rollart.simulation.run import Setup
from rollart.simulation.workload import Distribution, Family
from rollart.simulation.world import Timings

__all__ = ["Scenario", "draw_scenario"]

MAX_SKIPS = 2
"""A third skipped train_step in a row ends a run."""
SMALL = dense_model(
    "small",
    layers=2,
    hidden=64,
    ffn=128,
    attention_heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=128,
    max_context=512,
)
HARMLESS = {FaultKind.DOUBLE}
"""Wherever they happen, the run succeeds."""


class Scenario(msgspec.Struct, frozen=True):
    """What is simulated, and what goes wrong."""

    setup: Setup
    faults: list[Fault]

    def must_succeed(self) -> bool:
        """Every role has a worker that nothing takes out, and nothing befalls the trainer that ends a run."""
        config = self.setup.config
        counts = {"inference": config.inference.workers, "environment": config.environments.workers}
        hurt: dict[str, None] = {}
        skips = sum(fault.value for fault in self.faults if fault.kind is FaultKind.NAN)
        for fault in self.faults:
            if not self._bearable(fault):
                if self._starts_at(fault.at_s):
                    return False
                hurt[fault.worker] = None
        spared = all(
            any(f"{role}-{number}" not in hurt for number in range(count)) for role, count in counts.items()
        )
        return spared and "trainer-0" not in hurt and skips <= MAX_SKIPS

    def _starts_at(self, at_s: float) -> bool:
        """Whether all workers may not serve yet, or again: the loss of one before that ends the run."""
        timings = self.setup.timings
        start_s = 4 * (timings.start_s + timings.publish_s + timings.pull_s + timings.load_s) + 5
        # A resumed run makes train_steps again, and a kill at a write may come long after its time.
        kills = [fault.at_s for fault in self.faults if fault.kind is FaultKind.KILL_CONTROLLER]
        return at_s < start_s or any(killed <= at_s < killed + start_s + 200 for killed in kills)

    def _bearable(self, fault: Fault) -> bool:
        config = self.setup.config
        match fault.kind:
            case FaultKind.HANG if fault.value < config.heartbeat_timeout_s / 2:
                return True
            case FaultKind.KILL_CONTROLLER:  # a step that is trained again must not be skipped then
                return not any(other.kind is FaultKind.NAN for other in self.faults)
            case FaultKind.CRASH | FaultKind.HANG | FaultKind.PARTITION if self._starts_at(fault.at_s):
                return False
            case FaultKind.CRASH | FaultKind.HANG | FaultKind.PARTITION:
                # It is started again, unless its machine never comes back; evaluations may lose all their episodes.
                back = fault.kind is not FaultKind.CRASH or fault.value > 0
                if fault.worker.startswith(
                    "trainer"
                ):  # a step that is trained again must not be skipped then
                    return back and not any(other.kind is FaultKind.NAN for other in self.faults)
                return back and not config.evaluation.episodes
            case FaultKind.SLOW:
                return fault.value <= 4
            case FaultKind.FAIL:
                return False
            case FaultKind.LOST_BUCKET:
                return True  # the version is stored anew
            case FaultKind.NAN:
                return True
            case _:
                return fault.kind in HARMLESS


def draw_scenario(seed: int) -> Scenario:
    """The scenario of ``seed``."""
    rng = random.Random(f"scenario {seed}")
    config = _with_rewards(_config(rng), random.Random(f"rewards {seed}"))
    config = _routed(config, random.Random(f"routing {seed}"))
    config = _streamed(config, random.Random(f"streaming {seed}"))
    families = {task.name: _family(rng) for task in config.tasks}
    train_s, latency_s = rng.uniform(0.1, 8.0), rng.choice([0.0, 0.0005, 0.02])
    jitter = random.Random(f"network {seed}")
    token_s = rng.choice([0.0, 0.005, 0.05])

    kv_tokens = config.inference.max_model_len * rng.choice([1, 3, 100])

    def engine(placement: Placement) -> BatchingEngine:
        costs = EngineCosts(CPU, SMALL, step_overhead_s=token_s)
        small = BatchingEngine(costs, token_budget=256, max_requests=config.inference.max_num_seqs)
        small.capacity = kv_tokens
        return small

    def delay(worker: str, size: int) -> float:
        return latency_s * (1 + jitter.random())

    timings = Timings(
        start_s=rng.uniform(1.0, 30.0),
        pull_s=rng.choice([0.0, 0.3, 4.0]),
        load_s=rng.choice([0.0, 0.05, 1.0]),
        publish_s=rng.choice([0.0, 0.3, 6.0]),
        save_s=rng.choice([0.0, 1.0]),
    )
    setup = Setup(
        config=config,
        families=families,
        timings=timings,
        engine=engine,
        step_s=lambda lengths, scored: train_s,
        delay=delay,
    )
    faults = _faults(rng, config) + _kills(random.Random(f"kills {seed}"))
    return Scenario(setup, sorted(faults, key=lambda fault: fault.at_s))


def _config(rng: random.Random) -> Config:
    schedule = rng.choice(["rollart"] * 5 + ["sync", "one_off", "areal"])
    update_at = {"sync": "publish", "one_off": "batch", "areal": "publish"}.get(
        schedule, rng.choice(["batch", "publish"])
    )
    alpha = rng.randint(1 if update_at == "batch" else 0, 3)
    size = rng.randint(2, 4)
    raw: dict[str, Any] = {
        "name": "fuzz",
        "seed": rng.randrange(1000),
        "steps": rng.randint(2, 6),
        "model": {"random": {}},
        "tasks": [
            {
                "name": name,
                "environment": "simulated:Family",
                "max_turns": rng.randint(1, 6),
                "reset_timeout_s": rng.choice([5.0, 60.0]),
                "step_timeout_s": rng.choice([5.0, 60.0]),
            }
            for name in ("A", "B")[: rng.randint(1, 2)]
        ],
        "sampling": {"max_tokens": rng.choice([1, 4, 24])},
        "rollout": {
            "staleness_bound": {"sync": 0, "one_off": 1}.get(schedule, alpha),
            "update_at": update_at,
            "schedule": schedule,
            "groups_per_batch": rng.randint(1, 4),
            "group_size": size,
            "min_group": rng.choice([None, 2, size]),
            "redundant_groups": rng.randint(0, 2),
            "redundant_members": rng.randint(0, 2),
            "member_refills": rng.choice([0, 4]),
            "retries": rng.randint(1, 3),
            "mixed_versions": rng.choice(["correct", "mask", "drop"]),
            "filter_groups": rng.random() < 0.2,
        },
        "trainer": _trainer(rng.choice([0, 0, 2])),
        "inference": {
            "workers": rng.randint(1, 3),
            "max_model_len": rng.choice([128, 256]),
            "max_num_seqs": rng.choice([2, 8, 64]),
            "generate_timeout_s": rng.choice([30.0, 600.0]),
            "update_timeout_s": 60.0,
        },
        "environments": {
            "workers": rng.randint(1, 3),
            "max_sessions": 4096 if schedule == "sync" else rng.choice([3, 4096]),
        },
        "evaluation": {"episodes": rng.choice([0, 0, 5])},
        "start_timeout_s": 120.0,
        "heartbeat_s": 1.0,
        "heartbeat_timeout_s": 10.0,
    }
    if raw["evaluation"]["episodes"] and rng.random() < 0.5:
        raw["evaluation"]["every"] = 2
    if raw["seed"] % 3 == 0:  # by the seed itself, so that all other draws stay what they are
        raw["environments"]["warm_groups"] = 1 + raw["seed"] % 4
    if raw["seed"] % 5 == 0:
        raw["tasks"][0]["episode_timeout_s"] = 20.0
    return msgspec.convert(raw, Config)


def _trainer(checkpoint_every: int) -> dict[str, Any]:
    """Only one checkpoint stays: the harshest."""
    keep = {"keep_checkpoints": 1} if checkpoint_every else {}
    return {"checkpoint_every": checkpoint_every, "step_timeout_s": 300.0, **keep}


def _with_rewards(config: Config, rng: random.Random) -> Config:
    """In a third of the scenarios the first task is scored by the reward client, by trajectory or by group."""
    if rng.random() < 2 / 3:
        return config
    group = config.rollout.schedule is not Schedule.SYNC and rng.random() < 0.6
    raw = {
        "url": "http://simulated/score",
        "scope": "group" if group else "trajectory",
        "concurrency": rng.choice([1, 4, None]),
        "batch": None if group else rng.choice([None, 3]),
        "hedge_after_s": rng.choice([None, 0.3]),
        "retries": 8,
    }
    reward = msgspec.convert(raw, Reward)
    first, *others = config.tasks
    return msgspec.structs.replace(config, tasks=[msgspec.structs.replace(first, reward=reward), *others])


def _streamed(config: Config, rng: random.Random) -> Config:
    """In a third of the scenarios the trainer computes on groups as they arrive."""
    if rng.random() < 2 / 3 or config.trainer.minibatches > 1:
        return config
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, stream_batch=True))


def _routed(config: Config, rng: random.Random) -> Config:
    """With hardware classes, prefill and decode apart, and few requests a worker, where the seed says so."""
    raw: dict[str, Any] = {"progress_every_s": rng.choice([0.2, 2.0])}
    if rng.random() < 0.3:
        raw["max_requests"] = rng.choice([1, 3])
    if rng.random() < 0.2:
        raw["max_tokens_in_flight"] = rng.choice([50, 300])
    workers = config.inference.workers
    if workers > 1 and rng.random() < 0.6:
        phases = rng.choice(
            [("both", "both"), ("prefill", "decode"), ("both", "decode"), ("prefill", "both")]
        )
        raw["pools"] = [
            {"hardware": "H800", "workers": 1, "phase": phases[0]},
            {"hardware": "H20", "workers": workers - 1, "phase": phases[1]},
        ]
        if "prefill" not in phases and "decode" not in phases:
            raw["hw_affinity"] = rng.choice(
                [{"A": "H800", "default": "H20"}, {"A": {"prefill": "H800", "decode": "H20"}}, "auto"]
            )
            if raw["hw_affinity"] == "auto" and len(config.tasks) < 2:
                raw["hw_affinity"] = {"default": ["H20", "H800"]}
        elif rng.random() < 0.5:
            limit, adapt = rng.choice([0, 20]), rng.random() < 0.5
            movable = sorted(phases) == ["decode", "prefill"] and workers >= 3  # each phase keeps one
            raw["disaggregation"] = {"min_prompt_tokens": limit, "adapt": adapt and movable}
    inference = msgspec.convert({**msgspec.to_builtins(config.inference), **raw}, type(config.inference))
    return msgspec.structs.replace(config, inference=inference)


def _family(rng: random.Random) -> Family:
    tail = rng.choice([0.0, 0.5, 1.5])
    return Family(
        turns=Distribution(rng.uniform(1, 5), 0.6, low=1, high=8),
        prompt_tokens=Distribution(rng.uniform(2, 20), 0.4, high=60),
        observation_tokens=Distribution(rng.uniform(1, 8), 0.4, high=30),
        answer_tokens=Distribution(rng.uniform(1, 12), 0.8, high=60),
        reset_s=Distribution(rng.choice([0.0, 0.1, 1.0]), tail, high=100.0),
        step_s=Distribution(rng.choice([0.0, 0.05, 0.5]), tail, high=100.0),
        reward_s=Distribution(rng.choice([0.0, 0.0, 0.5]), tail, high=30.0),
        reset_failure=rng.choice([0.0, 0.0, 0.05]),
        step_failure=rng.choice([0.0, 0.0, 0.02]),
        success=rng.choice([0.2, 0.5, 0.9]),
    )


def _faults(rng: random.Random, config: Config) -> list[Fault]:
    horizon_s = rng.choice([40.0, 80.0])
    faults = [_fault(rng, config, horizon_s) for _ in range(rng.choice([0, 1, 1, 2, 3, 5]))]
    return sorted(faults, key=lambda fault: fault.at_s)


def _kills(rng: random.Random) -> list[Fault]:
    """In a third of the scenarios the controller dies, once or twice."""
    return [
        Fault(
            rng.uniform(0.0, 80.0),
            FaultKind.KILL_CONTROLLER,
            "controller",
            rng.choice([0, 0, 1, 2, 5, 17, 40]),
        )
        for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))
    ]


OF_ROLE: dict[str, list[FaultKind]] = {
    "inference": [kind for kind in FaultKind if kind not in (FaultKind.NAN, FaultKind.KILL_CONTROLLER)],
    "environment": [
        kind
        for kind in FaultKind
        if kind
        not in (FaultKind.NAN, FaultKind.OLD_WEIGHTS, FaultKind.LOST_BUCKET, FaultKind.KILL_CONTROLLER)
    ],
    "trainer": [
        FaultKind.NAN,
        FaultKind.NAN,
        FaultKind.SLOW,
        FaultKind.HANG,
        FaultKind.CRASH,
        FaultKind.DOUBLE,
        FaultKind.DROP_ANSWER,
        FaultKind.GARBLE,
    ],
}


def _fault(rng: random.Random, config: Config, horizon_s: float) -> Fault:
    role = rng.choice(["inference", "inference", "environment", "environment", "trainer"])
    count = {"inference": config.inference.workers, "environment": config.environments.workers}.get(role, 1)
    kind = rng.choice(OF_ROLE[role])
    value = 1.0
    match kind:
        case FaultKind.CRASH:
            value = rng.choice([0.0, 0.5, 20.0])
        case FaultKind.HANG:
            value = rng.choice([1.0, 4.0, 30.0])
        case FaultKind.PARTITION:
            value = rng.choice([0.5, 5.0, 40.0])
        case FaultKind.SLOW:
            value = rng.choice([2.0, 4.0, 50.0])
        case FaultKind.FAIL:
            value = float(rng.randint(1, 6))
        case FaultKind.LOST_BUCKET:
            value = float(rng.randint(1, 4))
    return Fault(rng.uniform(0.0, horizon_s), kind, f"{role}-{rng.randrange(count)}", value)
