"""The paper's set-up in the simulator: what was calibrated comes out, and every schedule runs on it."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest

from benchmarks import schedules
from rollart.errors import ConfigError
from rollart.simulation import workload
from rollart.simulation.cluster import Cluster, Pool, cluster_setup
from rollart.simulation.hardware import QWEN3_32B
from rollart.simulation.paper import (
    CLEAN_STEP_S,
    CLEAN_STEP_TRAINING,
    SCHEDULES,
    clean_step,
    paper_cluster,
    paper_config,
)
from rollart.simulation.run import simulate
from rollart.simulation.training import Parallelism
from rollart.simulation.workload import FAMILIES
from rollart.simulation.world import Timings


def test_the_clean_step_of_the_paper_comes_out() -> None:
    cluster, config = clean_step()
    result = simulate(cluster_setup(cluster, config, FAMILIES), seed=0, check=False)
    assert result.outcome == "success"
    assert not result.violations
    steps = result.rows[1:]
    step_s = statistics.fmean(row["step_seconds"] for row in steps)
    train_s = statistics.fmean(row["train_step_seconds"] for row in steps)
    assert step_s == pytest.approx(CLEAN_STEP_S, rel=0.15)
    assert train_s / step_s == pytest.approx(CLEAN_STEP_TRAINING, abs=0.06)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_within_its_limits(schedule: str) -> None:
    """A small batch: what the benchmark prints must be consistent, whatever the ratios are."""
    changes = {"rollout": {"groups_per_batch": 6, "group_size": 4}}
    row = schedules.measure("8B", schedule, 0, 4, changes)
    assert row["bound_ratio"] >= 1, "nothing is faster than its limit"
    assert 0 <= row["idle_trainer"] < 1
    assert ("idle_H20" in row) == (schedule in ("rollart", "rollart_plus"))
    lag = {"sync": 0, "sync_plus": 0, "one_off": 1, "rollart": 2, "rollart_plus": 2}
    assert row["train_lag_max"] <= lag.get(schedule, float("inf"))


def test_the_summary_of_seeds() -> None:
    rows = [
        {"schedule": "sync", "seed": seed, "step_s": value} for seed, value in enumerate([9.0, 10.0, 11.0])
    ]
    summary = schedules.summarise(rows)
    assert summary["step_s"] == 10
    assert summary["step_s_ci95"] == pytest.approx(4.30 / 3**0.5)
    assert summary["seeds"] == 3


IN_FLOAT32 = msgspec.structs.replace(QWEN3_32B, weight_element_bytes=4)


def cluster_of(**changes: object) -> Cluster:
    settings: dict[str, object] = {
        "model": QWEN3_32B,
        "generation": [Pool("H800", 8, 4)],
        "trainer_class": "H800",
        "trainer": Parallelism(tensor=8, data=4),
        "timings": Timings(),
    }
    return Cluster(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"generation": []}, "there is no generation pool"),
        ({"generation": [Pool("H900", 8)]}, "hardware class 'H900' is not one of H800"),
        ({"generation": [Pool("H800", 6, 4)]}, "can't be divided into engines of 4"),
        (
            {"generation": [Pool("H800", 8, 1)], "model": IN_FLOAT32},
            "Qwen3-32B doesn't fit: 131.0 GB of weights",
        ),
        ({"trainer": Parallelism()}, "Qwen3-32B doesn't fit"),
    ],
)
def test_a_cluster_that_cant_run_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cluster_of(**changes)


def test_a_config_that_does_not_fit_the_cluster_is_refused() -> None:
    cluster = paper_cluster("Qwen3-8B", "rollart")
    config = paper_config(paper_cluster("Qwen3-8B", "sync"), "rollart", steps=3, seed=0)
    with pytest.raises(ConfigError, match="the pools make 80 engines"):
        cluster_setup(paper_cluster("Qwen3-8B", "rollart", h20=16), config, FAMILIES)
    with pytest.raises(ConfigError, match="has no workload model"):
        cluster_setup(cluster, config, {})


def test_the_page_of_models_has_the_workload_as_it_is() -> None:
    page = (Path(__file__).parent.parent / "docs" / "simulation-models.md").read_text()
    assert workload.table() in page
