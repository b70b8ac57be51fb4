"""A simulated trainer: the real worker base, the cost of a train_step by a model, no weights.

Like the real one it serves one request after the other, in the order they came, and a ``TrainStep`` whose
id was applied already is answered from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from rollart.packing import ID_BYTES
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
    TrainGroup,
    TrainPart,
    TrainStep,
)
from rollart.simulation.fitting import scored_lengths
from rollart.simulation.world import World, canary_logprobs
from rollart.workers.batch_parts import BatchParts
from rollart.workers.dialer import Dialer
from rollart.workers.worker import Deterministic, Worker

__all__ = ["SimTrainer", "StepTime"]

StepTime = Callable[[Sequence[int], Sequence[int]], float]
"""(lengths, scored) → seconds of a train_step on sequences of these lengths, of which those in ``scored`` are read once
more, under weights other than the current ones, to verify their log-probabilities."""

_decoder = msgspec.msgpack.Decoder(TrainGroup)


class SimTrainer(Worker):
    """Serves ``TrainPart``, ``TrainStep``, ``Publish``, ``Collect``, ``SaveCheckpoint`` and ``Export``."""

    role: ClassVar[Role] = Role.TRAINER

    def __init__(
        self,
        dialer: Dialer,
        *,
        name: str,
        hardware_class: str,
        world: World,
        step_s: StepTime,
    ) -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self.busy_s = 0.0
        self._world = world
        self._step_s = step_s
        self._version = 0
        self._lineage: tuple[int, ...] = ()
        """The steps that its weights are of."""
        self._answers: dict[int, Trained] = {}
        self._parts = BatchParts()
        self._streaming: asyncio.Task[None] | None = None
        self._computed = 0
        """Groups of the batch that is not complete whose gradients it has."""
        self._in_turn = asyncio.Lock()

    async def setup(self) -> Ready:
        """Be there."""
        await asyncio.sleep(self._world.timings.start_s / 2)
        return Ready(1, {})

    async def teardown(self) -> None:
        """Stop what goes on."""
        if self._streaming is not None:
            self._streaming.cancel()
            await asyncio.wait({self._streaming})

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request."""
        timings, slow = self._world.timings, self._world.of(self.name).slowdown
        match message:
            case TrainPart(seq=seq, step_id=step_id, first=first):
                self._parts.add(step_id, first, payload)
                if self.config.trainer.stream_batch and (self._streaming is None or self._streaming.done()):
                    self._streaming = asyncio.get_running_loop().create_task(self._stream(step_id))
                return Done(seq)
            case TrainStep():
                async with self._in_turn:
                    return await self._train(message)
            case Publish(seq=seq, version=version, attempt=attempt, canary=canary):
                async with self._in_turn:
                    if not 0 <= self._version - version <= self.config.rollout.staleness_bound + 1:
                        raise Deterministic(f"it has version {self._version}, not {version}")
                await asyncio.sleep(timings.publish_s * slow)
                return Published(
                    seq, version, f"sim:{version}.{attempt}", canary_logprobs(version, canary), 0, 0.0
                )
            case Collect(seq=seq):
                return Done(seq)
            case SaveCheckpoint(seq=seq, path=path):
                async with self._in_turn:
                    saved = self._version, self._lineage
                await asyncio.sleep(timings.save_s * slow)
                self._world.checkpoints[path] = saved
                return Done(seq)
            case PruneCheckpoints(seq=seq, path=path, keep=keep):
                for older in sorted(each for each in self._world.checkpoints if each <= path)[:-keep]:
                    del self._world.checkpoints[older]
                return Done(seq)
            case Export(seq=seq):
                async with self._in_turn:
                    await asyncio.sleep(timings.save_s * slow)
                return Done(seq)
            case LoadCheckpoint(seq=seq, path=path):
                await asyncio.sleep(timings.save_s * slow)
                self._version, self._lineage = self._world.checkpoints[path]
                return Loaded(seq, self._version)
        raise Deterministic(f"a trainer does not serve {type(message).__name__}")

    async def _train(self, request: TrainStep) -> Trained:
        known = self._answers.get(request.step_id)
        if known is not None:
            return msgspec.structs.replace(known, seq=request.seq)
        if request.version != self._version:
            raise Deterministic(f"it has version {self._version}, not {request.version}")
        groups = [_decoder.decode(frame) for frame in self._parts.of(request.step_id, request.groups)]
        ailments = self._world.of(self.name)
        await self._compute(groups[self._computed :], request)
        self._computed = 0
        skipped = ""
        if ailments.skips:
            ailments.skips -= 1
            skipped = "the loss is nan"
        else:
            self._version += 1
            self._lineage = (*self._lineage, request.step_id)
            self._world.lineage = self._lineage
            if list(self._lineage) != sorted(set(self._lineage)) or len(self._lineage) != self._version:
                self._world.violations.append(f"I2 version {self._version} is of steps {self._lineage}")
            if self._world.truth is not None:
                self._world.truth.check_batch(request.step_id, groups)
        answer = Trained(request.seq, request.step_id, self._version, skipped, {"logprob_gap_mean": 0.0})
        self._answers = {request.step_id: answer}
        self._parts.drop(request.step_id)
        return answer

    async def _stream(self, step_id: int) -> None:
        """Compute the gradients of the groups that are here, until there are no more."""
        async with self._in_turn:
            while frames := self._parts.so_far(step_id)[self._computed :]:
                self._computed += len(frames)
                groups = [_decoder.decode(frame) for frame in frames]
                share = self.config.trainer.verify_share
                await self._compute(groups, TrainStep(0, step_id, 0, self._version, share))

    async def _compute(self, groups: Sequence[TrainGroup], request: TrainStep) -> None:
        """Take as long as the gradients of ``groups`` take."""
        samples = [sample for group in groups for sample in group.samples]
        if not samples:
            return
        lengths = [len(sample.ids) // ID_BYTES for sample in samples]
        scored = scored_lengths(
            lengths, [s.versions for s in samples], request.version, request.verify_share, request.step_id
        )
        seconds = self._step_s(lengths, scored) * self._world.of(self.name).slowdown
        started, sharing = asyncio.get_running_loop().time(), self._world.sharing
        await self._world.compute(self.name, seconds, sharing.trainer_threads if sharing else 1)
        self.busy_s += asyncio.get_running_loop().time() - started
