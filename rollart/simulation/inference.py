"""A simulated inference worker: the real worker base around a ``BatchingEngine``.

It keeps the real worker's promises: nothing is served before the first ``Update``, requests in flight go on
after an update with what they have, and answers that finish before ``Resume`` are held back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollart.packing import ID_BYTES, unpack_ids
from rollart.protocol import (
    Done,
    Generate,
    Generated,
    Message,
    Progress,
    Pull,
    Pulled,
    Ready,
    Release,
    Resume,
    Role,
    Suspend,
    ToWorker,
    Update,
    Updated,
    VersionRun,
)
from rollart.simulation.engine import BatchingEngine, Finished
from rollart.simulation.hardware import INFINIBAND_400
from rollart.simulation.truth import FIRST_SAMPLED
from rollart.simulation.world import LOGPROB, World, canary_logprobs
from rollart.workers.dialer import Dialer
from rollart.workers.worker import Deterministic, Lost, Worker

__all__ = ["SimInference"]


class _Handover(msgspec.Struct, array_like=True):
    """Of the keys and values of a prompt: what computed them, and how many."""

    version: int
    tokens: int


class _Request:
    """One answer in the making."""

    __slots__ = ("finished", "greedy", "ids", "session", "version", "versions", "wanted")

    def __init__(
        self, session: str, wanted: int, finished: asyncio.Future[Finished], *, greedy: bool
    ) -> None:
        self.session = session
        self.greedy = greedy
        self.ids = b""
        """Reported already."""
        self.wanted = wanted
        self.finished = finished
        self.versions: list[VersionRun] = []
        """Of the tokens sampled before the last update."""
        self.version = -1
        """What the engine ran when the answer was complete."""


class SimInference(Worker):
    """Serves ``Generate``, ``Pull``, ``Suspend``, ``Update`` and ``Resume``."""

    role: ClassVar[Role] = Role.INFERENCE

    def __init__(
        self, dialer: Dialer, *, name: str, hardware_class: str, world: World, engine: BatchingEngine
    ) -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self.engine = engine
        self.version = -1
        """What it runs."""
        self._world = world
        self._pulled = -1
        self._suspended = False
        self._threads = world.sharing.engine_threads if world.sharing else 1
        self._requests: dict[int, _Request] = {}
        self._released = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._reporting: asyncio.Future[None] | None = None

    async def setup(self) -> Ready:
        """Start the engine."""
        await asyncio.sleep(self._world.timings.start_s)
        if self._world.truth is not None:  # without it nobody looks at the tokens
            self._reporting = asyncio.ensure_future(self._report())
        return Ready(self.config.inference.max_num_seqs, {})

    async def teardown(self) -> None:
        """Stop the engine."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        if self._world.host is not None:
            self._world.host.leave(self.name)

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request."""
        ailments, timings = self._world.of(self.name), self._world.timings
        match message:
            case Generate():
                return await self._generate(message)
            case Pull(seq=seq, version=version, manifest=reference):
                await asyncio.sleep(timings.pull_s * ailments.slowdown)
                if ailments.lost_buckets:
                    ailments.lost_buckets -= 1
                    self._world.lost.add(reference)
                if reference in self._world.lost:
                    raise Lost(f"a bucket of {reference} is not in the store")
                self._pulled = max(self._pulled, version)
                return Pulled(seq, 0)
            case Suspend(seq=seq):
                self._suspended = True
                still_at = self.engine.suspend(self._now())
                self._arm()
                await asyncio.sleep(max(0.0, still_at - self._now()))
                return Done(seq)
            case Update():
                return await self._update(message)
            case Resume(seq=seq):
                if self._suspended:
                    self._go_on()
                self._released.set()
                return Done(seq)
            case Release():
                return None
        raise Deterministic(f"an inference worker does not serve {type(message).__name__}")

    # --- requests -------------------------------------------------------------------------------------

    async def _generate(self, message: Generate) -> Generated:
        if self.version < 0:
            raise RuntimeError(f"{self.name} has no weights yet")
        ailments = self._world.of(self.name)
        if ailments.failing_requests:
            ailments.failing_requests -= 1
            raise RuntimeError("the engine failed")
        session = message.request_id.rsplit(".", 2)[0]
        if message.kv:
            await self._fetch(message, session)
        if self._world.truth is not None:
            self._world.truth.check_prompt(session, message.prompt)
        wanted = _wanted(message.prompt)
        count = min(max(1, wanted), message.max_tokens)
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        request = self._requests[message.seq] = _Request(
            session, count, future, greedy=not message.temperature
        )
        self.engine.slowdown = ailments.slowdown
        self.engine.submit(self._now(), message.seq, session, len(message.prompt) // ID_BYTES, count)
        self._arm()
        try:
            finished = await future
        except asyncio.CancelledError:
            self.engine.cancel(self._now(), message.seq)
            self._arm()
            raise
        finally:
            del self._requests[message.seq]
        while not self._released.is_set():
            await self._released.wait()
        return self._generated(message, request, finished)

    async def _fetch(self, message: Generate, session: str) -> None:
        """The keys and values of a prompt that another worker computed; ``Lost`` when they are of another version."""
        made = msgspec.msgpack.decode(message.kv, type=_Handover)
        tokens = len(message.prompt) // ID_BYTES
        for wait_s in (0.0, tokens * self._transfer_s):
            await asyncio.sleep(wait_s)
            if self._suspended or not self._released.is_set() or message.kv_version != self.version:
                raise Lost(f"{self.name} serves version {self.version}, not {message.kv_version}")
        if (made.version, made.tokens) != (message.kv_version, tokens):
            self._world.violations.append(
                f"{message.request_id}: keys and values of {made} for {tokens} tokens"
            )
        self.engine.deposit(self._now(), session, tokens)

    @property
    def _transfer_s(self) -> float:
        """Seconds a token, between two machines of a cluster."""
        model = getattr(self.engine.costs, "model", None)
        return 0.0 if model is None else INFINIBAND_400.seconds(model.kv_bytes_per_token)

    def _generated(self, message: Generate, request: _Request, finished: Finished) -> Generated:
        rest = finished.tokens - sum(run.count for run in request.versions)
        versions = [*request.versions, *([VersionRun(request.version, rest)] if rest else [])]
        truth = self._world.truth
        ids = bytes(ID_BYTES * finished.tokens)
        if truth:
            ids = request.ids + truth.sample(request.session, _after(versions, len(request.ids) // ID_BYTES))
        logprobs = LOGPROB * finished.tokens if message.temperature else b""
        reason = "stop" if finished.tokens == request.wanted else "length"
        kv = b""
        if message.prefill:
            kv = msgspec.msgpack.encode(_Handover(versions[-1].version, len(message.prompt) // ID_BYTES))
        return Generated(message.seq, ids, logprobs, versions, reason, finished.cached, kv)

    async def _report(self) -> None:
        """Tell how far answers are, as the real worker does: from time to time, of verified weights only."""
        while True:
            await asyncio.sleep(self.config.inference.progress_every_s)
            if not self._suspended and self._released.is_set():
                for seq, request in self._requests.items():
                    if not request.finished.done():
                        self._tell(seq, request)

    def _tell(self, seq: int, request: _Request) -> None:
        told, truth = len(request.ids) // ID_BYTES, self._world.truth
        sampled = self.engine.sampled(seq)
        if sampled <= told or truth is None:
            return
        rest = sampled - sum(run.count for run in request.versions)
        versions = _after([*request.versions, *([VersionRun(self.version, rest)] if rest else [])], told)
        ids = truth.sample(request.session, versions)
        request.ids += ids
        logprobs = b"" if request.greedy else LOGPROB * (sampled - told)
        self._say_data.add(Progress(seq, ids, logprobs, versions))

    async def _update(self, message: Update) -> Updated:
        if not self._suspended:
            raise Deterministic(f"{self.name} is not suspended")
        if self._pulled < message.version:
            raise Deterministic(f"{self.name} has not pulled version {message.version}")
        self._released.clear()
        ailments = self._world.of(self.name)
        await self._world.compute(
            f"{self.name}/load", self._world.timings.load_s * ailments.slowdown, self._threads
        )
        self._advance()  # what was complete when the engine came to rest is the old version's
        if not ailments.keeps_old_weights:
            for seq, request in self._requests.items():
                if request.finished.done():
                    continue
                before = self.engine.sampled(seq) - sum(run.count for run in request.versions)
                if before:
                    request.versions.append(VersionRun(self.version, before))
            self.version = message.version
        self.engine.drop_caches(self._now())
        self._go_on()
        return Updated(message.seq, message.version, canary_logprobs(self.version, message.canary), 0.0)

    # --- the engine's time ----------------------------------------------------------------------------

    def _go_on(self) -> None:
        self._suspended = False
        self.engine.resume(self._now())
        self._arm()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _arm(self) -> None:
        """Wake when the engine has something to tell."""
        if self._timer is not None:
            self._timer.cancel()
        at = self.engine.next_event()
        if self._world.host is not None:
            if at is None:
                self._world.host.leave(self.name)
            else:
                self._world.host.enter(self.name, self._threads)
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._advance)

    def _advance(self) -> None:
        for finished in self.engine.advance(self._now()):
            request = self._requests.get(finished.id)
            if request is not None and not request.finished.done():
                request.version = self.version
                request.finished.set_result(finished)
        self._arm()


def _wanted(prompt: bytes) -> int:
    """Tokens that the answer to ``prompt`` has: its last observed token says it; what is sampled already counts."""
    (last,) = unpack_ids(prompt[-ID_BYTES:])
    if last < FIRST_SAMPLED:
        return last
    ids = unpack_ids(prompt)
    sampled = next(n for n, id in enumerate(reversed(ids)) if id < FIRST_SAMPLED)
    return ids[-1 - sampled] - sampled


def _after(versions: list[VersionRun], count: int) -> list[VersionRun]:
    """The runs without their first ``count`` tokens."""
    found = []
    for run in versions:
        left = max(0, run.count - count)
        count -= run.count - left
        if left:
            found.append(VersionRun(run.version, left))
    return found
