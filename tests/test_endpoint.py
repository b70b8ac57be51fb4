"""The endpoint as the real openai client sees it, on a real engine: what is said, recorded and trained on."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollart.controller import events
from rollart.controller.controller import Outcome
from rollart.environments import Episode, Score
from rollart.packing import unpack_floats, unpack_ids
from rollart.protocol import TrainSample
from tests.endpoint_run import AgentRun, agent_config, client_of, model_of
from tests.engines import EXACT, DrivenWorker, largest_gap, logprobs_under

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

TOOLS: Any = [{"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}]


def check_truth(samples: list[TrainSample]) -> int:
    """Each sampled token has the log-probability that Hugging Face gives it under the version that sampled it."""
    checked = 0
    for sample in samples:
        ids = unpack_ids(sample.ids)
        versions = [run.version for run in sample.versions for _ in range(run.count)]
        at = [place for place, mark in enumerate(sample.mask) if mark]
        found = unpack_floats(sample.logprobs)
        for version in set(versions):
            known = logprobs_under(model_of(version), ids, 1)
            own = [n for n, each in enumerate(versions) if each == version]
            assert largest_gap([found[n] for n in own], [known[at[n] - 1] for n in own]) < EXACT
        checked += len(at)
    return checked


async def test_an_openai_agents_calls_are_trained_on(tmp_path: Path, untied_worker: DrivenWorker) -> None:
    """Chats with tools, streamed and not, completions, log-probabilities; weights change meanwhile."""
    told: dict[str, list[float]] = defaultdict(list)

    async def play(episode: Episode) -> Score:
        async with client_of(episode) as client:
            assert [model.id async for model in await client.models.list()] == ["policy"]
            messages: list[Any] = [{"role": "user", "content": f"LAKE {episode.seed % 10}"}]
            for turn in range(3):
                if turn == 1:
                    stream = await client.chat.completions.create(
                        model=episode.model,
                        messages=messages,
                        tools=TOOLS,
                        logprobs=True,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                    chunks = [chunk async for chunk in stream]
                    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    said = [
                        each
                        for c in chunks
                        if c.choices and c.choices[0].logprobs
                        for each in c.choices[0].logprobs.content or []
                    ]
                    usage = chunks[-1].usage
                    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
                    messages.append({"role": "assistant", "content": content})
                else:
                    answer = await client.chat.completions.create(
                        model=episode.model, messages=messages, tools=TOOLS, logprobs=True, temperature=1
                    )
                    choice = answer.choices[0]
                    assert choice.logprobs is not None
                    said, usage = choice.logprobs.content or [], answer.usage
                    messages.append(choice.message)
                assert usage is not None and usage.completion_tokens == len(said) <= 8
                told[episode.api_key] += [each.logprob for each in said]
                messages.append({"role": "user", "content": "AND?"})
            await client.completions.create(model=episode.model, prompt="RAW:", max_tokens=2, logprobs=0)
        return Score(episode.seed % 2, {"success": 1.0})

    run = AgentRun(agent_config(steps=3), tmp_path / "run", untied_worker)
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    members = {sample.trajectory for sample in run.samples}
    assert len(members) == 12 and len(run.samples) == 24, "a chat and a completion each"
    assert check_truth(run.samples) > 12 * 3
    chats = [s for s in run.samples if s.mask.count(1) and len(unpack_floats(s.logprobs)) > 2]
    heard = [tuple(each) for each in told.values()]
    for sample in chats:
        assert any(
            largest_gap(unpack_floats(sample.logprobs), each) < 1e-6
            for each in heard
            if len(each) == len(unpack_floats(sample.logprobs))
        )
    assert run.counts.get("calls_rendered_anew") is None
    turns = [e for e in run.events if isinstance(e, events.Sampled)]
    assert max(e.turn for e in turns) == 3 and len({v.version for e in turns for v in e.versions}) > 1
    rows = Counter(run.ends)
    assert rows["consumed", ""] == 12


async def test_retries_and_disconnects_neither_lose_nor_double_a_turn(
    tmp_path: Path, untied_worker: DrivenWorker
) -> None:
    async def play(episode: Episode) -> float:
        async with client_of(episode) as client:
            ask: dict[str, Any] = {"model": episode.model, "messages": [{"role": "user", "content": "GO"}]}
            first, twin = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(2)))
            again = await client.chat.completions.create(**ask)
            assert first == twin == again
            streamed = [c async for c in await client.chat.completions.create(**ask, stream=True)]
            assert {c.id for c in streamed} == {first.id}
            assert (
                "".join(c.choices[0].delta.content or "" for c in streamed)
                == first.choices[0].message.content
            )
            # The client goes away while the policy answers, and comes back.
            ask["messages"] = [*ask["messages"], first.choices[0].message, {"role": "user", "content": "ON"}]
            async with AsyncOpenAI(
                base_url=episode.base_url, api_key=episode.api_key, timeout=0.001, max_retries=0
            ) as hasty:
                for _ in range(3):
                    with pytest.raises(Exception, match="timed out"):
                        await hasty.chat.completions.create(**ask)
            second = await client.chat.completions.create(**ask)
            third = await client.chat.completions.create(**ask, user="another sample")
        assert first.id.rpartition("-")[0] == second.id.rpartition("-")[0] != second.id
        assert second.id != third.id
        return 1.0

    run = AgentRun(agent_config(steps=1, rollout={"groups_per_batch": 1}), tmp_path / "run", untied_worker)
    assert await run.run(play) is Outcome.SUCCESS
    run.check()
    check_truth(run.samples)
    assert Counter(s.trajectory for s in run.samples) == {s.trajectory: 2 for s in run.samples}
    consumed = {s.trajectory for s in run.samples}
    turns = Counter(e.trajectory for e in run.events if isinstance(e, events.Sampled))
    assert all(turns[each] == 3 for each in consumed)
    assert run.counts["calls_repeated"] >= 6


async def test_agents_of_any_kind_play(tmp_path: Path, untied_worker: DrivenWorker) -> None:
    """A plain function in a thread, and a program in any language."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, urllib.request\n"
        "episode = json.loads(os.environ['ROLLART_EPISODE'])\n"
        "body = {'model': episode['model'], 'prompt': 'HI', 'max_tokens': 2}\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/completions', json.dumps(body).encode(),\n"
        "    {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'})\n"
        "answer = json.load(urllib.request.urlopen(request))\n"
        "print('played', answer['usage'])\n"
        "print(json.dumps({'reward': episode['seed'] % 3, 'info': {'success': 0}}))\n"
    )
    tasks = [
        {"name": "Function", "agent": "tests.endpoint_run:sync_agent"},
        {"name": "Program", "agent_command": ["python3", str(program)], "options": {"a": [1]}},
    ]
    run = AgentRun(
        agent_config(steps=2, tasks=tasks, evaluation={"episodes": 4}), tmp_path / "run", untied_worker
    )
    assert await run.run() is Outcome.SUCCESS
    run.check()
    assert check_truth(run.samples)
    groups = [group for batch in run.script.batches for group in batch]
    assert {group.task for group in groups} == {"Function", "Program"}
    (first, last) = [e for e in run.events if isinstance(e, events.Evaluated)]
    assert first.episodes == last.episodes == 4 and last.version == 2
