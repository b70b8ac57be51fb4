"""Simulated engines behind the shipping routing and admission control, in virtual time, for ``benchmarks.routing``.

Trajectories of the paper's workload families take turns; the places are those of ``rollart.controller.engines``, the
choice that of ``rollart.controller.routing``, or a simpler one to compare with.  A turn that has no answer
``DEADLINE_S`` after it was sent is given up and asked again, as the controller does it.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks.parts.report import Row
from rollart.controller.affinity import Order
from rollart.controller.engines import Demand, Engine, Engines, Seat, Seats
from rollart.controller.routing import NO_BOUND, Candidate, Prefix, Wish
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.hardware import HARDWARE, MODELS
from rollart.simulation.loop import VirtualLoop
from rollart.simulation.workload import FAMILIES, Episode

__all__ = ["POLICIES", "Case", "measure"]

POLICIES = ("round robin", "least loaded", "rollart")
DEADLINE_S = 600.0
"""``inference.generate_timeout_s`` by default."""
CONTEXT = 32768
CLASS = "H800"


class Case(msgspec.Struct, frozen=True):
    """One run."""

    policy: str
    family: str
    live: int
    turns: int
    """It ends after so many."""
    engines: int = 8
    most_tokens: int = NO_BOUND
    """``inference.max_tokens_in_flight``."""
    seed: int = 0


class _RoundRobin(Engines):
    """The next worker for the next request, whatever it has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._next = itertools.count()

    def _find(self, demand: Demand) -> Seats | None:
        names = sorted(self.by_name)
        return Seats(Seat(self.by_name[names[next(self._next) % len(names)]], demand.wish.load))


class _Server:
    """A simulated engine that tells each request's end."""

    def __init__(self, costs: EngineCosts) -> None:
        self.engine = BatchingEngine(costs, max_requests=1024)
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self, id: int, key: str, prompt: int, tokens: int) -> int:
        """Tokens of the prompt that were in the cache; ``TimeoutError`` when it takes too long."""
        loop = asyncio.get_running_loop()
        future = self._waiting[id] = loop.create_future()
        self.engine.submit(loop.time(), id, key, prompt, tokens)
        self._arm()
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await future
        except TimeoutError:
            self.engine.cancel(loop.time(), id)
            self._arm()
            raise
        finally:
            del self._waiting[id]

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_event()
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._advance)

    def _advance(self) -> None:
        for finished in self.engine.advance(asyncio.get_running_loop().time()):
            if finished.id in self._waiting and not self._waiting[finished.id].done():
                self._waiting[finished.id].set_result(finished.cached)
        self._arm()


class _Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        costs = EngineCosts(HARDWARE[CLASS], MODELS["Qwen3-8B"])
        kind = _RoundRobin if case.policy == "round robin" else Engines
        self.engines = kind(lowest_version=lambda: 0)
        self.servers: dict[str, _Server] = {}
        for number in range(case.engines):
            name = f"inference-{number}"
            link: Any = SimpleNamespace(name=name)
            candidate = Candidate(name, 0, 0, hardware=CLASS, most_tokens=case.most_tokens)
            engine = Engine(link, candidate)
            self.engines.add(engine)
            self.engines.set_open(engine, open=True)
            self.servers[name] = _Server(costs)
        self.order = Order((CLASS,))
        self.ids = itertools.count(1)
        self.latencies: deque[tuple[float, int, int, int]] = deque()
        """Of each turn: seconds, prompt tokens, cached tokens, answer tokens."""
        self.most_waiting = self.given_up = 0
        self.ended = asyncio.Event()

    async def main(self) -> Row:
        loop = asyncio.get_running_loop()
        owners = [asyncio.ensure_future(self._live(number)) for number in range(self.case.live)]
        await self.ended.wait()
        seconds = loop.time()
        for owner in owners:
            owner.cancel()
        await asyncio.gather(*owners, return_exceptions=True)
        return self._row(seconds)

    async def _live(self, number: int) -> None:
        """One trajectory after the other."""
        family = FAMILIES[self.case.family]
        for episode_number in itertools.count():
            session = f"{number}.{episode_number}"
            episode = Episode("t", family, hash((self.case.seed, number, episode_number)), session)
            await asyncio.sleep(episode.reset_s())
            tokens, prefix = episode.observation(), None
            while not episode.done and tokens < CONTEXT // 2:
                answer = min(episode.answer(), CONTEXT // 2)
                prefix = await self._turn(session, tokens, answer, prefix)
                episode.steps += 1
                await asyncio.sleep(episode.step_s())
                tokens += answer + episode.observation()

    async def _turn(self, session: str, prompt: int, answer: int, prefix: Prefix | None) -> Prefix:
        began = asyncio.get_running_loop().time()
        while True:
            kept = prefix if self.case.policy == "rollart" else None
            demand = Demand(
                self.order, Wish(0, prompt, prompt + answer, kept), newest=0, bounded=True, split=False
            )
            self.most_waiting = max(self.most_waiting, self.engines.waiting)
            seats = await self.engines.seat(demand)
            name = seats.main.engine.link.name
            try:
                cached = await self.servers[name].answer(next(self.ids), session, prompt, answer)
                break
            except TimeoutError:
                self.given_up += 1
            finally:
                self.engines.free(seats)
        self.latencies.append((asyncio.get_running_loop().time() - began, prompt, cached, answer))
        if len(self.latencies) >= self.case.turns:
            self.ended.set()
        return Prefix(name, 0, prompt + answer)

    def _row(self, seconds: float) -> Row:
        counted = list(self.latencies)[len(self.latencies) // 4 :]  # the caches fill first
        took = [row[0] for row in counted]
        cuts = statistics.quantiles(took, n=100)
        return {
            **msgspec.structs.asdict(self.case),
            "seconds": seconds,
            "hit_share": sum(row[2] for row in counted) / sum(row[1] for row in counted),
            "p50_s": cuts[49],
            "p99_s": cuts[98],
            "tokens_per_s": sum(row[3] for row in self.latencies) / seconds,
            "preemptions": sum(server.engine.preemptions for server in self.servers.values()),
            "given_up": self.given_up,
            "most_waiting": self.most_waiting,
        }


def measure(case: Case) -> Row:
    """The figures of one run, the same each time."""
    loop = VirtualLoop(shuffle=None, end_at=1e7)  # type: ignore[abstract]  # no sockets, no processes
    try:

        async def main() -> Row:
            return await _Run(case).main()

        return loop.run_until_complete(main())
    finally:
        loop.close()
