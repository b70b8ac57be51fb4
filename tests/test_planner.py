"""Calibrating on runs, and planning: the host's rule, the fits, known parameters recovered, real runs predicted."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.config import Config
from rollart.controller import events
from rollart.controller.configuration import load_config
from rollart.controller.run_folder import to_yaml
from rollart.errors import ConfigError
from rollart.simulation.calibrating import calibrate, simulated_config
from rollart.simulation.calibration import (
    Calibration,
    EngineModel,
    MachineModel,
    TaskModel,
    TrainerModel,
    WeightModel,
    calibrated_setup,
    load_calibration,
    shape_of,
)
from rollart.simulation.command_line import main
from rollart.simulation.fitting import Measured, fit, sample_of, shared_share, turns_of
from rollart.simulation.host import Host
from rollart.simulation.loop import VirtualLoop
from rollart.simulation.observed import Observed, observe
from rollart.simulation.planner import predict
from rollart.simulation.run import Result, simulate
from rollart.simulation.site import CalibratedSite

ROOT = Path(__file__).parent.parent
LAKE = ROOT / "examples" / "frozen_lake.yaml"
DATA = Path(__file__).parent / "data" / "planner"

# --- the host ------------------------------------------------------------------------------------------------


def ends_of(cores: int, jobs: list[tuple[float, float, int]]) -> tuple[list[float], Host]:
    """When jobs of (start, work, threads) end."""
    host = Host(cores)

    async def one(number: int, start_s: float, work_s: float, threads: int) -> float:
        await asyncio.sleep(start_s)
        await host.compute(f"job {number}", work_s, threads)
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(number, *job) for number, job in enumerate(jobs)))

    loop = VirtualLoop()  # type: ignore[abstract]
    ends = loop.run_until_complete(all_of_them())
    loop.close()
    return ends, host


@pytest.mark.parametrize(
    ("cores", "jobs", "ends"),
    [
        (2, [(0, 3, 1), (0, 5, 1)], [3, 5]),
        (1, [(0, 3, 1), (0, 5, 1)], [6, 8]),
        (2, [(0, 2, 1), (0, 2, 1), (0, 4, 1)], [3, 3, 5]),
        (2, [(0, 3, 2), (1, 1, 1)], [3.5, 2.5]),
        (4, [(0, 1, 1)], [1]),
    ],
)
def test_who_computes_shares_the_cores(
    cores: int, jobs: list[tuple[float, float, int]], ends: list[float]
) -> None:
    found, host = ends_of(cores, jobs)
    assert found == pytest.approx(ends)
    assert host.used_s == pytest.approx(sum(work * threads for _, work, threads in jobs))


def test_a_job_that_is_cancelled_leaves_the_cores_to_the_others() -> None:
    host = Host(1)

    async def main_task() -> float:
        loop = asyncio.get_running_loop()
        other = loop.create_task(host.compute("other", 10.0))
        await asyncio.sleep(0)
        loop.call_at(2.0, other.cancel)
        await host.compute("it", 3.0)
        return loop.time()

    loop = VirtualLoop()  # type: ignore[abstract]
    assert loop.run_until_complete(main_task()) == pytest.approx(4.0)
    loop.close()


# --- the fits ------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_coefficients_and_their_error() -> None:
    rng = random.Random(0)
    rows = [[1.0, rng.uniform(1, 100)] for _ in range(400)]
    targets = [(0.5 + 0.02 * row[1]) * rng.uniform(0.9, 1.1) for row in rows]
    (fixed, slope), error = fit(rows, targets)
    assert abs(fixed.value - 0.5) < 4 * fixed.error and fixed.error < 0.02
    assert abs(slope.value - 0.02) < 4 * slope.error
    assert slope.observations == 400
    assert 0.02 < error < 0.1


def test_no_coefficient_is_below_0_and_columns_may_say_the_same() -> None:
    (fixed, slope), _ = fit([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.5, 2.0])
    assert slope.value == 0 and fixed.value > 2
    same, error = fit([[2.0, 4.0], [3.0, 6.0]], [2.0, 3.0])
    assert 2 * same[0].value + 4 * same[1].value == pytest.approx(2.0)
    assert error == pytest.approx(0, abs=1e-6)
    assert fit([], []) == ([], 0.0)


def test_episodes_that_were_cut_short_count_as_longer() -> None:
    """Half of the long ones are cut at their second turn: without them the mean would be too low."""
    episodes = [(2, True)] * 50 + [(8, True)] * 25 + [(2, False)] * 25
    assert turns_of(episodes).mean == pytest.approx(5.0)
    assert turns_of([(3, True)] * 4).quantiles == [3.0] * 51


def test_what_a_groups_members_have_in_common() -> None:
    rng = random.Random(1)
    groups = []
    for group in range(600):
        common = rng.randint(1, 9)
        groups += [(group, common if rng.random() < 0.7 else rng.randint(1, 9)) for _ in range(6)]
    found = shared_share(groups)
    assert abs(found.value - 0.7) < 0.05
    assert shared_share([(group, group) for group in range(9) for _ in range(2)]).value == 1.0


# --- known parameters ----------------------------------------------------------------------------------------


def number(value: float) -> Measured:
    return Measured(value, 0.0, 1)


TRUTH = Calibration(
    run="truth",
    steps=0,
    tasks={
        "FrozenLake": TaskModel(
            turns=sample_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]),
            turns_shared=number(0.4),
            max_turns=10,
            first_observation_tokens=sample_of([12.0]),
            later_observation_tokens=sample_of([12.0]),
            answer_tokens=sample_of([1.0]),
            reset_s=sample_of([0.02]),
            step_s=sample_of([0.01, 0.02, 0.03]),
            score_s=sample_of([0.0]),
            reset_failures=number(0.0),
            step_failures=number(0.0),
            reward=number(0.1),
            success=number(0.1),
        )
    },
    engine=EngineModel(
        step_s=number(0.015),
        sequence_s=number(0.0003),
        prompt_token_s=number(4e-6),
        relative_error=0.0,
        prefix_hit_share=number(0.0),
        kv_tokens=10**6,
    ),
    trainer=TrainerModel(step_s=number(0.1), token_s=number(8e-5), relative_error=0.0),
    weights=WeightModel(
        publish_s=number(0.01),
        pull_s=number(0.003),
        suspend_s=number(0.0),
        update_s=number(0.05),
        resume_s=number(0.001),
    ),
    machine=MachineModel(
        cores=2,
        processes={},
        engine_threads=1,
        trainer_threads=1,
        message_s=number(0.00005),
        hop_s=number(0.002),
        start_s={"inference": number(5.0)},
    ),
)
"""A machine like the demo's, its parameters known."""


def lake(*overrides: str) -> Config:
    return load_config(LAKE, ["evaluation.episodes=0", *overrides])


def observed(config: Config, result: Result) -> Observed:
    stream = events.parse_events(io.BytesIO(result.events), "the simulated run")
    return observe(config, stream, result.rows)


def run_of(config: Config, truth: Calibration = TRUTH, **changes: Any) -> Result:
    result = simulate(calibrated_setup(truth, config, **changes), seed=3, check=False)
    assert result.outcome == "success" and not result.violations, result.cause
    return result


@pytest.fixture(scope="module")
def known() -> tuple[Calibration, Config]:
    """What is found of a simulated run whose parameters are known."""
    config = simulated_config(lake("rollout.groups_per_batch=8"), 10)
    return calibrate(observed(config, run_of(config)), cores=2, rounds=3), config


def test_known_parameters_are_found_again(known: tuple[Calibration, Config]) -> None:
    """Up to what the events can't tell apart: the step that runs when a request comes, the queue at the controller."""
    found, _ = known
    check = found.check
    assert check is not None
    assert check.predicted_step_s == pytest.approx(check.measured_step_s.value, rel=0.08)
    tokens, truth = 13_000, TRUTH.trainer  # a batch's
    trained = found.trainer.step_s.value + found.trainer.token_s.value * tokens
    assert trained == pytest.approx(truth.step_s.value + truth.token_s.value * tokens, rel=0.3)
    assert found.trainer.token_s.observations == 10
    sequences = 60
    step = found.engine.step_s.value + sequences * (
        found.engine.sequence_s.value + 65 * found.engine.prompt_token_s.value
    )
    assert step == pytest.approx(0.015 + sequences * (0.0003 + 65 * 4e-6), rel=0.5)
    task = found.tasks["FrozenLake"]
    assert task.turns.mean == pytest.approx(TRUTH.tasks["FrozenLake"].turns.mean, rel=0.1)
    assert task.turns_shared.value == pytest.approx(0.4, abs=0.15)
    assert (task.first_observation_tokens.mean, task.answer_tokens.mean) == (12, 1)
    assert task.step_s.mean == pytest.approx(0.02, rel=0.5)
    assert 0.00005 * 0.8 < found.machine.message_s.value < 0.0003, (
        "the controller is never full: an upper bound"
    )
    assert found.engine.prefix_hit_share.value == 0
    assert found.weights.publish_s.value == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize(
    ("overrides", "slower_s"),
    [
        (["inference.workers=2"], 0.0),
        ([], 0.1),
        (["inference.workers=2"], 0.1),
        (["rollout.groups_per_batch=4", "rollout.group_size=10"], 0.0),
    ],
)
def test_other_configurations_of_the_known_machine_are_predicted(
    known: tuple[Calibration, Config], overrides: list[str], slower_s: float
) -> None:
    found, _ = known
    config, slower = lake("rollout.groups_per_batch=8", *overrides), {"FrozenLake": slower_s}
    truth = predict(CalibratedSite(config, TRUTH, slower=slower), steps=8)
    assert predict(CalibratedSite(config, found, slower=slower), steps=8).step_s == pytest.approx(
        truth.step_s, rel=0.15
    )


def test_a_calibration_is_a_file_that_loads_to_itself(
    known: tuple[Calibration, Config], tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    known[0].save(path)
    assert load_calibration(path) == known[0]
    assert "token_s" in path.read_text()
    for wrong in (b"{}", b"[", json.dumps({**msgspec.to_builtins(known[0]), "format": "other"}).encode()):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"is no calibration|has the format"):
            load_calibration(path)
    with pytest.raises(ConfigError, match="can't read"):
        load_calibration(tmp_path / "nothing")


def test_the_shape_of_a_model_comes_from_its_folder_or_its_config(tmp_path: Path) -> None:
    config = lake()
    shape = shape_of(config)
    assert (shape.layers, shape.hidden, shape.kv_bytes_per_token) == (2, 128, 2 * 2 * 2 * 32 * 4)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    folder = msgspec.structs.replace(config.model, path=str(tmp_path), random=None)
    with pytest.raises(ConfigError, match="lacks num_attention_heads"):
        shape_of(msgspec.structs.replace(config, model=folder))


# --- the command line ----------------------------------------------------------------------------------------


def run_folder(folder: Path, config: Config, result: Result) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "events").write_bytes(result.events)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in result.rows))
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence of a command that is refused."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1, said.err
    return said.err


POOLS: dict[str, Any] = {
    "model": "Qwen3-8B",
    "generation": [{"hardware_class": "H800", "gpus": 4}],
    "trainer": {"hardware_class": "H800", "tensor": 4},
    "tasks": {"FrozenLake": "FrozenLake"},
}


def pools_file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "pools.yaml"
    path.write_text(json.dumps({**POOLS, **changes}))  # JSON is YAML
    return path


def test_calibrate_and_plan_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = simulated_config(lake("rollout.groups_per_batch=2"), 6)
    folder = run_folder(tmp_path / "run", config, run_of(config))
    assert main(["calibrate", str(folder), "--rounds", "1", "--cores", "2"]) == 0
    said = capsys.readouterr().out
    assert "engine step" in said and "the run itself" in said and "calibration.json" in said
    written = tmp_path / "plan.json"
    calibration = folder / "calibration.json"
    arguments = ["plan", str(LAKE), "rollout.groups_per_batch=2", "--calibration", str(calibration)]
    assert main([*arguments, "--steps", "5", "--json", str(written), "--slower", "FrozenLake=0.2"]) == 0
    said = capsys.readouterr().out
    for part in (
        "step time",
        "throughput",
        "idle",
        "bottleneck",
        "trainer replica",
        "environment worker",
        "CPU core",
    ):
        assert part in said
    found = json.loads(written.read_text())
    assert [change["more"] for change in found["changes"]] == [
        "engine",
        "trainer replica",
        "environment worker",
        "CPU core",
    ]
    assert found["prediction"]["step_s"] >= found["prediction"]["bound_s"] > 0


def test_a_plan_for_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools = pools_file(
        tmp_path,
        generation=[
            {"hardware_class": "H800", "gpus": 2},
            {"hardware_class": "H20", "gpus": 2, "tensor_parallel": 2},
        ],
    )
    written = tmp_path / "plan.json"
    overrides = [
        "model.random.max_position_embeddings=32768",
        "inference.max_model_len=32768",
        "sampling.max_tokens=400",
    ]
    arguments = ["plan", str(LAKE), *overrides, "rollout.groups_per_batch=2", "environments.workers=1"]
    assert main([*arguments, "--pools", str(pools), "--steps", "5", "--json", str(written)]) == 0
    said = capsys.readouterr().out
    assert "2 H800, 2 H20 that generate and 4 H800 that train Qwen3-8B" in said
    assert "inference.workers is taken as 3, not 1" in said
    found = json.loads(written.read_text())
    assert [change["more"] for change in found["changes"]] == [
        "engine (1 H800)",
        "engine (2 H20)",
        "trainer replica (4 H800)",
        "environment worker",
    ]
    assert {"generation H800", "generation H20", "trainer", "environments"} == set(
        found["prediction"]["idle"]
    )


@pytest.mark.parametrize(
    ("changes", "overrides", "sentence"),
    [
        ({"generation": []}, [], "there is no generation pool"),
        ({"generation": [{"hardware_class": "H900", "gpus": 1}]}, [], "hardware class 'H900' is not one of"),
        ({"model": "Qwen3-32B"}, [], "Qwen3-32B doesn't fit"),
        ({"model": "Qwen9"}, [], "there is no model 'Qwen9'"),
        ({"trainer": {"hardware_class": "TPU"}}, [], "hardware class 'TPU' is not one of"),
        ({"trainer": {"hardware_class": "H800", "data": 0}}, [], "must each be at least 1"),
        ({"tasks": {}}, [], "don't say which workload family task 'FrozenLake' is like"),
        ({"tasks": {"FrozenLake": "Chess"}}, [], "there is no workload family 'Chess'"),
        ({"GPUs": 3}, [], "unknown field `GPUs`"),
        ({}, ["rollout.staleness_bound=-1"], "rollout.staleness_bound"),
    ],
)
def test_pools_that_cant_run_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    overrides: list[str],
    sentence: str,
) -> None:
    assert sentence in failed(capsys, "plan", LAKE, *overrides, "--pools", pools_file(tmp_path, **changes))


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it has no file config.yaml" in failed(capsys, "calibrate", tmp_path)
    config = simulated_config(lake("rollout.groups_per_batch=2"), 3)
    folder = run_folder(tmp_path / "run", config, run_of(config))
    assert "a calibration takes at least 5 steps" in failed(capsys, "calibrate", folder)
    (folder / "events").write_bytes(b"no stream")
    assert "is no RollArt event stream" in failed(capsys, "calibrate", folder)
    (folder / "events").unlink()
    assert "it has no file events" in failed(capsys, "calibrate", folder)
    calibration = tmp_path / "calibration.json"
    TRUTH.save(calibration)
    letters = ROOT / "examples" / "letters.yaml"
    assert "says nothing of task" in failed(capsys, "plan", letters, "--calibration", calibration)
    assert "one of the arguments --pools --calibration" in failed(capsys, "plan", LAKE)
    assert "no config file" in failed(capsys, "plan", tmp_path / "x.yaml", "--calibration", calibration)
    assert "no TASK=SECONDS" in failed(capsys, "plan", LAKE, "--calibration", calibration, "--slower", "x")
    assert "has no task 'Chess'" in failed(
        capsys, "plan", LAKE, "--calibration", calibration, "--slower", "Chess=1"
    )
    assert "with --pools" in failed(
        capsys, "plan", LAKE, "--pools", pools_file(tmp_path), "--slower", "FrozenLake=1"
    )
    assert "can't read the pools" in failed(capsys, "plan", LAKE, "--pools", tmp_path / "nothing.yaml")
    small = msgspec.structs.replace(TRUTH, engine=msgspec.structs.replace(TRUTH.engine, kv_tokens=100))
    small.save(calibration)
    assert "doesn't fit in the calibrated engine's KV cache" in failed(
        capsys, "plan", LAKE, "--calibration", calibration
    )


# --- real runs -----------------------------------------------------------------------------------------------


MEASURED: list[dict[str, Any]] = json.loads((DATA / "measured.json").read_text())


@pytest.mark.parametrize("run", MEASURED, ids=[run["name"] for run in MEASURED])
def test_real_runs_that_were_not_calibrated_on_are_predicted(run: dict[str, Any]) -> None:
    """Within 20% of what was measured: two engines, slow environments, both, other batches.

    ``tests/data/planner/README.md`` says how the calibration and the times were made.
    """
    recorded = load_calibration(DATA / "calibration.json")
    site = CalibratedSite(
        lake(*run["overrides"]), recorded, slower={"FrozenLake": run["slower_s"]} if run["slower_s"] else None
    )
    assert predict(site, steps=run["steps"]).step_s == pytest.approx(run["step_s"], rel=0.2)
