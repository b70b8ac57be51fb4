"""Planner: what a run would do on a site, by the shipping controller in virtual time, and what one more of each part
would bring.

An evaluation, a checkpoint and the first steps, in which the pipeline fills, are no part of a step's time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from rollart.controller.resource_manager import role_and_number
from rollart.errors import RunError
from rollart.protocol import Role
from rollart.simulation.bound import Limits, limits_of
from rollart.simulation.calibrating import simulated_config, steady
from rollart.simulation.inference import SimInference
from rollart.simulation.run import Result, simulate
from rollart.simulation.site import Site

__all__ = ["STEPS", "Change", "Plan", "Prediction", "plan", "predict"]

STEPS = 12
"""That are simulated."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run's steps, once it is under way."""

    step_s: float
    step_error_s: float
    """Standard error of that mean, over the steps that were simulated."""
    get_batch_s: float
    update_wait_s: float
    train_step_s: float
    trajectories_per_s: float
    """Trained."""
    tokens_per_s: float
    """Sampled."""
    idle: dict[str, float]
    """Share of its time that each pool waits."""
    limits_s: dict[str, float]
    """What a step takes at least, by each pool's work alone."""
    bound_s: float
    """What a step takes at least, by all of them together."""
    bottleneck: str
    """The pool with the largest limit."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One more of something."""

    more: str
    step_s: float
    speedup: float
    """The step's time without it over that with it."""
    bottleneck: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    run: str
    steps: int
    """That were simulated."""
    prediction: Prediction
    changes: list[Change]
    notes: list[str]


def plan(
    site: Site, *, steps: int = STEPS, seed: int = 0, tell: Callable[[str], None] = lambda _: None
) -> Plan:
    """Predict ``site`` and its changes; ``tell`` hears what is simulated next.  ``RunError``: the run would fail."""
    tell(site.config.name)
    now = predict(site, steps=steps, seed=seed)
    changes = []
    for name, changed in site.more():
        tell(f"one more {name}")
        then = predict(changed, steps=steps, seed=seed)
        changes.append(
            Change(
                more=name, step_s=then.step_s, speedup=now.step_s / then.step_s, bottleneck=then.bottleneck
            )
        )
    return Plan(run=site.config.name, steps=steps, prediction=now, changes=changes, notes=site.notes())


def predict(site: Site, *, steps: int = STEPS, seed: int = 0) -> Prediction:
    """Simulate the run's first ``steps``; ``RunError`` when it would fail."""
    config = simulated_config(site.config, steps)
    setup = msgspec.structs.replace(site.setup(), config=config)
    result = simulate(setup, seed=seed, check=False)
    if result.outcome != "success":
        raise RunError(f"the run would fail after {len(result.rows)} steps: {result.cause}")
    first = steady(config, steps)
    rows = result.rows[first:]
    seconds = [row["step_seconds"] for row in rows]
    span = sum(seconds)
    idle = _idle(site, result, rows, span)
    step_s = span / len(rows)
    bound = limits_of(result.events, site, config, first_step=first)
    limits = _limits(bound, idle, step_s)

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    return Prediction(
        step_s=step_s,
        step_error_s=statistics.stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0,
        get_batch_s=mean("get_batch_seconds"),
        update_wait_s=mean("update_wait_seconds"),
        train_step_s=mean("train_step_seconds"),
        trajectories_per_s=sum(row["consumed"] for row in rows) / span,
        tokens_per_s=sum(row.get("tokens_sampled", 0) for row in rows) / span,
        idle=idle,
        limits_s=limits,
        bound_s=bound.step_s,
        bottleneck=max(limits, key=lambda name: limits[name]),
    )


def _idle(site: Site, result: Result, rows: list[dict[str, Any]], span: float) -> dict[str, float]:
    """Shares of the time since the first step began; of the trainer, of the steps that count."""
    began = result.rows[0]["time"] - result.rows[0]["step_seconds"]
    served = result.rows[-1]["time"] - began
    idle = {"trainer": 1 - sum(row["train_step_seconds"] for row in rows) / span}
    pools: defaultdict[str, list[float]] = defaultdict(list)
    acted = 0.0
    for worker in result.workers:
        if isinstance(worker, SimInference):
            _, number = role_and_number(worker.name)
            pools[site.pools[number]].append(1 - worker.engine.busy_s / served)
        elif worker.role == Role.ENVIRONMENT:
            acted += worker.busy_s
    for name, shares in pools.items():
        idle[name if name == "generation" else f"generation {name}"] = statistics.fmean(shares)
    environments = site.config.environments
    idle["environments"] = 1 - acted / (environments.workers * environments.threads * served)
    if result.host is not None:
        idle["CPU cores"] = 1 - result.host.used_s / (result.host.cores * served)
    return {name: min(1.0, max(0.0, share)) for name, share in idle.items()}


def _limits(bound: Limits, idle: dict[str, float], step_s: float) -> dict[str, float]:
    limits = {
        "trainer": bound.trainer_s,
        "generation": bound.generation_s,
        "longest trajectory": bound.spread_s,
        "environments": (1 - idle["environments"]) * step_s,
    }
    if "CPU cores" in idle:
        limits["CPU cores"] = (1 - idle["CPU cores"]) * step_s
    return limits
