"""Calls to one reward function: places, attempts, hedges, a circuit breaker.  No sockets, no wall clock.

How a call travels is a ``Backend``'s business (``reward_backends.py``).  Failures are classified there:
infrastructure failures and timeouts are tried again, what the function itself did wrong is not.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from typing import Protocol

import msgspec

from rollart.config.rewards import OnFailure, Reward
from rollart.rewards.payload import Reply, Request

__all__ = ["Backend", "CallError", "Caller", "FailureKind", "Stats"]

TIMEOUT_S, RETRIES, CONCURRENCY, RETRY_FOR_S = 30.0, 5, 512, 600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Before the second attempt, and at most before any: each pause is twice the one before, half of it by chance."""
OPENS_AFTER = 16
"""Infrastructure failures in a row that open the circuit."""
OPEN_S, OPEN_AT_MOST_S = 1.0, 30.0


class FailureKind(enum.StrEnum):
    """Why a call gave no score."""

    INFRASTRUCTURE = "infrastructure"
    """The way there, the endpoint or its machine: it may succeed another time."""
    TIMEOUT = "timeout"
    """No answer in time: as infrastructure."""
    CIRCUIT_OPEN = "circuit_open"
    """Not even tried, since the calls before failed in a row: as infrastructure."""
    ERROR = "error"
    """The function raised, or the endpoint refused the request: it would again."""
    REFUSED = "refused"
    """What came back is no score (NaN, infinity, a wrong number of results)."""

    @property
    def again(self) -> bool:
        """Another attempt may succeed."""
        return self not in (FailureKind.ERROR, FailureKind.REFUSED)


class CallError(Exception):
    """A call failed."""

    def __init__(self, kind: FailureKind, message: str, *, pause_s: float = 0.0) -> None:
        """``pause_s`` is how long the endpoint asks to be left alone."""
        super().__init__(message)
        self.kind = kind
        self.pause_s = pause_s


class Backend(Protocol):
    """How calls reach a function."""

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        """One attempt; ``CallError`` when there is no reply.  To cancel it stops it wherever it runs."""

    async def close(self) -> None:
        """Let go of connections, threads and the like."""


class Stats(msgspec.Struct):
    """Counts of one task since they were last taken."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    latencies_s: list[float] = msgspec.field(default_factory=list)
    """From the wish to the score, all waiting included."""
    busy_s: float = 0.0
    parts: dict[str, list[float]] = msgspec.field(default_factory=dict)

    def add_part(self, name: str, value: float) -> None:
        """Something that scores are made of."""
        self.parts.setdefault(name, []).append(value)


class _Breaker:
    """Lets nothing through for a while after failures in a row, then one call, then all again."""

    def __init__(self) -> None:
        self.failures = 0
        self.cause = ""
        self._open_until = 0.0
        self._open_s = OPEN_S
        self._probing = False

    def enter(self, now: float) -> bool:
        """Whether a call may go out; one that probes is the only one until it ends."""
        if self.failures < OPENS_AFTER:
            return True
        if now < self._open_until or self._probing:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A call reached its function."""
        self.failures, self._open_s, self._probing = 0, OPEN_S, False

    def failed(self, now: float, cause: str) -> None:
        """A call did not."""
        self.failures += 1
        self.cause = cause
        self._probing = False
        if self.failures >= OPENS_AFTER:
            self._open_until = now + self._open_s
            self._open_s = min(2 * self._open_s, OPEN_AT_MOST_S)

    def left(self) -> None:
        """A call was cancelled: nothing is known of it."""
        self._probing = False


class Caller:
    """The calls to one function of one task."""

    def __init__(self, reward: Reward, backend: Backend, rng: random.Random, stats: Stats) -> None:
        self.reward = reward
        self._backend = backend
        self._rng = rng
        self.stats = self._stats = stats
        self._places = asyncio.Semaphore(reward.concurrency or CONCURRENCY)
        self._breaker = _Breaker()
        self._timeout_s = reward.timeout_s or TIMEOUT_S
        self._retries = RETRIES if reward.retries is None else reward.retries

    @property
    def timeout_s(self) -> float:
        """Of one attempt."""
        return self._timeout_s

    async def call(self, request: Request) -> Reply:
        """The reply, after as many attempts as it takes and may take; ``CallError`` of the last one."""
        loop = asyncio.get_running_loop()
        patience_s = self.reward.retry_for_s or RETRY_FOR_S
        give_up_at = loop.time() + patience_s if self.reward.on_failure is OnFailure.RETRY else 0.0
        attempt = 0
        while True:
            try:
                reply = await self._attempt(request)
            except CallError as error:
                self._stats.counts[f"failed_{error.kind}"] += 1
                pause_s = max(self._pause(attempt), error.pause_s)
                tries_left = attempt < self._retries or loop.time() + pause_s < give_up_at
                if not error.kind.again or not tries_left:
                    raise
                attempt += 1
                self._stats.counts["retried"] += 1
                await asyncio.sleep(pause_s)
                continue
            meter = reply.meter
            self._stats.busy_s += meter.busy_s
            self._stats.counts["cold_starts"] += meter.cold_start_s > 0
            return reply

    def _pause(self, attempt: int) -> float:
        full = min(FIRST_PAUSE_S * 2.0 ** min(attempt, 32), LONGEST_PAUSE_S)
        return full * (0.5 + 0.5 * self._rng.random())

    async def _attempt(self, request: Request) -> Reply:
        """One attempt, in its place; ``CallError`` when it fails."""
        async with self._places:
            breaker, loop = self._breaker, asyncio.get_running_loop()
            if not breaker.enter(loop.time()):
                raise CallError(
                    FailureKind.CIRCUIT_OPEN,
                    f"not called, since {breaker.failures} calls in a row failed; the last: {breaker.cause}",
                )
            self._stats.counts["calls"] += 1
            told = False
            try:
                reply = await self._hedged(request)
                told = True
                breaker.succeeded()
                return reply
            except CallError as error:
                told = True
                if error.kind.again:
                    breaker.failed(loop.time(), str(error))
                else:
                    breaker.succeeded()
                raise
            finally:
                if not told:
                    breaker.left()

    async def _hedged(self, request: Request) -> Reply:
        """The first answer of one call or, when it is slow, of two."""
        after_s = self.reward.hedge_after_s
        if after_s is None:
            return await self._in_time(request)
        loop = asyncio.get_running_loop()
        calls = {loop.create_task(self._in_time(request), name=f"reward {request.key}")}
        error: CallError | None = None
        try:
            done, _ = await asyncio.wait(calls, timeout=after_s)
            if not done:
                self._stats.counts["hedged"] += 1
                calls.add(loop.create_task(self._in_time(request), name=f"reward {request.key} hedge"))
            while calls:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    try:
                        return call.result()
                    except CallError as failed:
                        error = failed
            assert error is not None
            raise error
        finally:
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)

    async def _in_time(self, request: Request) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._backend.call(request, timeout_s=self._timeout_s)
        except TimeoutError:
            raise CallError(FailureKind.TIMEOUT, f"no answer within timeout_s={self._timeout_s:g}") from None

    async def close(self) -> None:
        """Let go of what the backend holds."""
        await self._backend.close()
