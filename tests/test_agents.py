"""Agents as trajectories: how they end, what their calls are told then, and what becomes of what they sampled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rollart.controller import events
from rollart.controller.configuration import load_config
from rollart.controller.controller import Outcome
from rollart.controller.preflight import check_environments
from rollart.environments import Episode, Unavailable
from rollart.errors import ConfigError, RunError
from rollart.packing import unpack_floats
from tests.endpoint_run import AgentRun, Hooks, agent_config, client_of
from tests.engines import until


def ask(episode: Episode, text: str = "GO", **body: Any) -> dict[str, Any]:
    return {"model": episode.model, "messages": [{"role": "user", "content": text}], **body}


async def one_call(episode: Episode) -> float:
    async with client_of(episode) as client:
        await client.chat.completions.create(**ask(episode))
    return float(episode.seed % 2)


@asynccontextmanager
async def held_episode(path: Path, **changes: Any) -> AsyncIterator[tuple[AgentRun, Episode]]:
    """A run whose agents all wait, and the episode of the first."""
    over = asyncio.Event()

    async def play(episode: Episode) -> float:
        await over.wait()
        return 0.0

    run = AgentRun(agent_config(**changes), path)
    async with run.under_way(play):
        await until(lambda: bool(Hooks.seen))
        yield run, Hooks.seen[0]
        over.set()


# --- what calls are told ------------------------------------------------------------------------------------


async def test_errors_are_openais_and_name_what_is_wrong(tmp_path: Path) -> None:
    async with held_episode(tmp_path / "run") as (run, episode), client_of(episode) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=r"temperature 0\.5 is not supported") as refused:
            await create(**ask(episode, temperature=0.5))
        assert refused.value.param == "temperature" and refused.value.code == "unsupported_value"
        with pytest.raises(openai.BadRequestError, match="top_p is not supported: it cuts") as refused:
            await create(**ask(episode, top_p=0.5))
        assert refused.value.param == "top_p" and refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="this run serves 'policy'"):
            await create(**{**ask(episode), "model": "gpt-5"})
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="policy", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")
        with pytest.raises(openai.BadRequestError, match=r"inference\.max_model_len") as refused:
            await create(**ask(episode, "X" * 600))
        assert refused.value.code == "context_length_exceeded"
        for key in ("nonsense", episode.api_key[:-1], episode.api_key.replace("rollart.0", "rollart.1"), "é"):
            async with aiohttp.ClientSession() as http:
                headers = {"Authorization": f"Bearer {key}"}
                async with http.get(f"{episode.base_url}/models", headers=headers) as answer:
                    assert answer.status == 401
                    assert (await answer.json())["error"]["code"] == "invalid_api_key"
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            for body in (b"", b"[]", b"{", b"\xff"):
                async with http.post(f"{episode.base_url}/completions", headers=headers, data=body) as answer:
                    assert answer.status == 400 and "error" in await answer.json()
        assert episode.base_url.startswith("http://127.0.0.1:")
        assert run.counts["calls_refused"] == 13
        assert (await create(**ask(episode))).usage is not None, "none of them was a turn"


async def test_calls_of_a_trajectory_that_has_ended_end_with_410(tmp_path: Path) -> None:
    """At once where one is under way, and without retries; the engine gives the request up."""
    told: list[str] = []
    holding = asyncio.Event()

    async def play(episode: Episode) -> float:
        if len(Hooks.seen) > 1:
            await holding.wait()
            return await one_call(episode)
        run.script.generate_s = lambda: 60.0
        async with client_of(episode) as client:
            call = asyncio.ensure_future(client.chat.completions.create(**ask(episode)))
            await until(lambda: "generating" in {t.state for t in trajectories()})
            run.script.generate_s = lambda: 0.0
            holding.set()
            run.controller.rollout.cancel([t for t in trajectories() if t.state == "generating"])
            for again in (call, client.chat.completions.create(**ask(episode))):
                try:
                    await again
                except openai.APIStatusError as error:
                    told.append(f"{error.status_code} {error.code} {error}")
        return 1.0

    def trajectories() -> list[Any]:
        return [t for g in run.controller.rollout.buffer.groups.values() for t in g.in_flight.values()]

    run = AgentRun(agent_config(steps=1), tmp_path / "run")
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    # The worker cancels the agent as soon as its trajectory has ended: it may be told once, or not at all.
    assert all("410 trajectory_ended" in each and "aborted: cancelled" in each for each in told)
    assert run.script.aborted == 1
    assert ("aborted", "cancelled") in run.ends


async def test_the_last_word_on_a_call_is_410_for_those_who_are_not_cancelled(tmp_path: Path) -> None:
    """A client outside the worker, which is only told by its calls."""
    async with held_episode(tmp_path / "run") as (run, episode), client_of(episode) as client:
        run.script.generate_s = lambda: 60.0
        calls = [
            asyncio.ensure_future(client.chat.completions.create(**ask(episode, text))) for text in "ABA"
        ]
        groups = run.controller.rollout.buffer.groups
        first = groups[0].in_flight[0]
        await until(lambda: first.state == "generating")
        run.controller.rollout.cancel([first])
        for call in calls:
            with pytest.raises(openai.APIStatusError, match="trajectory 0 is aborted: cancelled") as gone:
                await call
            assert gone.value.status_code == 410
        with pytest.raises(openai.APIStatusError, match="aborted: cancelled"):
            await client.chat.completions.create(**ask(episode, "C"))
        await until(lambda: run.script.aborted == 1)


async def test_a_trajectory_of_mixed_versions_is_dropped_at_its_turn(tmp_path: Path) -> None:
    told: list[openai.APIStatusError] = []

    async def play(episode: Episode) -> float:
        early = len(Hooks.seen) <= 2
        async with client_of(episode) as client:
            await client.chat.completions.create(**ask(episode, "1"))
            if early:
                await until(lambda: run.controller.versions.m >= 1)
                outside = asyncio.create_task(call_outside(episode))
                await outside
        return 1.0

    async def call_outside(episode: Episode) -> None:
        async with client_of(episode) as client:
            try:
                await client.chat.completions.create(**ask(episode, "2"))
            except openai.APIStatusError as error:
                told.append(error)

    run = AgentRun(
        agent_config(
            steps=3, rollout={"groups_per_batch": 1, "mixed_versions": "drop", "staleness_bound": 9}
        ),
        tmp_path / "run",
    )
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    assert ("aborted", "mixed_versions") in run.ends
    assert all(error.status_code == 410 for error in told)


# --- how agents end -----------------------------------------------------------------------------------------


async def test_an_agent_that_is_too_long_is_cut_and_scored(tmp_path: Path) -> None:
    """It may take the refusal as the end and return its score; if it gives up, the score is 0."""

    async def play(episode: Episode) -> float:
        async with client_of(episode) as client:
            for turn in range(99):
                try:
                    await client.chat.completions.create(**ask(episode, str(turn)))
                except openai.BadRequestError as error:
                    assert error.code == "max_turns"
                    if episode.seed % 2 or len(Hooks.seen) % 2:
                        return 1.0
                    raise
        raise AssertionError("unreachable")

    run = AgentRun(agent_config(steps=2, task={"max_turns": 3}), tmp_path / "run")
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    assert set(Counter(s.trajectory for s in run.samples).values()) == {3}
    assert {e.turns for e in run.events if isinstance(e, events.Moved) and e.after == "consumed"} == {3}
    assert '"truncated":4' in run.folder.metrics.read_text()


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ValueError("no map"), "raised ValueError: no map"),
        (SystemExit(3), "raised SystemExit: 3"),
        (None, "the agent's score is 'great'; it must be a finite number"),
    ],
)
async def test_an_agent_that_fails_costs_its_trajectory_and_the_run_says_why(
    tmp_path: Path, failure: BaseException | None, says: str
) -> None:
    async def play(episode: Episode) -> float:
        await one_call(episode)
        if failure is not None:
            raise failure
        return "great"  # type: ignore[return-value]

    run = AgentRun(agent_config(rollout={"max_failed_groups": 2, "member_refills": 0}), tmp_path / "run")
    with pytest.raises(RunError, match=says):
        await run.run(play)
    run.check()
    assert ("failed", "env_error") in run.ends


async def test_an_agent_that_never_called_has_failed(tmp_path: Path) -> None:
    async def play(episode: Episode) -> float:
        return 1.0

    run = AgentRun(agent_config(rollout={"max_failed_groups": 1, "member_refills": 0}), tmp_path / "run")
    with pytest.raises(RunError, match="the agent ended without one answered call"):
        await run.run(play)


async def test_what_the_machinery_breaks_begins_again(tmp_path: Path) -> None:
    """A sandbox that is gone, an engine that fails, an agent that hangs: a new attempt, under a new key."""
    failures = iter([RuntimeError("out of memory")] * 24)  # more than the tries of all calls at a time
    keys = set()
    out_of_time = asyncio.Event()

    def generate_s() -> float:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return 0.0

    async def play(episode: Episode) -> float:
        keys.add(episode.api_key)
        number = len(Hooks.seen)
        if number == 2:
            raise Unavailable("the sandbox died")
        if number == 3:
            try:
                await asyncio.sleep(60)
            finally:
                out_of_time.set()
        score = await one_call(episode)
        await out_of_time.wait()
        return score

    run = AgentRun(agent_config(steps=2, task={"episode_timeout_s": 1.0}), tmp_path / "run")
    run.script.generate_s = generate_s
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    again = Counter(e.reason for e in run.events if isinstance(e, events.Moved) and e.after == "pending")
    assert again["generation_error"] >= 1 and again["env_error"] == 1 and again["env_timeout"] >= 1
    assert len(keys) == len(Hooks.seen)


async def test_a_call_that_an_agent_does_not_wait_for_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    async def play(episode: Episode) -> float:
        leaves = len(Hooks.seen) % 2
        async with client_of(episode, max_retries=0) as client:
            said = await client.chat.completions.create(**ask(episode))
            if leaves:
                run.script.generate_s = lambda: 60.0
                more = ask(episode)["messages"] + [said.choices[0].message, {"role": "user", "content": "ON"}]
                late = asyncio.ensure_future(
                    client.chat.completions.create(model=episode.model, messages=more)
                )
                await until(lambda: "generating" in run.controller.metrics.live)
                await asyncio.sleep(0.1)
                run.script.generate_s = lambda: 0.0
                late.add_done_callback(lambda done: done.cancelled() or done.exception())
        return 1.0

    run = AgentRun(agent_config(steps=1, rollout={"groups_per_batch": 1}), tmp_path / "run")
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    assert len(run.samples) == 2
    for sample in run.samples:
        assert len(unpack_floats(sample.logprobs)) == 8 and sample.mask.endswith(b"\1"), (
            "one turn, and its end"
        )
    assert run.script.aborted >= 1


async def test_any_agents_keep_the_invariants(tmp_path: Path) -> None:
    """Calls at the same time, repeated, given up, branching; members that are superfluous; persons who cancel."""
    rng = random.Random(0)

    async def call(client: openai.AsyncOpenAI, episode: Episode, messages: list[Any]) -> Any:
        body = {"model": episode.model, "messages": messages, "max_tokens": rng.choice([1, 8])}
        if rng.random() < 0.2:
            with_less = client.with_options(timeout=0.001, max_retries=0)
            try:
                return await with_less.chat.completions.create(**body)
            except openai.APITimeoutError:
                pass
        if rng.random() < 0.2:
            await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(3)))
        return await client.chat.completions.create(**body)

    async def talk(client: openai.AsyncOpenAI, episode: Episode, messages: list[Any], depth: int) -> None:
        said = await call(client, episode, messages)
        messages = [*messages, {"role": "assistant", "content": said.choices[0].message.content}]
        for _ in range(rng.choice([0, 1, 1, 2]) if depth < 3 else 0):
            more = {"role": "user", "content": rng.choice("ABCD")}
            await talk(client, episode, [*messages, more], depth + 1)

    async def play(episode: Episode) -> float:
        roots = [[{"role": "user", "content": text}] for text in ("X", "Y")[: rng.choice([1, 2])]]
        client = shared.with_options(api_key=episode.api_key, base_url=episode.base_url)
        async with asyncio.TaskGroup() as group:
            for root in roots:
                group.create_task(talk(client, episode, root, 0))
        return rng.choice([0.0, 1.0])

    async def cancel_some() -> None:
        while True:
            await asyncio.sleep(0.1)
            groups = run.controller.rollout.buffer.groups.values()
            flying = [t for group in groups for t in group.in_flight.values()]
            if flying and rng.random() < 0.3:
                run.controller.rollout.cancel([rng.choice(flying)])

    run = AgentRun(
        agent_config(
            steps=3,
            task={"max_turns": 40},
            rollout={"groups_per_batch": 2, "group_size": 3, "redundant_members": 1, "update_at": "publish"},
        ),
        tmp_path / "run",
    )
    run.script.generate_s = lambda: rng.random() * 0.01
    shared = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")
    cancelling = asyncio.ensure_future(cancel_some())
    try:
        assert await run.run(play) is Outcome.SUCCESS
    finally:
        cancelling.cancel()
        await shared.close()
    run.check()
    sampled: Counter[int] = Counter()
    for event in run.events:
        if isinstance(event, events.Sampled):
            sampled[event.trajectory] += event.tokens
    trained: Counter[int] = Counter()
    for sample in run.samples:
        assert sample.mask.count(1) == len(unpack_floats(sample.logprobs))
        assert sum(v.count for v in sample.versions) == sample.mask.count(1) and not sample.mask[0]
        trained[sample.trajectory] += sample.mask.count(1)
    assert trained == {each: sampled[each] for each in trained}, "each sampled token once"
    assert run.counts["calls_repeated"] and run.counts["calls_branched"] and run.counts["conversations_begun"]
    assert not run.counts.get("calls_rendered_anew")


# --- what is wrong is told before anything starts -------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("agent: lake_player:pley", "did you mean play"),
        ("agent: lake_player:NAME", "is a str, it must be a function"),
        ("agent: lake_player:alone", "alone must take one argument, the episode"),
        ("agent: lake_plaier:play", "there is no module lake_plaier; did you mean lake_player"),
        ("agent: a:b, environment: a:B", "has environment and agent"),
        ("agent_command: [no-such-program]", "no program 'no-such-program'"),
        ("weight: 1", "needs one of environment"),
        ("agent: a:b, step_timeout_s: 5", "use episode_timeout_s"),
        ("agent: a:b, chat: true", "chat is for environments"),
    ],
)
def test_wrong_agents_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, says: str
) -> None:
    (tmp_path / "lake_player.py").write_text("NAME = 'x'\ndef play(episode): ...\ndef alone(): ...\n")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(f"name: x\nsteps: 1\nmodel: {{random: {{}}}}\ntasks: [{{name: T, {task}}}]\n")
    with pytest.raises(ConfigError, match=says):
        check_environments(load_config(path))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("endpoint: {host: 0.0.0.0}", r"give endpoint\.url"),
        ("rollout: {schedule: sync, update_at: publish, staleness_bound: 0}", "its agent decides by itself"),
    ],
)
def test_settings_that_agents_can_not_have_are_refused(tmp_path: Path, more: str, says: str) -> None:
    path = tmp_path / "config.yaml"
    base = "name: x\nsteps: 1\nmodel: {random: {}}\ntasks: [{name: T, agent: a:b}]\n"
    path.write_text(base + more)
    with pytest.raises(ConfigError, match=says):
        load_config(path)
    path.write_text(base.replace("agent: a:b", "environment: a:B") + "endpoint: {port: 80}")
    with pytest.raises(ConfigError, match="no task has an agent"):
        load_config(path)
