"""Reward functions in whole runs, against scripted workers; the pieces between config and score."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.config import Config
from rollart.config.rewards import Reward
from rollart.controller import events
from rollart.controller.controller import Outcome
from rollart.controller.preflight import resolve_rewards
from rollart.controller.signatures import AlibabaKeys, AwsKeys, sign_alibaba, sign_aws
from rollart.errors import ConfigError, RunError
from rollart.launch.functions import LocalFunctions, local_rewards
from rollart.packing import unpack_floats
from rollart.rewards import Score, TrajectoryView, TurnView
from rollart.rewards.payload import Result, WrongScore, checked, result_of
from rollart.simulation.run import simulate
from rollart.simulation.scenario import draw_scenario
from tests.scripted import Script, ScriptedRun, config_of


def scored_by(reward: Any, **changes: Any) -> Config:
    task = {"name": "Count", "environment": "tests.scripted:Nothing", "max_turns": 4, "reward": reward}
    return config_of(tasks=[task], **changes)


def function(name: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"tests.reward_functions:{name}", "url": "in_process", **settings}


async def run_of(config: Config, path: Path, script: Script | None = None) -> ScriptedRun:
    run = ScriptedRun(config, script or Script(), path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    return run


# --- whole runs ---------------------------------------------------------------------------------------------


async def test_the_functions_score_is_what_is_trained_on(tmp_path: Path) -> None:
    script = Script()
    run = await run_of(scored_by(function("turns", options={"bonus": 0.5})), tmp_path, script)
    for sample in (s for batch in script.batches for group in batch for s in group.samples):
        assert sample.reward == 1.5 * sum(sample.mask), "one token a turn"
        assert unpack_floats(sample.turn_rewards) == [1.5] * sum(sample.mask)
    rows = run.rows
    assert all(row["success_rate"] == 1.0 for row in rows)
    assert sum(row["reward/Count/scored"] for row in rows) >= 12
    assert rows[-1]["reward/Count/latency_mean_seconds"] > 0


async def test_weighted_scores_are_summed_and_their_parts_are_told(tmp_path: Path) -> None:
    reward = [
        function("turns", weight=0.25),
        function("last", weight=-1.0),
        {"function": "rollart.rewards:environment_reward", "url": "in_process", "weight": 1.0},
    ]
    script = Script()
    script.turns = lambda seed: 1  # then the last reward is the sum of all
    run = await run_of(scored_by(reward), tmp_path, script)
    samples = [s for batch in script.batches for group in batch for s in group.samples]
    assert {sample.reward for sample in samples} == {0.25}
    # What has no turns of its own (last) comes with the last turn, as the trainer has it.
    assert {unpack_floats(s.turn_rewards)[0] - 0.25 for s in samples} <= {0.0, 1.0}
    assert run.rows[0]["reward/Count/part/turns_mean"] == 1.0


@pytest.mark.parametrize("redundant", [0, 2])
async def test_a_group_reward_sees_the_whole_group(tmp_path: Path, redundant: int) -> None:
    config = scored_by(
        function("group_size", scope="group"),
        rollout={"group_size": 3, "redundant_members": redundant},
        steps=5,
    )
    script = Script()
    script.step_s = lambda: script.random.random() * 0.02
    run = await run_of(config, tmp_path, script)
    assert all(row["reward_mean"] >= 3 for row in run.rows)


async def test_a_group_that_loses_members_is_scored_with_those_that_are_left(tmp_path: Path) -> None:
    from rollart.workers.worker import Deterministic

    script = Script()
    script.fail_step = lambda step: Deterministic("gone") if script.random.random() < 0.2 else None
    config = scored_by(
        function("group_size", scope="group"),
        rollout={"group_size": 4, "min_group": 2, "member_refills": 1, "max_failed_groups": 1000},
        steps=8,
    )
    await run_of(config, tmp_path, script)
    assert {len(g.samples) for batch in script.batches for g in batch} >= {3, 4}


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("broken", "error", "LookupError: no such rubric"),
        ("not_a_number", "refused", "nan"),
        ("unavailable", "infrastructure", "the judge is down"),
    ],
)
async def test_what_always_fails_is_dropped_counted_and_ends_the_run_with_the_cause(
    tmp_path: Path, name: str, kind: str, said: str
) -> None:
    config = scored_by(function(name, retries=0), rollout={"max_failed_groups": 3, "member_refills": 0})
    run = ScriptedRun(config, Script(), tmp_path / "run")
    with pytest.raises(RunError, match="3 groups in a row"):
        await run.controller.run()
    assert run.violations == []
    failed = [e for e in run.events if isinstance(e, events.Moved) and e.after == "failed"]
    assert failed and all(e.reason == "reward_error" and said in e.detail for e in failed)


async def test_a_failure_may_count_as_a_value_and_never_in_silence(tmp_path: Path) -> None:
    config = scored_by(function("broken", on_failure="value", value=-2.0))
    run = await run_of(config, tmp_path)
    assert all(row["reward_mean"] == -2.0 for row in run.rows)
    assert sum(row["reward/Count/values"] for row in run.rows) >= 12

    config = scored_by(function("broken", on_failure="value", value=0.0, max_failures=5), steps=100)
    failing = ScriptedRun(config, Script(), tmp_path / "failing")
    with pytest.raises(RunError, match=r"5 rewards in a row failed.*no such rubric"):
        await failing.controller.run()


async def test_a_reward_that_takes_too_long_is_named(tmp_path: Path) -> None:
    config = scored_by(
        function("sleeps", timeout_s=0.05, retries=0), rollout={"max_failed_groups": 2, "member_refills": 0}
    )
    run = ScriptedRun(config, Script(), tmp_path / "run")
    with pytest.raises(RunError, match=r"no answer within timeout_s=0.05"):
        await run.controller.run()
    reasons = {e.reason for e in run.events if isinstance(e, events.Moved) and e.after == "failed"}
    assert reasons == {"reward_timeout"}


async def test_a_redundant_member_that_is_being_scored_is_stopped_at_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    slow = function("sleeps", options={"seconds": 0.2, "marks": str(marks)})
    config = scored_by(slow, rollout={"redundant_members": 2, "groups_per_batch": 1})
    script = Script()
    script.step_s = lambda: script.random.random() * 0.2
    await run_of(config, tmp_path, script)
    assert list(marks.iterdir())


async def test_a_run_scores_through_the_local_host_over_http(tmp_path: Path) -> None:
    """And when the host dies in mid-run, no trajectory is lost for it."""
    config = scored_by(
        {"function": "tests.reward_functions:turns", "max_instances": 2, "retries": 12}, steps=6
    )
    host = LocalFunctions(local_rewards(config), tmp_path, tmp_path)
    await host.start()
    try:
        script = Script()
        run = ScriptedRun(config, script, tmp_path / "run", functions=host)
        ending = asyncio.ensure_future(run.controller.run())
        while len(script.batches) < 2:
            await asyncio.sleep(0.01)
        assert host._process is not None
        host._process.kill()
        assert await ending is Outcome.SUCCESS
    finally:
        await host.stop()
    assert run.violations == [] and host.restarts == 1
    samples = [s for batch in script.batches for group in batch for s in group.samples]
    assert all(sample.reward == float(sum(sample.mask)) for sample in samples)
    assert sum(row.get("reward/Count/cold_starts", 0) for row in run.rows) >= 1
    assert not any(key.startswith("failed_reward") for row in run.rows for key in row)


# --- scores and config --------------------------------------------------------------------------------------

VIEW = TrajectoryView(id=1, task="T", seed=2, split="train", turns=[TurnView("a", "b"), TurnView("c", "d")])


def test_only_finite_scores_are_scores() -> None:
    assert result_of(1, VIEW).score == 1.0
    assert result_of(Score(turns=[1.0, 2.0]), VIEW) == Result(score=3.0, turns=[1.0, 2.0])
    for wrong, said in (
        ("1", "must return a number or a Score"),
        (None, "must return a number or a Score"),
        (float("inf"), "finite"),
        (Score(), "has no score"),
        (Score(turns=[1.0]), "has rewards for 1 turns; the trajectory has 2"),
        (Score(score=1.0, parts={"a": float("nan")}), "part 'a' is nan"),
    ):
        with pytest.raises(WrongScore, match=said):
            result_of(wrong, VIEW)
    with pytest.raises(WrongScore, match="has no score"):
        checked(msgspec.json.decode(b'{"score": null}', type=Result), VIEW)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "ftp://x/y"}, "url is 'ftp://x/y'"),
        ({"url": "local", "function": None}, "function is required where url is local"),
        ({"on_failure": "value"}, "on_failure: value needs value"),
        ({"value": 1.0}, "value does nothing unless on_failure is value"),
        ({"retry_for_s": 1.0}, "retry_for_s does nothing unless on_failure is retry"),
        ({"url": "http://x/y", "idle_s": 1.0}, "idle_s does nothing unless url is local"),
        ({"url": "local", "token_env": "T"}, "token_env does nothing unless url is http"),
        (
            {"url": "in_process", "hedge_after_s": 1.0},
            "hedge_after_s does nothing unless url is not in_process",
        ),
        ({"scope": "group", "batch": 2}, "batch does nothing unless scope is trajectory"),
        ({"min_instances": 40}, "min_instances .40. must be at most max_instances .32."),
    ],
)
def test_a_setting_that_does_nothing_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert({"function": "m:f", **changes}, Reward)


def test_a_group_reward_and_lock_step_exclude_each_other() -> None:
    with pytest.raises(msgspec.ValidationError, match="scope group waits for the group's members"):
        scored_by(
            function("group_size", scope="group"),
            rollout={"schedule": "sync", "update_at": "publish", "staleness_bound": 0},
        )


def test_what_a_function_declares_holds_where_the_config_leaves_it_open() -> None:
    reward = {"function": "tests.reward_functions:Judge.grade", "timeout_s": 3.0}
    (resolved,) = resolve_rewards(scored_by(reward)).tasks[0].rewards
    assert (resolved.url, resolved.timeout_s, resolved.memory_mib, resolved.retries) == ("local", 3.0, 512, 1)
    far = {"function": "tests.reward_functions:Judge.grade", "url": "https://gateway.example/function/grade"}
    (resolved,) = resolve_rewards(scored_by([far])).tasks[0].rewards
    assert resolved.function == "tests.reward_functions:grade" and resolved.memory_mib is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"function": "tests.reward_functions:turn"}, "has no turn; did you mean turns"),
        ({"function": "tests.reward_function:turns"}, "there is no module tests.reward_function"),
        ({"function": "tests.reward_functions:Judge"}, "it must be a function"),
        (
            {"function": "tests.reward_functions:turns", "options": {"bonis": 1}},
            "no option 'bonis'; did you mean bonus?",
        ),
        ({"url": "lambda://us-east-1/grade"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"url": "fc+https://x.fcapp.run/"}, "ALIBABA_CLOUD_ACCESS_KEY_ID"),
        ({"url": "https://x/y", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN is not set"),
    ],
)
def test_wrong_functions_are_told_before_anything_starts(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=said):
        resolve_rewards(scored_by(changes))


# --- simulated ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["trajectory", "group"])
def test_the_reward_client_is_part_of_what_is_fuzzed(scope: str) -> None:
    """The shipping client over a simulated endpoint that fails now and then: the same bytes for the same seed."""
    seeds = (
        s
        for s in range(200)
        if any(r.scope == scope for t in draw_scenario(s).setup.config.tasks for r in t.rewards)
    )
    seed = next(seeds)
    scenario = draw_scenario(seed)
    first, second = (
        simulate(scenario.setup, seed=seed, faults=scenario.faults, shuffle=True) for _ in range(2)
    )
    assert first.violations == [] and first.events == second.events
    assert sum(row.get("reward/A/scored", 0) for row in first.rows) > 0


# --- signatures ---------------------------------------------------------------------------------------------

AWS = "https://example.amazonaws.com/"
VECTORS: list[tuple[str, str, str, dict[str, str], bytes]] = [
    ("5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31", "GET", AWS, {}, b""),
    ("5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b", "POST", AWS, {}, b""),
    (
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        "GET",
        f"{AWS}?Param2=value2&Param1=value1",
        {},
        b"",
    ),
    (
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
        "POST",
        AWS,
        {"Content-Type": "application/x-www-form-urlencoded"},
        b"Param1=value1",
    ),
    ("8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85", "GET", f"{AWS}\u1234", {}, b""),
    (
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
        "GET",
        AWS,
        {"My-Header1": " value1", "My-Header2": ' "a   b   c"'},
        b"",
    ),
]
"""Of AWS's Signature Version 4 test suite: get-vanilla, post-vanilla, get-vanilla-query-order-key-case,
post-x-www-form-urlencoded, get-utf8, get-header-value-trim."""


@pytest.mark.parametrize(("signature", "method", "url", "headers", "body"), VECTORS, ids=lambda v: str(v)[:8])
def test_signature_version_4_gives_the_published_signatures(
    signature: str, method: str, url: str, headers: dict[str, str], body: bytes
) -> None:
    keys = AwsKeys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
    now = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
    signed = sign_aws(keys, method, url, headers, body, region="us-east-1", service="service", now=now)
    assert signed["Authorization"].endswith(f"Signature={signature}")
    assert "wJalr" not in repr(keys)


def test_alibabas_signature_is_the_published_one() -> None:
    signed = sign_alibaba(
        AlibabaKeys("YourAccessKeyId", "YourAccessKeySecret"),
        "POST",
        "https://ecs.cn-shanghai.aliyuncs.com/?ImageId=win2019_1809_x64_dtc_zh-cn_40G_alibase_20230811.vhd"
        "&RegionId=cn-shanghai",
        {"x-acs-action": "RunInstances", "x-acs-version": "2014-05-26"},
        b"",
        now=datetime(2023, 10, 26, 10, 22, 32, tzinfo=UTC),
        nonce="3156853299f313e23d1673dc12e1703d",
    )
    assert signed["Authorization"].endswith(
        "06563a9e1b43f5dfe96b81484da74bceab24a1d853912eee15083a6f0f3283c0"
    )


def test_the_control_plane_loads_no_http_client_until_a_reward_needs_one() -> None:
    code = "import rollart.controller.controller, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"aiohttp", "jsonschema", "sympy", "math_verify"} & set(json.loads(done.stdout))
