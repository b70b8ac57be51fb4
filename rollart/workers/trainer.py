"""The trainer worker: Megatron-core behind the wire protocol.

All computing happens in one thread, so that requests are served one after the other and beats go on
meanwhile.  Writing weights into the store, and checkpoints into files, happens in threads of its own, from a
copy: training does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from rollart.batch_file import batch_path, write_batch
from rollart.packing import pack_floats, unpack_ids
from rollart.protocol import (
    Collect,
    Done,
    Export,
    LoadCheckpoint,
    Loaded,
    Message,
    PruneCheckpoints,
    Publish,
    Published,
    Ready,
    Role,
    SaveCheckpoint,
    ToWorker,
    Trained,
    TrainPart,
    TrainStep,
)
from rollart.weights.store import TransferFailed
from rollart.workers.batch_parts import BatchParts
from rollart.workers.worker import Deterministic, Worker

if TYPE_CHECKING:
    import torch

    from rollart.weights.store import WeightStore
    from rollart.workers.megatron.core import StepResult
    from rollart.workers.megatron.group import TrainerGroup

__all__ = ["TrainerWorker"]

logger = logging.getLogger(__name__)
WATCH_S = 0.5

Result = TypeVar("Result")


class TrainerWorker(Worker):
    """Trains, publishes, checkpoints and exports the policy."""

    role: ClassVar[Role] = Role.TRAINER
    packages: ClassVar[tuple[str, ...]] = ("torch", "megatron-core", "transformers")

    _trainer: TrainerGroup
    _store: WeightStore
    _expected: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors that engines load, by name."""

    async def setup(self) -> Ready:
        """Build the model and its optimiser, and open the store."""
        self._parts = BatchParts()
        self._streaming: asyncio.Future[None] | None = None
        self._publications: dict[tuple[int, int], asyncio.Future[Published]] = {}
        """By version and attempt, those that are made and those under way."""
        self._publishing = asyncio.Lock()
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="store", initializer=_one_thread)
        self._checkpoint_thread = ThreadPoolExecutor(1, thread_name_prefix="save", initializer=_one_thread)
        self._saving = asyncio.Lock()
        ready = await self._compute(self._build)
        self._watching = asyncio.ensure_future(self._watch())
        return ready

    async def _watch(self) -> None:
        """End when one of the trainer's processes does: the others can't go on without it."""
        while not (dead := self._trainer.dead()):
            await asyncio.sleep(WATCH_S)
        self.fail(dead)

    async def teardown(self) -> None:
        """Finish what the threads are at, and leave the process groups."""
        if not hasattr(self, "_compute_thread"):
            return
        if hasattr(self, "_watching"):
            self._watching.cancel()
        for publication in self._publications.values():
            publication.cancel()
        if hasattr(self, "_trainer"):
            await self._compute(self._trainer.close)
        if hasattr(self, "_store"):
            await self._in_store_thread(self._store.close)
        self._compute_thread.shutdown(cancel_futures=True)
        self._store_thread.shutdown(cancel_futures=True)
        self._checkpoint_thread.shutdown(cancel_futures=True)

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """One request of the training part of the protocol."""
        match message:
            case TrainPart(seq=seq, step_id=step_id, first=first):
                self._parts.add(step_id, first, payload)
                if self.config.trainer.stream_batch:
                    self._stream_soon(step_id)
                return Done(seq)
            case TrainStep():
                return await self._train_step(message)
            case Publish():
                return await self._publish(message)
            case Collect(seq=seq, below=below):
                self._publications = {
                    key: made
                    for key, made in self._publications.items()
                    if key[0] >= below or not made.done()
                }
                await self._in_store_thread(lambda: self._store.collect(below))
                return Done(seq)
            case SaveCheckpoint():
                await self._save(message)
                return Done(message.seq)
            case PruneCheckpoints(seq=seq, path=path, keep=keep, keep_best=keep_best):
                loop, prune = asyncio.get_running_loop(), self._trainer.prune_checkpoints
                await loop.run_in_executor(
                    self._checkpoint_thread, lambda: prune(Path(path), keep, keep_best=keep_best)
                )
                return Done(seq)
            case Export(seq=seq, path=path):
                await self._compute(lambda: self._trainer.export(Path(path)))
                return Done(seq)
            case LoadCheckpoint(seq=seq, path=path):
                await self._compute(lambda: self._trainer.load_checkpoint(Path(path)))
                return Loaded(seq, self._trainer.version)
            case _:
                raise Deterministic(f"a trainer does not serve {type(message).__name__}")

    # --- requests -------------------------------------------------------------------------------------

    def _stream_soon(self, step_id: int) -> None:
        """Once the computing thread has time: the parts that came until then are added together."""
        if self._streaming is None or self._streaming.done():
            self._streaming = asyncio.ensure_future(self._compute(lambda: self._stream(step_id)))
            self._streaming.add_done_callback(lambda made: made.cancelled() or made.exception())

    def _stream(self, step_id: int) -> None:
        frames = self._parts.so_far(step_id)
        if frames:
            try:
                self._trainer.stream(step_id=step_id, frames=frames)
            except Deterministic as error:
                logger.warning(
                    "the batch of step %d is refused so far: %s", step_id, error
                )  # TrainStep tells it

    async def _train_step(self, message: TrainStep) -> Trained:
        step_id = message.step_id

        def train() -> StepResult:
            known = self._trainer.answered(step_id)
            if known:
                return known
            frames = self._parts.of(step_id, message.groups)
            result = self._trainer.train_step(
                step_id=step_id, version=message.version, verify_share=message.verify_share, frames=frames
            )
            if result.skipped:
                self._keep_batch(step_id, frames)
            return result

        result = await self._compute(train)
        self._parts.drop(step_id)
        return Trained(message.seq, result.step_id, result.version, result.skipped, result.metrics)

    async def _save(self, message: SaveCheckpoint) -> None:
        """Training goes on while the files are written, from a copy."""
        path, trainer = Path(message.path), self._trainer
        async with self._saving:
            await self._compute(lambda: trainer.make_way(path))
            write = await self._compute(lambda: trainer.begin_checkpoint(path, score=message.score))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._checkpoint_thread, write)
            await self._compute(lambda: trainer.finish_checkpoint(path))

    def _keep_batch(self, step_id: int, frames: Sequence[bytes]) -> None:
        path = batch_path(self.welcome.run_dir, step_id)
        try:
            write_batch(path, frames)
        except OSError as error:
            logger.warning("the batch of skipped step %d could not be kept as %s: %s", step_id, path, error)

    async def _publish(self, message: Publish) -> Published:
        key = message.version, message.attempt
        publication = self._publications.get(key)
        if publication is None:
            publication = asyncio.ensure_future(self._publish_in_turn(message))
            publication.add_done_callback(
                lambda made: made.cancelled() or made.exception()
            )  # it is told to who asks
            self._publications[key] = publication
        # Who asked may give up, and ask again: the publication goes on, and is made once.
        known = await asyncio.shield(publication)
        return msgspec.structs.replace(known, seq=message.seq)

    async def _publish_in_turn(self, message: Publish) -> Published:
        try:
            async with self._publishing:
                return await self._publish_new(message)
        except BaseException:
            del self._publications[message.version, message.attempt]  # the next who asks has it tried again
            raise

    async def _publish_new(self, message: Publish) -> Published:
        def score_and_copy() -> tuple[list[float], Mapping[str, torch.Tensor], float]:
            started = time.perf_counter()
            scores, weights = self._trainer.snapshot(message.version, unpack_ids(message.canary))
            return scores, weights, time.perf_counter() - started

        scores, weights, blocked_s = await self._compute(score_and_copy)
        manifest, size_bytes = await self._in_store_thread(lambda: self._store_weights(message, weights))
        return Published(message.seq, message.version, manifest, pack_floats(scores), size_bytes, blocked_s)

    def _store_weights(self, message: Publish, weights: Mapping[str, torch.Tensor]) -> tuple[str, int]:
        """Publish ``weights`` as the engine loads them; their reference and the bytes."""
        from rollart.weights.expected import checked
        from rollart.weights.tensors import buffers_of
        from rollart.workers.megatron.core import TORCH_DTYPES

        dtype = TORCH_DTYPES[self.config.inference.dtype]
        served = ((name, tensor.to(dtype)) for name, tensor in self._trainer.named_weights(weights))
        right = checked(served, self._expected, dtype)
        manifest = self._store.publish(message.version, buffers_of(right), anew=message.attempt > 0)
        return manifest, sum(weight.numel() for weight in weights.values()) * dtype.itemsize

    # --- threads --------------------------------------------------------------------------------------

    def _build(self) -> Ready:
        """In the computing thread: everything that imports torch."""
        logging.getLogger("megatron").setLevel(logging.WARNING)  # its INFO lists every parameter

        import torch

        from rollart.weights.expected import expected_shapes
        from rollart.weights.opening import open_store
        from rollart.workers.megatron.group import TrainerGroup

        torch.set_num_threads(self.config.trainer.threads)
        self._store = open_store(self.config, self.welcome, self.name)
        private = (
            Path(self.welcome.run_dir) / "private"
        )  # which the controller removes, if this process can't
        private.mkdir(mode=0o700, exist_ok=True)
        self._trainer = TrainerGroup(self.config, Path(self.welcome.model_dir), scratch=private)
        self._expected = expected_shapes(Path(self.welcome.model_dir))
        facts = {
            "model": self._trainer.architecture.model_type,
            "parameters": str(self._trainer.parameter_count),
            "dtype": str(self.config.trainer.dtype),
            "device": str(self._trainer.device),
            "threads": str(torch.get_num_threads()),
            "processes": str(self.config.trainer.processes),
        }
        return Ready(1, facts)

    async def _compute(self, call: Callable[[], Result]) -> Result:
        """The result of ``call`` in the computing thread; a path that is taken is ``Deterministic``."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._compute_thread, call)
        except FileExistsError as error:
            raise Deterministic(str(error)) from error

    async def _in_store_thread(self, call: Callable[[], Result]) -> Result:
        """The result of ``call`` in the store's thread; but for a failed transfer, ``ValueError`` is final."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._store_thread, call)
        except TransferFailed:
            raise
        except ValueError as error:
            raise Deterministic(str(error)) from error


def _one_thread() -> None:
    """The store's thread copies beside a computing one: it must not take that one's cores."""
    import torch

    torch.set_num_threads(1)
