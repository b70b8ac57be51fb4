"""The local function host: real processes behind real HTTP, called by the client that the controller uses."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from rollart.config.rewards import Reward
from rollart.controller.reward_backends import backends
from rollart.controller.reward_calls import Caller, CallError, FailureKind, Stats
from rollart.launch.functions import LocalFunctions
from rollart.rewards import TrajectoryView, TurnView
from rollart.rewards.payload import Reply, Request
from rollart.workers.functions.scaling import Limits, Load, Means, further, patience_s

FUNCTIONS: dict[str, dict[str, Any]] = {
    "where": {},
    "last": {},
    "blocks": {"max_instances": 4, "idle_s": 0.2},
    "broken": {},
    "unavailable": {},
    "not_a_number": {},
    "sleeps": {"calls_per_instance": 16, "max_instances": 1},
    "crashes": {"max_instances": 2},
    "hoards": {"memory_mib": 256},
    "Judge.grade": {},
    "no_such": {},
}


def reward_of(name: str, **settings: Any) -> Reward:
    raw = {"function": f"tests.reward_functions:{name}", "url": "local", **FUNCTIONS[name], **settings}
    return msgspec.convert(raw, Reward)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFunctions]:
    folder = tmp_path_factory.mktemp("functions")
    functions = LocalFunctions([reward_of(name) for name in FUNCTIONS], folder, folder)
    await functions.start()
    yield functions
    await functions.stop()


on_the_hosts_loop = pytest.mark.asyncio(loop_scope="module")


class Client:
    """As a part of the reward client, for one function."""

    def __init__(self, host: LocalFunctions, name: str, **settings: Any) -> None:
        self.reward = reward_of(name, **settings)
        self.stats = Stats()
        make = backends(local=lambda: host.address, local_token=host.token)
        self.caller = Caller(self.reward, make(self.reward), random.Random(0), self.stats)

    def request(self, id: int = 0, **options: Any) -> Request:
        view = TrajectoryView(id=id, task="T", seed=0, split="train", turns=[TurnView("a", "b", 0.5)])
        return Request(
            key=f"{self.reward.function}-{id}-{random.random()}",
            function=self.reward.function or "",
            deadline_s=self.caller.timeout_s,
            options=options,
            trajectories=[view],
        )

    async def call(self, id: int = 0, **options: Any) -> Reply:
        return await self.caller.call(self.request(id, **options))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.caller.close()


async def stats_of(host: LocalFunctions, name: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {host.token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{host.address}/stats", headers=headers) as got,
    ):
        return dict((await got.json())[f"tests.reward_functions:{name}"])


async def until(host: LocalFunctions, name: str, **wanted: Any) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            stats = await stats_of(host, name)
            if all(stats[key] == value for key, value in wanted.items()):
                return stats
            await asyncio.sleep(0.02)


@on_the_hosts_loop
async def test_calls_start_instances_and_without_calls_there_are_none(host: LocalFunctions) -> None:
    async with Client(host, "where") as client:
        first = await client.call()
        assert first.results[0].score == 1.0 and first.meter.cold_start_s > 0 and first.meter.busy_s > 0
        assert first.results[0].parts["pid"] != os.getpid()
        stats = await until(host, "where", instances=0)
        assert stats["calls"] == 1 and stats["cold_starts"] == 1
        assert stats["paid_s"] > stats["busy_s"] > 0
        second = await client.call()
        assert second.results[0].parts["pid"] != first.results[0].parts["pid"]
        assert client.stats.counts["cold_starts"] == 2


@on_the_hosts_loop
async def test_more_calls_make_more_instances_up_to_the_most(host: LocalFunctions) -> None:
    async with Client(host, "blocks") as client:
        await client.call(0, seconds=0.5)  # so that it is known how long calls take
        replies = await asyncio.gather(*(client.call(id, seconds=0.5) for id in range(12)))
        assert [reply.results[0].score for reply in replies] == [float(id) for id in range(12)]
        stats = await until(host, "blocks", instances=0)
        assert 2 <= stats["cold_starts"] <= 1 + 4 + 1


@on_the_hosts_loop
async def test_what_a_function_does_wrong_is_told_and_not_tried_again(host: LocalFunctions) -> None:
    async with Client(host, "broken") as client:
        (result,) = (await client.call()).results
        assert "LookupError: no such rubric" in result.error and client.stats.counts["calls"] == 1
    async with Client(host, "not_a_number") as client:
        assert "nan" in (await client.call()).results[0].error
    async with Client(host, "unavailable", retries=1) as client:
        with pytest.raises(CallError, match="the judge is down") as failed:
            await client.call()
        assert failed.value.kind is FailureKind.INFRASTRUCTURE and client.stats.counts["calls"] == 2
    async with Client(host, "no_such", retries=0) as client:
        with pytest.raises(CallError, match="has no no_such"):
            await client.call()
    async with Client(host, "last", retries=0) as client:
        with pytest.raises(CallError, match="there is no function 'os:system' here"):
            await client.caller.call(msgspec.structs.replace(client.request(), function="os:system"))


@on_the_hosts_loop
async def test_one_crash_costs_one_call(host: LocalFunctions, tmp_path: Path) -> None:
    async with Client(host, "crashes", retries=5) as client:
        replies = await asyncio.gather(*(client.call(id, marks=str(tmp_path)) for id in range(6)))
        assert [reply.results[0].score for reply in replies] == [1.0] * 6
        assert client.stats.counts["failed_infrastructure"] == 6
        assert (await stats_of(host, "crashes"))["crashes"] == 6


@on_the_hosts_loop
async def test_an_abort_cancels_the_call_where_it_runs(host: LocalFunctions, tmp_path: Path) -> None:
    async with Client(host, "sleeps") as client:
        calls = [asyncio.ensure_future(client.call(id, marks=str(tmp_path))) for id in range(3)]
        await until(host, "sleeps", running=3)
        calls[1].cancel()
        await until(host, "sleeps", running=2)
        assert [path.name for path in tmp_path.iterdir()] == ["cancelled-1"]
        assert (await stats_of(host, "sleeps"))["crashes"] == 0, "the others in its instance go on"
        for call in calls:
            call.cancel()
        await until(host, "sleeps", running=0, instances=0)
    async with Client(host, "blocks") as client:  # which can only be killed
        call = asyncio.ensure_future(client.call())
        before = (await until(host, "blocks", running=1))["killed"]
        call.cancel()
        await until(host, "blocks", instances=0, killed=before + 1)


@on_the_hosts_loop
async def test_a_call_without_end_and_one_without_measure_cost_themselves(host: LocalFunctions) -> None:
    async with Client(host, "blocks", timeout_s=0.3, retries=0) as client:
        with pytest.raises(CallError) as failed:
            await client.call()
        assert failed.value.kind is FailureKind.TIMEOUT
        await until(host, "blocks", instances=0)
    async with Client(host, "hoards") as client:
        assert (await client.call(mib=16)).results[0].score == 1.0
        assert "MemoryError" in (await client.call(mib=2000)).results[0].error
    async with Client(host, "Judge.grade") as client:
        assert (await client.call()).results[0].score == 1.0


@on_the_hosts_loop
async def test_a_call_that_is_made_twice_is_answered_from_memory(host: LocalFunctions) -> None:
    async with Client(host, "where") as client:
        request = client.request()
        first = await client.caller.call(request)
        calls = (await stats_of(host, "where"))["calls"]
        assert (await client.caller.call(request)).results == first.results
        assert (await stats_of(host, "where"))["calls"] == calls


@on_the_hosts_loop
async def test_callers_must_know_the_token(host: LocalFunctions) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("call", "stats"):
            ask = session.post if path == "call" else session.get
            async with ask(f"{host.address}/{path}", headers={"Authorization": "Bearer no"}) as got:
                assert got.status == 401


@on_the_hosts_loop
async def test_a_host_that_dies_is_started_again_and_its_calls_too(host: LocalFunctions) -> None:
    async with Client(host, "blocks", retries=20) as client:
        call = asyncio.ensure_future(client.call(7, seconds=0.3))
        await until(host, "blocks", running=1)
        assert host._process is not None
        family = psutil.Process(host._process.pid).children(recursive=True)
        host._process.kill()
        assert (await call).results[0].score == 7.0
        assert host.restarts == 1
        _, left = await asyncio.to_thread(psutil.wait_procs, family, 5)
        assert left == [], "templates and instances end with their host"


def test_scaling_pays_for_what_is_used() -> None:
    means, limits = Means(busy_s=0.1, cold_s=0.02, calls=1, starts=1), Limits(most=16)

    def load(waiting: int, running: int, instances: int) -> int:
        return further(Load(waiting=waiting, running=running, instances=instances), limits, means)

    assert load(0, 0, 0) == 0
    assert load(1, 0, 0) == 1
    assert load(2, 1, 1) == 1, "more than eight starts' worth of work"
    assert load(1, 1, 1) == 0
    assert load(1000, 0, 0) == 16
    assert load(1000, 16, 16) == 0
    assert further(Load(waiting=0, running=0, instances=0), Limits(least=2), means) == 2
    assert patience_s(limits, means, 0) == 0.02 and patience_s(Limits(idle_s=3.0), means, 0) == 3.0
    for second in range(20):
        means.arrived(second * 0.015)
    assert patience_s(limits, means, 0) == 0.02
    assert patience_s(limits, means, 1) == 0.005, "the second one's next call is twice as far"


def test_the_command_line_serves_ends_with_its_parent_and_tells_mistakes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollart.workers", "functions"]
    for words, said in (
        ([], "there is no function to serve"),
        (["nothing"], "'nothing' is no import path"),
        (["m:f", "--host", "0.0.0.0"], "set ROLLART_FUNCTIONS_TOKEN"),
        (["m:f", "--max-instances", "0"], "--max-instances is 0; it must be at least 1"),
        (["tests.reward_functions:lst"], "has no lst; did you mean last?"),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    address = tmp_path / "address"
    served = [*command, "tests.reward_functions:last", "--address-file", str(address), "--min-instances", "1"]
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os, subprocess; subprocess.run({served!r} + ['--parent', str(os.getpid())])",
        ]
    )
    deadline = time.monotonic() + 60
    while not address.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(parent.pid).children(recursive=True)
    assert family
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, left = psutil.wait_procs(family, 10)
    assert left == []
