"""LLMProxy: puts each generation request, trajectory by trajectory, on an inference worker.

A request goes only to a worker that is open and has acknowledged a version inside the staleness bound, and
never to one below its trajectory's newest token (I7).  A worker is closed from the moment it is told to
suspend until its new weights are verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollart.config import Config
from rollart.controller.routing import Candidate, choose
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trajectory import Kind, Trajectory
from rollart.packing import ID_BYTES, count_unsound, pack_ids
from rollart.protocol import FailureKind, Generate, Generated

__all__ = ["Answer", "Engine", "LLMProxy"]


class Engine:
    """What the proxy knows of an inference worker."""

    __slots__ = ("candidate", "link", "open", "requests")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.open = False
        """Requests may be sent."""
        self.requests = 0
        self.candidate = Candidate(link.name, -1, 0)

    @property
    def version(self) -> int:
        """What it has acknowledged; -1 before its first weights."""
        return self.candidate.version


class Answer:
    """One turn's answer, checked, and where it came from."""

    __slots__ = ("generated", "routed_version", "worker")

    def __init__(self, generated: Generated, worker: str, routed_version: int) -> None:
        self.generated = generated
        self.worker = worker
        self.routed_version = routed_version


class LLMProxy:
    """The inference workers of a run, as one."""

    def __init__(
        self, switchboard: Switchboard, config: Config, *, lowest_version: Callable[[], int]
    ) -> None:
        """``lowest_version()`` is what the staleness bound still admits."""
        self.engines: dict[str, Engine] = {}
        self._open: list[Candidate] = []
        """Of the engines, those that requests may be sent to."""
        self.refused_answers = 0
        """Answers that could not be true."""
        self._switchboard = switchboard
        self._inference = config.inference
        self._retries = config.rollout.retries
        self._samplings = {task.name: config.sampling_of(task) for task in config.tasks}
        self._allowed = {name: _packed(each.allowed_token_ids) for name, each in self._samplings.items()}
        self._stops = {name: _packed(each.stop_token_ids) for name, each in self._samplings.items()}
        self._lowest_version = lowest_version
        self._previous: dict[int, str] = {}
        self._changed: asyncio.Future[None] | None = None
        self.waiting = 0
        """Requests that wait for a worker they may use."""

    # --- the workers ----------------------------------------------------------------------------------

    def add(self, link: Link) -> Engine:
        """A worker joined; it stays closed until it has weights."""
        engine = self.engines[link.name] = Engine(link)
        self._list_open()
        return engine

    def remove(self, name: str) -> None:
        """A worker is lost or taken out."""
        self.engines.pop(name, None)
        self._list_open()
        self.changed()

    def open(self, engine: Engine, version: int) -> None:
        """The worker serves ``version``, verified."""
        engine.candidate.version = version
        engine.open = True
        self._list_open()
        self.changed()

    def close(self, engine: Engine) -> None:
        """No request may be sent to the worker from now on."""
        engine.open = False
        self._list_open()

    def close_worker(self, name: str) -> None:
        """As ``close``, by the worker's name, where it is an engine's."""
        engine = self.engines.get(name)
        if engine is not None:
            self.close(engine)

    def _list_open(self) -> None:
        self._open = [engine.candidate for engine in self.engines.values() if engine.open]

    def changed(self) -> None:
        """Something that routing depends on changed: waiting requests look again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    # --- requests -------------------------------------------------------------------------------------

    async def generate(self, trajectory: Trajectory) -> Answer:
        """The answer to the trajectory's next turn.

        Infrastructure failures are tried again, elsewhere if there is an elsewhere; ``CallError`` when that
        is of no use.
        """
        avoid: str | None = None
        for tries_left in range(self._retries, -1, -1):
            engine = self._choose(trajectory, avoid) or await self._wait_for_engine(trajectory, avoid)
            version, link = engine.version, engine.link
            greedy = trajectory.kind is Kind.EVAL
            max_tokens = min(trajectory.limits.max_tokens, trajectory.room)
            load = trajectory.tokens + max_tokens
            self._previous[trajectory.id] = link.name
            engine.requests += 1
            engine.candidate.tokens += load
            try:
                generated = await self._switchboard.call(
                    link,
                    self._request(trajectory, max_tokens, greedy=greedy),
                    Generated,
                    timeout_s=self._inference.generate_timeout_s,
                )
                self._check(generated, link, max_tokens, version, greedy=greedy)
                return Answer(generated, link.name, version)
            except CallError as error:
                if not error.retry or not tries_left:
                    raise
                avoid = link.name
            finally:
                engine.requests -= 1
                engine.candidate.tokens -= load
        raise AssertionError("unreachable")

    def _request(self, trajectory: Trajectory, max_tokens: int, *, greedy: bool) -> Generate:
        seq = self._switchboard.next_seq()
        sampling = self._samplings[trajectory.task]
        return Generate(
            seq=seq,
            request_id=f"{trajectory.session}.{trajectory.turns}.{seq}",
            prompt=bytes(trajectory.ids),
            max_tokens=max_tokens,
            temperature=0.0 if greedy else sampling.temperature,
            allowed_token_ids=self._allowed[trajectory.task],
            stop_token_ids=self._stops[trajectory.task],
            ignore_eos=sampling.ignore_eos,
            seed=None,
        )

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory needs no more answers."""
        self._previous.pop(trajectory.id, None)

    def _choose(self, trajectory: Trajectory, avoid: str | None) -> Engine | None:
        usable = self._open
        if avoid is not None:
            usable = [c for c in usable if c.name != avoid] or usable
        name = choose(
            usable,
            lowest_version=max(trajectory.newest, self._lowest(trajectory)),
            previous=self._previous.get(trajectory.id),
            prompt_tokens=trajectory.tokens,
        )
        return None if name is None else self.engines[name]

    async def _wait_for_engine(self, trajectory: Trajectory, avoid: str | None) -> Engine:
        while True:
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            self.waiting += 1
            try:
                await asyncio.shield(self._changed)
            finally:
                self.waiting -= 1
            engine = self._choose(trajectory, avoid)
            if engine is not None:
                return engine

    def _lowest(self, trajectory: Trajectory) -> int:
        """An evaluation is never trained on, so it is not bound by staleness."""
        return 0 if trajectory.kind is Kind.EVAL else self._lowest_version()

    def _check(self, generated: Generated, link: Link, max_tokens: int, routed: int, *, greedy: bool) -> None:
        """``CallError`` for an answer that can't be true."""
        wrong = _flaw(generated, max_tokens, routed, greedy=greedy)
        if wrong:
            self.refused_answers += 1
            raise CallError(FailureKind.INFRASTRUCTURE, f"{link.name} answered with {wrong}")


def _packed(ids: list[int | str]) -> bytes:
    return pack_ids(each for each in ids if isinstance(each, int))


def _flaw(generated: Generated, max_tokens: int, routed: int, *, greedy: bool) -> str:
    """What can't be true of an answer from a worker that acknowledged version ``routed``; empty when it can."""
    count, rest = divmod(len(generated.ids), ID_BYTES)
    if rest or not 1 <= count <= max_tokens:
        return f"{len(generated.ids)} bytes of ids for 1 to {max_tokens} tokens"
    if len(generated.logprobs) != (0 if greedy else ID_BYTES * count):
        return f"{len(generated.logprobs)} bytes of log-probabilities for {count} tokens"
    if count_unsound(generated.logprobs):
        return "a log-probability that is not finite and ≤ 0"
    before, counted = routed, 0
    for run in generated.versions:
        if run.version < before:
            last = f"a worker that acknowledged {routed}" if before == routed else f"version {before}"
            return f"tokens of version {run.version} after {last}"
        if run.count < 1:
            counted = -1
            break
        before, counted = run.version, counted + run.count
    if counted != count:
        return f"version runs {generated.versions} for {count} tokens"
    return ""
