"""Replays a trace of reward calls against the local function host, by the controller's own client, over HTTP."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.parts.measure import percentile
from benchmarks.parts.report import Row
from rollart.config.rewards import Reward
from rollart.controller.reward_backends import backends
from rollart.controller.reward_calls import Caller, Stats
from rollart.launch.functions import LocalFunctions
from rollart.rewards import EnvironmentView, TrajectoryView
from rollart.rewards.payload import Reply, Request

__all__ = ["Trace", "fan_in", "replay"]


class Trace(msgspec.Struct, frozen=True):
    """Steps of a run: trajectories end during the rollout, most of them near its end, and are scored at once."""

    steps: int
    calls: int
    """A step's."""
    rollout_s: float
    train_s: float
    burst: float = 0.75
    """Share of the calls that come in the last tenth of the rollout."""
    median_s: float = 0.1
    sigma: float = 0.8
    longest_s: float = 1.0
    """A call takes a log-normal time."""
    seed: int = 0

    def step(self, number: int) -> list[tuple[float, float]]:
        """(seconds after the step's begin, seconds that the call takes)."""
        rng = random.Random(f"{self.seed} {number}")
        calls = []
        for _ in range(self.calls):
            at = rng.uniform(0.9, 1.0) if rng.random() < self.burst else rng.uniform(0.2, 0.9)
            seconds = min(self.median_s * 2.718281828 ** rng.gauss(0, self.sigma), self.longest_s)
            calls.append((at * self.rollout_s, seconds))
        return sorted(calls)


class Client:
    """The controller's calls to one function of a host that runs here."""

    def __init__(self, host: LocalFunctions, reward: Reward) -> None:
        self.stats = Stats()
        self.host = host
        make = backends(local=lambda: host.address, local_token=host.token)
        self.caller = Caller(reward, make(reward), random.Random(0), self.stats)
        self._count = 0

    async def call(self, seconds: float) -> Reply:
        self._count += 1
        view = TrajectoryView(
            id=self._count, task="T", seed=0, split="train", environment=EnvironmentView(reward=seconds)
        )
        function = self.caller.reward.function or ""
        return await self.caller.call(
            Request(key=f"c{self._count}", function=function, deadline_s=60.0, trajectories=[view])
        )

    async def host_stats(self) -> dict[str, Any]:
        """What the host says of the function."""
        headers = {"Authorization": f"Bearer {self.host.token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.host.address}/stats", headers=headers) as got,
        ):
            return dict((await got.json())[self.caller.reward.function])


class Hosted:
    """A host with one function, for a while."""

    def __init__(self, name: str, **settings: Any) -> None:
        raw = {
            "function": f"benchmarks.parts.reward_functions:{name}",
            "url": "local",
            "timeout_s": 60.0,
            **settings,
        }
        self._reward = msgspec.convert(raw, Reward)
        self._folder = tempfile.TemporaryDirectory(prefix="rollart-benchmark-")

    async def __aenter__(self) -> Client:
        folder = Path(self._folder.name)
        self._host = LocalFunctions([self._reward], folder, folder)
        await self._host.start()
        self._client = Client(self._host, self._reward)
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.caller.close()
        await self._host.stop()
        self._folder.cleanup()


async def replay(trace: Trace, *, workers: int, warm: bool) -> Row:
    """The trace against ``workers`` warm workers, or against as many elastic instances at most."""
    settings = {"max_instances": workers, **({"min_instances": workers} if warm else {})}
    latencies: list[float] = []
    steps: list[float] = []
    async with Hosted("waits", **settings) as client:
        await client.call(0.0)  # whoever imports the function first
        while warm and (await client.host_stats())["instances"] < workers:
            await asyncio.sleep(0.05)
        while not warm and (await client.host_stats())["instances"]:
            await asyncio.sleep(0.05)
        before = await client.host_stats()
        for number in range(trace.steps):
            started = time.perf_counter()

            async def scored(at: float, seconds: float) -> None:
                await asyncio.sleep(at)
                asked = time.perf_counter()
                await client.call(seconds)
                latencies.append(time.perf_counter() - asked)

            await asyncio.gather(*(scored(at, seconds) for at, seconds in trace.step(number)))
            await asyncio.sleep(trace.train_s)
            steps.append(time.perf_counter() - started)
        while not warm and (await client.host_stats())["instances"]:
            await asyncio.sleep(0.01)
        after = await client.host_stats()
    paid_s, busy_s = after["paid_s"] - before["paid_s"], after["busy_s"] - before["busy_s"]
    return {
        "workers": workers,
        "warm": warm,
        "calls": len(latencies),
        "paid_s": paid_s,
        "busy_s": busy_s,
        "busy_share": busy_s / paid_s,
        "step_s": sum(steps) / len(steps),
        "latency_p50_s": percentile(latencies, 0.5),
        "latency_p99_s": percentile(latencies, 0.99),
        "cold_starts": after["cold_starts"] - before["cold_starts"],
        "cold_start_s": after["mean_cold_start_s"],
    }


async def fan_in(counts: list[int], *, workers: int) -> list[Row]:
    """So many calls at the same time, of a function that does nothing."""
    rows = []
    async with Hosted("instant", max_instances=workers, idle_s=5.0) as client:
        await asyncio.gather(*(client.call(0.0) for _ in range(500)))
        for count in counts:
            started = time.perf_counter()
            replies = await asyncio.gather(*(client.call(0.0) for _ in range(count)))
            seconds = time.perf_counter() - started
            right = sum(reply.results[0].score is not None for reply in replies)
            rows.append(
                {
                    "concurrent": count,
                    "seconds": seconds,
                    "scored": right,
                    "us_per_call": seconds / count * 1e6,
                }
            )
    return rows
