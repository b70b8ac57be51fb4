"""WeightSync: weights from the trainer to every inference worker.

Each worker has a follower, a coroutine that pulls new versions in the background and swaps them in when the
gate allows: suspend, update, compare the canary, resume (the engine recomputes the caches of what is in
flight).  With ``update_at: publish`` the gate opens for a version as soon as it is published; with ``batch``
only when ``synchronize`` says so.  A worker that fails, is late or whose canary differs is taken out: it
never serves weights that were not verified.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import TypeVar

from rollart.config import Config, UpdateAt
from rollart.controller import events
from rollart.controller.llm_proxy import Engine, LLMProxy
from rollart.controller.pulls import Pulls
from rollart.controller.run_context import RunContext
from rollart.controller.staleness import Versions
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trainer_line import TrainerLine
from rollart.packing import pack_ids, unpack_floats
from rollart.protocol import (
    Collect,
    Done,
    Message,
    Resume,
    Shutdown,
    Suspend,
    Update,
    Updated,
)

__all__ = ["WeightSync", "canary_gap", "canary_prompt"]

logger = logging.getLogger(__name__)

CANARY_TOKENS = 32
Answer = TypeVar("Answer", bound=Message)


def canary_prompt(vocabulary_size: int, context_tokens: int) -> bytes:
    """int32 ids of a fixed prompt, drawn from the whole vocabulary; at most ``CANARY_TOKENS``."""
    draw = random.Random(vocabulary_size)
    count = min(CANARY_TOKENS, context_tokens - 1)
    return pack_ids(draw.randrange(vocabulary_size) for _ in range(count))


def canary_gap(trainer: bytes, engine: bytes) -> float:
    """Largest difference of two packed rows of log-probabilities; infinite when they don't match in length."""
    expected, found = unpack_floats(trainer), unpack_floats(engine)
    if len(expected) != len(found) or not expected:
        return float("inf")
    gap = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    return float("inf") if math.isnan(gap) else gap


class _Untrusted(Exception):
    """A worker does not serve what was published."""


class WeightSync:
    """The versions of a run and who serves which."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        proxy: LLMProxy,
        versions: Versions,
        *,
        canary: bytes,
        run: RunContext,
        trainer: TrainerLine,
        on_serving: Callable[[], None],
    ) -> None:
        """``canary`` is the prompt (int32 ids) that trainer and engines score for each version; ``on_serving``
        hears that ``versions.m`` or the set of serving workers changed."""
        self.newest = -1
        """The newest version in the store."""
        self.gate = -1
        """The newest version that workers may swap in."""
        self._config = config
        self._switchboard = switchboard
        self._proxy = proxy
        self._versions = versions
        self._run = run
        self._on_serving = on_serving
        self._trainer = trainer
        self._pulls = Pulls(
            config,
            switchboard,
            trainer,
            canary=canary,
            run=run,
            wanted=self._wanted,
            next_change=self._next_change,
        )
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._in_use: dict[str, int] = {}
        self._changed: asyncio.Future[None] | None = None
        self._timeout_s = config.inference.update_timeout_s
        self._canary = canary

    # --- the trainer's side ---------------------------------------------------------------------------

    async def publish(self, version: int) -> None:
        """Have the trainer put its current weights into the store as ``version``."""
        published = await self._pulls.publish(version)
        self.newest = max(self.newest, version)
        if self._config.rollout.update_at is UpdateAt.PUBLISH or self.gate < 0:
            self.gate = self.newest
        self._run.write(
            events.Published(self._run.clock(), version, published.size_bytes, published.blocked_s)
        )
        self._notify()
        await self._collect()

    async def _collect(self) -> None:
        """Let go of the versions that no worker needs any more."""
        below = min([self.gate, *self._in_use.values()])
        self._pulls.forget(below)
        seq = self._switchboard.next_seq
        try:
            await self._trainer.call(
                lambda link: Collect(seq(), below), Done, may_hang=False, timeout_s=self._timeout_s
            )
        except CallError as error:  # the next version's collection takes them along
            logger.warning("the weight store did not let go of versions below %d: %s", below, error)

    async def synchronize(self, version: int) -> None:
        """Bring every worker that serves to ``version``; the slow are taken out by their deadlines.

        Waits for the version's publication too.
        """
        while self.newest < version:
            await self._change()
        self.gate = max(self.gate, version)
        self._notify()
        while True:
            late = [e for e in self._proxy.engines.values() if 0 <= e.version < version]
            if not late:
                return
            await self._change()

    async def wait_for_serving(self, workers: int) -> None:
        """Wait until so many workers serve the gate's version."""
        while sum(e.open and e.version >= self.gate >= 0 for e in self._proxy.engines.values()) < workers:
            await self._change()

    # --- the workers' side ----------------------------------------------------------------------------

    def join(self, link: Link) -> None:
        """An inference worker is ready: it gets the gate's version, and then requests."""
        engine = self._proxy.add(link)
        task = asyncio.get_running_loop().create_task(self._follow(engine), name=f"weights of {link.name}")
        self._followers[link.name] = task

    def leave(self, link: Link) -> None:
        """An inference worker is gone."""
        self._proxy.remove(link.name)
        self._in_use.pop(link.name, None)
        task = self._followers.pop(link.name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._serving_changed()

    async def close(self) -> None:
        """Stop all followers."""
        tasks = list(self._followers.values())
        self._followers.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._pulls.close()

    async def _follow(self, engine: Engine) -> None:
        pulled, pull_s, superseded = -1, 0.0, False
        try:
            while True:
                wanted = self._wanted(engine)
                if wanted > pulled:
                    self._in_use[engine.link.name] = wanted  # it keeps the version in the store
                    # Not twice in a row: a pull that is slower than the publications would never end.
                    took_s = await self._pulls.pull(engine, wanted, to_the_end=superseded)
                    superseded = took_s is None
                    if took_s is not None:
                        pulled, pull_s = wanted, took_s
                elif engine.version < self.gate == pulled:
                    await self._swap(engine, pulled, pull_s)
                else:
                    await self._change()
        except (CallError, _Untrusted) as error:
            self._take_out(engine, str(error))
        except Exception as error:  # the boundary of a follower: a bug here stops the run, named
            self._run.bug(error)
        finally:
            self._in_use.pop(engine.link.name, None)

    def _wanted(self, engine: Engine) -> int:
        """The version that the worker needs next, or may need."""
        return self.gate if engine.version < self.gate else self.newest

    async def _swap(self, engine: Engine, version: int, pull_s: float) -> None:
        """Suspend, update, verify, resume."""
        seq, clock, before = self._switchboard.next_seq, self._run.clock, engine.version
        times = [clock()]
        self._proxy.close(engine)
        in_flight = engine.requests
        engine.link.data.flush()  # what was sent before the suspend leaves before it
        await self._call(engine, Suspend(seq()), Done)
        times.append(clock())
        updated = await self._call(engine, Update(seq(), version, self._canary), Updated)
        times.append(clock())
        gap = canary_gap(self._pulls.published[version].canary_logprobs, updated.canary_logprobs)
        tolerance = self._config.inference.tolerance
        if updated.version != version or gap > tolerance:
            raise _Untrusted(
                f"its canary differs by {gap:.3g} nats from the trainer's for version {version} "
                f"(tolerance {tolerance:g}): it does not serve the weights that were published"
            )
        await self._call(engine, Resume(seq()), Done)
        times.append(clock())
        self._in_use.pop(engine.link.name, None)
        self._proxy.open(engine, version)
        suspend_s, update_s, resume_s = (after - start for start, after in itertools.pairwise(times))
        self._run.write(
            events.Swapped(
                t=times[-1],
                worker=engine.link.name,
                before=before,
                version=version,
                pull_s=pull_s,
                suspend_s=suspend_s,
                update_s=update_s,
                resume_s=resume_s,
                canary_gap=gap,
                in_flight=in_flight,
            )
        )
        self._serving_changed()

    async def _call(self, engine: Engine, request: Message, expect: type[Answer]) -> Answer:
        return await self._switchboard.call(engine.link, request, expect, timeout_s=self._timeout_s)

    def _take_out(self, engine: Engine, reason: str) -> None:
        self._switchboard.tell(engine.link, Shutdown(reason))
        self._switchboard.lose(engine.link, f"taken out: {reason}")

    # --- changes --------------------------------------------------------------------------------------

    def _serving_changed(self) -> None:
        serving = [e.version for e in self._proxy.engines.values() if e.version >= 0]
        if serving:
            self._versions.m = max(self._versions.m, min(serving))
        self._notify()
        self._on_serving()

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def _change(self) -> None:
        """Wait until anything here changes."""
        await asyncio.shield(self._next_change())

    def _next_change(self) -> asyncio.Future[None]:
        """Done when anything here changes; it is everybody's, so nobody may cancel it."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed
