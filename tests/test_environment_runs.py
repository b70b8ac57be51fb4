"""Tasks side by side in one run: what they share, what is their own, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rollart.config import Config, Task
from rollart.controller import events
from rollart.controller.configuration import load_config
from rollart.controller.resource_manager import ResourceManager
from rollart.controller.restarts import Restarts
from rollart.controller.task_source import TaskSource
from rollart.controller.trajectory import State
from rollart.errors import ConfigError
from rollart.launch.local import Placement
from tests.scripted import Script, ScriptedRun, config_of

NOTHING = "tests.scripted:Nothing"


def tasks_of(*settings: dict[str, Any]) -> list[Task]:
    named = [{"name": f"t{i}", "environment": NOTHING, **each} for i, each in enumerate(settings)]
    return msgspec.convert(named, list[Task])


# --- what comes next --------------------------------------------------------------------------------------


def test_a_curriculum_moves_the_weights_from_step_to_step() -> None:
    tasks = tasks_of({"curriculum": {0: 1, 100: 0}}, {"curriculum": {50: 0, 100: 1}}, {})
    source = TaskSource(tasks, 0)
    shares = {step: Counter(source.draw(step)[0] for _ in range(3000)) for step in (0, 50, 75, 200)}
    assert shares[0]["t1"] == 0 and abs(shares[0]["t0"] - 1500) < 150
    assert abs(shares[50]["t0"] - 1000) < 130 and shares[50]["t1"] == 0
    assert abs(shares[75]["t0"] / shares[75]["t1"] - 0.5) < 0.1
    assert shares[200]["t0"] == 0 and abs(shares[200]["t1"] - 1500) < 150


def test_the_position_is_restored_exactly() -> None:
    tasks = tasks_of({"dataset": {"path": "a"}}, {}, {"curriculum": {0: 1, 9: 5}}, {"max_failed_groups": 1})
    source = TaskSource(tasks, 3)
    for step in range(40):
        source.draw(step)
    source.peek(5, 41)
    assert source.group_failed("t3", "broken")
    state = json.loads(json.dumps(source.state()))
    other = TaskSource(tasks, 99)
    other.restore(state)
    assert [source.draw(50) for _ in range(200)] == [other.draw(50) for _ in range(200)]
    assert other.quarantined == {"t3": "broken"}


def test_rows_are_numbered_without_a_gap_and_what_is_seen_ahead_is_what_comes() -> None:
    source = TaskSource(tasks_of({"dataset": {"path": "a"}}, {"weight": 2}), 1)
    ahead = source.peek(7)
    drawn = [source.draw() for _ in range(300)]
    assert drawn[:7] == ahead
    numbers = [seed for name, seed in drawn if name == "t0"]
    assert numbers == list(range(len(numbers))) and 60 < len(numbers) < 140


def test_a_task_is_taken_out_but_never_the_last() -> None:
    source = TaskSource(tasks_of({"max_failed_groups": 2}, {"max_failed_groups": 2}), 0)
    assert not source.group_failed("t0", "no")
    source.group_succeeded("t0")
    assert not source.group_failed("t0", "no") and source.group_failed("t0", "no more")
    assert {source.draw()[0] for _ in range(50)} == {"t1"}
    assert not any(source.group_failed("t1", "no") for _ in range(9)), "the breaker speaks for the last"
    assert source.quarantined == {"t0": "no more"}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"weight": 2, "curriculum": {0: 1}}, "weight does nothing beside curriculum"),
        ({"curriculum": {-1: 1}}, "steps must be at least 0"),
        ({"curriculum": {0: 1, 5: 0}}, "at step 5 the curriculum gives every task the weight 0"),
        ({"context_tokens": 9999}, "context_tokens (9999) is beyond inference.max_model_len"),
        ({"context_tokens": 8, "sampling": {"max_tokens": 8}}, "leaves no room for a prompt"),
        ({"sampling": {"temperature": 3}}, "tasks.0.sampling.temperature"),
        ({"sampling": {"seed": 3}}, "there is no such setting"),
        ({"sampling": {"top_p": 0.5}}, "tasks.0.sampling.top_p is not supported"),
        ({"sampling": {"stop_token_ids": ["§"]}}, "tasks.0.sampling.stop_token_ids.0"),
        ({"dataset": {"path": "a", "eval_path": "b", "eval_share": 0.5}}, "eval_share does nothing"),
    ],
)
def test_settings_of_a_task_that_can_not_be(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    raw = {"name": "x", "steps": 1, "model": {"random": {}}}
    raw["tasks"] = [{"name": "t", "environment": NOTHING, **task}]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)


def test_each_interpreter_has_workers_of_its_own() -> None:
    tasks = [
        {"name": n, "environment": NOTHING, "interpreter": python}
        for n, python in (("a", None), ("b", "/other/python"), ("c", None))
    ]
    placements = ResourceManager(config_of(tasks=tasks, environments={"workers": 2})).placements()
    found = [(p.name, p.interpreter, p.tasks) for p in placements if p.role == "environment"]
    assert found == [
        ("environment-0", "", ("a", "c")), ("environment-1", "", ("a", "c")),
        ("environment-2", "/other/python", ("b",)), ("environment-3", "/other/python", ("b",)),
    ]  # fmt: skip
    (alone,) = [p for p in ResourceManager(config_of()).placements() if p.role == "environment"]
    assert alone.tasks == ()


# --- whole runs, by scripted workers ------------------------------------------------------------------------


async def finish(config: Config, script: Script, path: Path) -> ScriptedRun:
    run = ScriptedRun(config, script, path)
    await asyncio.wait_for(run.controller.run(), 30)
    assert run.violations == []
    return run


async def test_tasks_have_their_own_limits_and_metrics(tmp_path: Path) -> None:
    tasks = [
        {"name": "Short", "environment": NOTHING, "max_turns": 1},
        {"name": "Small", "environment": NOTHING, "context_tokens": 9, "sampling": {"max_tokens": 3}},
    ]
    script = Script()
    script.turns = lambda seed: 5
    config = config_of(steps=4, tasks=tasks, rollout={"groups_per_batch": 6}, evaluation={"episodes": 4})
    run = await finish(config, script, tmp_path / "run")
    for name, turns, tokens in (("Short", 1, 4), ("Small", 2, 9)):
        row = next(row for row in run.rows if f"task/{name}/reward_mean" in row)
        assert row[f"task/{name}/truncated_share"] == 1.0 and row[f"task/{name}/turns_mean"] == turns
        ids = {e.trajectory for e in run.events if isinstance(e, events.Dispatched) and e.task == name}
        scored = [e for e in run.events if isinstance(e, events.Moved) and e.after == State.SCORED]
        assert {e.tokens for e in scored if e.trajectory in ids} == {tokens}
    assert set(run.rows[-1]) >= {"task/Short/eval_success", "task/Small/eval_success", "eval_success"}


async def test_an_overdue_trajectory_is_cut_and_scored(tmp_path: Path) -> None:
    tasks = [{"name": "Slow", "environment": NOTHING, "max_turns": 50, "episode_timeout_s": 0.15}]
    script = Script()
    script.turns = lambda seed: 50
    script.step_s = lambda: 0.06
    run = await finish(config_of(steps=1, tasks=tasks), script, tmp_path / "run")
    assert run.rows[0]["truncated"] == run.rows[0]["trajectories"] == 4
    assert 1 <= run.rows[0]["turns_mean"] <= 4


async def test_a_task_that_always_fails_is_taken_out_and_the_others_go_on(tmp_path: Path) -> None:
    tasks = [
        {"name": "Good", "environment": NOTHING},
        {"name": "Bad", "environment": NOTHING, "max_failed_groups": 3},
    ]
    script = Script()
    bad: set[int] = set()
    run = ScriptedRun(
        config_of(
            steps=12, tasks=tasks, rollout={"retries": 0, "member_refills": 0}, environments={"backoff_s": 0}
        ),
        script,
        tmp_path / "run",
    )

    def note(event: events.Event) -> None:
        if isinstance(event, events.Dispatched) and event.task == "Bad":
            bad.add(event.trajectory)

    run.controller.events.listen(note)
    script.fail_step = lambda step: (
        RuntimeError("the game is broken") if int(step.session.split(".")[0]) in bad else None
    )
    await asyncio.wait_for(run.controller.run(), 30)
    assert run.violations == []
    (out,) = [e for e in run.events if isinstance(e, events.Quarantined)]
    assert out.task == "Bad" and "the game is broken" in out.error
    assert "task Bad is taken out, since its groups fail" in run.output.getvalue()
    assert sum(row.get("tasks_quarantined", 0) for row in run.rows) == 1
    after = [e for e in run.events if isinstance(e, events.Dispatched) and e.t > out.t]
    assert after and {e.task for e in after} == {"Good"}


@pytest.mark.parametrize("fails", [False, True])
async def test_warm_groups_are_reset_before_they_are_admitted(tmp_path: Path, fails: bool) -> None:
    script = Script()
    count = itertools.count()
    if fails:
        script.fail_reset = lambda worker: RuntimeError("no") if next(count) % 5 == 0 else None
    config = config_of(
        steps=6,
        environments={"warm_groups": 3, "backoff_s": 0.01},
        rollout={"redundant_members": 1, "retries": 5},
        evaluation={"episodes": 2, "every": 2},
    )
    run = ScriptedRun(config, script, tmp_path / "run")
    warmed = 0
    task = asyncio.create_task(run.controller.run())
    while not task.done():
        await asyncio.sleep(0.005)
        launcher = getattr(run, "launcher", None)
        if launcher is not None and "environment-0" in launcher.workers:
            left = launcher.workers["environment-0"].left  # type: ignore[attr-defined]
            warmed = max(warmed, sum(session.startswith("warm.") for session in left))
    await task
    assert run.violations == []
    assert warmed >= 3
    assert len(run.rows) == 6


async def test_an_environment_worker_that_ends_is_started_again(tmp_path: Path) -> None:
    script = Script()
    script.step_s = lambda: 0.005
    run = ScriptedRun(config_of(steps=400), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while len(script.batches) < 2:
        await asyncio.sleep(0.01)
    first = run.launcher.workers["environment-0"]
    first.end("pulled the plug")
    async with asyncio.timeout(15):
        while run.launcher.workers["environment-0"] is first or len(script.batches) < 6:
            await asyncio.sleep(0.02)
        done = len(script.batches)
        while len(script.batches) < done + 3:
            await asyncio.sleep(0.01)
    run.controller.interrupt()
    await task
    assert "it is started again in 1 s (1 of 8 times)" in run.output.getvalue()
    assert run.violations == []


async def test_restarts_back_off_and_end() -> None:
    started: list[str] = []
    said: list[str] = []

    async def start(placement: Placement) -> None:
        started.append(placement.name)

    given_up: list[str] = []
    restarts = Restarts(
        most=lambda placement: 3,
        start=start,
        end=lambda name: None,
        gave_up=lambda placement, why: given_up.append(placement.name),
        say=said.append,
        patience_s=9,
    )
    placement = Placement("environment-0", "environment", "CPU")
    restarts.know([placement])
    for delay in ("1 s (1", "2 s (2", "4 s (3"):
        assert restarts.ended(placement, "it fell") and restarts.coming("environment")
        assert delay in said[-1]
    assert not restarts.ended(placement, "it fell") and not restarts.coming("environment")
    assert given_up == ["environment-0"]
    await restarts.close()
    assert started == []
