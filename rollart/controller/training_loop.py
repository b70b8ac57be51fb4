"""TrainingLoop: the iterations of a run.

With ``update_at: batch`` the paper's six steps: 1 get_batch, 2 suspend, 3 update, 4 resume, 5 recompute
(2 to 5 are ``WeightSync.synchronize``; the engine recomputes by itself), 6 train_step while generation goes
on.  With ``publish`` the workers swap by themselves and an iteration is get_batch and train_step.  After a
step the trainer publishes and goes on; nobody waits for a receiver.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from rollart.batch_file import batch_path
from rollart.config import Config, UpdateAt
from rollart.controller import events
from rollart.controller.health import Health
from rollart.controller.metrics import BatchMetrics, Metrics, MetricsFile, Row, trained_runs
from rollart.controller.progress import Progress
from rollart.controller.rollout import Rollout
from rollart.controller.run_context import RunContext
from rollart.controller.run_folder import RunOutput
from rollart.controller.sample_buffer import Group
from rollart.controller.staleness import Bound, Versions
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.trajectory import Reason
from rollart.controller.weight_sync import WeightSync
from rollart.errors import RunError
from rollart.protocol import (
    Done,
    Export,
    Message,
    SaveCheckpoint,
    Trained,
    TrainGroup,
    TrainPart,
    TrainStep,
    encode_group,
)

__all__ = ["TrainingLoop"]

Answer = TypeVar("Answer", bound=Message)
MAX_SKIPPED_IN_A_ROW = 3
KEEP_CHECKPOINTS = 2
PART_BYTES = 1 << 20
"""Of a batch: it leaves in parts, each when the one before has arrived, so that neither side holds it twice."""
PAUSE_BYTES = 1 << 16


class TrainingLoop:
    """Runs ``config.steps`` train_steps."""

    def __init__(
        self,
        config: Config,
        folder: RunOutput,
        switchboard: Switchboard,
        rollout: Rollout,
        sync: WeightSync,
        versions: Versions,
        bound: Bound,
        trainer: Link,
        *,
        run: RunContext,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._config = config
        self._folder = folder
        self._switchboard = switchboard
        self._rollout = rollout
        self._sync = sync
        self._versions = versions
        self._bound = bound
        self._trainer = trainer
        self._run = run
        self._metrics = metrics
        self._progress = progress
        self._file = MetricsFile(folder.open_metrics())
        self._publishing: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._score: float | None = None
        self._skipped_in_a_row = 0
        self._gap_told = False
        self._health = Health(config.health)
        self._step = 0
        self.doing = "starting"
        """What the loop does now, for people."""

    async def run(self) -> None:
        """All iterations, an evaluation before the first and after the last, and the final weights."""
        config = self._config
        first = await self._evaluate(0) if config.evaluation.episodes else {}
        if first:
            self._progress.say(
                f"before the first update: eval success {first['eval_success']:.2f} on held-out episodes"
            )
        self._metrics.take_step()  # what came before is no part of the first step
        self._rollout.admit()
        while self._step < config.steps:
            row = await self._iterate()
            if self._step == 0:
                row.update({f"{name}_before": value for name, value in first.items()})
            self._heed_health(row)
            self._step += 1
            if self._step == config.steps:
                await self._finish(row)
            elif config.trainer.checkpoint_every and self._step % config.trainer.checkpoint_every == 0:
                await self._save_soon(row)
            self._file.write(row)
            self._progress.step(row, self._metrics.live)

    async def close(self) -> None:
        """Stop what goes on in the background."""
        for task in (self._publishing, self._saving):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._file.close()

    # --- one iteration --------------------------------------------------------------------------------

    async def _iterate(self) -> Row:
        clock, versions = self._run.clock, self._versions
        row: Row = {"step": self._step, "version": versions.n}
        started = clock()
        self.doing = "get_batch"
        groups = await self._rollout.get_batch()
        batch = self._ship(groups)
        got = clock()
        every = self._config.evaluation.every
        evaluate = bool(every) and self._step > 0 and self._step % every == 0
        if evaluate or self._config.rollout.update_at is UpdateAt.BATCH:
            self.doing = "update"
            await self._sync.synchronize(versions.n)
        updated = clock()
        if evaluate:
            row.update(await self._evaluate(self._step))
        ready = clock()
        self.doing = "train_step"
        trained = await self._train(groups, batch)
        row.update(batch.row)
        row.update({"logprob_gap_mean": None, **trained.metrics})
        row["skipped"] = trained.skipped
        row.update(
            time=round(clock(), 3),
            get_batch_seconds=round(got - started, 4),
            update_wait_seconds=round(updated - got, 4),
            train_step_seconds=round(clock() - ready, 4),
        )
        row.update(self._metrics.take_step())
        row.update(self._metrics.take_refusals())
        row.update(self._rollout.rewards.take_row())
        return row

    def _ship(self, groups: list[Group]) -> BatchMetrics:
        """The batch is formed: record its ages, and abort what can't make the next one."""
        versions, bound = self._versions, self._bound
        batch = BatchMetrics(groups, bound, versions, self._config.rollout.mixed_versions)
        self._run.write(
            events.Shipped(
                self._run.clock(),
                self._step,
                bound.reference(versions),
                versions.n,
                versions.m,
                [(g.id, g.version or 0) for g in groups],
            )
        )
        self._rollout.review()
        return batch

    async def _train(self, groups: list[Group], batch: BatchMetrics) -> Trained:
        """train_step, and what it means for the trajectories."""
        versions, before = self._versions, self._versions.n
        samples = await self._send(groups, batch)
        request = TrainStep(
            self._switchboard.next_seq(),
            self._step,
            len(groups),
            before,
            self._config.trainer.verify_share,
        )
        trained = await self._call(request, Trained)
        if trained.version != (before if trained.skipped else before + 1):
            raise RunError(
                f"the trainer says version {trained.version} after step {self._step} on version {before}"
            )
        self._rollout.batch_trained(trained.skipped)
        versions.n, versions.busy = trained.version, False
        self._run.write(
            events.TrainedStep(
                self._run.clock(), self._step, before, trained.version, trained.skipped, samples
            )
        )
        self._heed_skips(trained)
        self._heed_gap(trained)
        if not trained.skipped:
            await self._publish(trained.version)
        self._rollout.review()
        await self._rollout.end_trained()
        return trained

    async def _send(self, groups: list[Group], batch: BatchMetrics) -> list[events.TrainedSample]:
        """Bring the batch to the trainer; what will be told of its samples once they are trained on."""
        mixed = self._config.rollout.mixed_versions
        samples: list[events.TrainedSample] = []
        first, part, size, pause_at = 0, list[bytes](), 0, PAUSE_BYTES
        for number, group in enumerate(groups, 1):
            batch.add(group)
            samples += (
                events.TrainedSample(t.id, t.length, t.sampled, trained_runs(t, mixed)) for t in group.scored
            )
            sequences = [sample for t in group.scored for sample in t.take_samples()]
            part.append(encode_group(TrainGroup(group.id, group.task, sequences)))
            size += len(part[-1])
            if size >= PART_BYTES or number == len(groups):
                await self._call(TrainPart(self._switchboard.next_seq(), self._step, first), Done, part)
                first, part, size, pause_at = number, [], 0, PAUSE_BYTES
            elif size >= pause_at:
                await asyncio.sleep(0)  # the trajectories must not wait for a large batch
                pause_at = size + PAUSE_BYTES
        return samples

    def _heed_gap(self, trained: Trained) -> None:
        """Say it, once, when trainer and engines don't mean the same distribution."""
        gap, tolerance = trained.metrics.get("logprob_gap_mean", 0.0), self._config.inference.tolerance
        if gap > tolerance and not self._gap_told:
            self._gap_told = True
            self._progress.say(
                f"warning: in step {self._step} the trainer's log-probabilities differ from the engines' by {gap:.2g} "
                f"nats on average (tolerance {tolerance:g}): they don't mean the same distribution"
            )

    def _heed_health(self, row: Row) -> None:
        """Say what is outside its limits; ``RunError``, with the row in the file, where the run must stop."""
        judgement = self._health.judge(row)
        for warning in judgement.warnings:
            self._progress.say(f"warning: in step {self._step} {warning}")
        if judgement.stop:
            self._file.write(row)
            raise RunError(f"step {self._step}: {judgement.stop}")

    def _heed_skips(self, trained: Trained) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if trained.skipped else 0
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{self._skipped_in_a_row} train_steps in a row were skipped; the last: {trained.skipped}. "
                f"Its batch is {batch_path(self._folder.path, self._step)} (rollart.batch_file reads it). "
                "A lower trainer.learning_rate or clip_grad_norm usually helps"
            )

    async def _publish(self, version: int) -> None:
        """Start to publish ``version`` in the background, once the version before it is out."""
        if self._publishing is not None:
            await self._publishing
        self._publishing = asyncio.get_running_loop().create_task(self._sync.publish(self._trainer, version))
        self._publishing.add_done_callback(self._published)
        # Its request must be on the way before the next TrainStep: it speaks of the weights between the two.
        await asyncio.sleep(0)

    def _published(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._run.bug(error)

    # --- around the iterations ------------------------------------------------------------------------

    async def _evaluate(self, step: int) -> dict[str, float]:
        self.doing = "evaluation"
        started = self._run.clock()
        result = await self._rollout.evaluation.run(step)
        self._run.write(result)
        row: dict[str, float] = {
            "eval_success": result.success,
            "eval_reward": result.reward,
            "eval_version": result.version,
            "eval_episodes": result.episodes,
            "eval_seconds": round(self._run.clock() - started, 4),
        }
        if result.failed:
            row["eval_failed"] = result.failed
        row.update((f"task/{task}/eval_success", value) for task, value in result.task_success.items())
        return row

    async def _finish(self, row: Row) -> None:
        """The last version is known and served, measured and saved."""
        self.doing = "finishing"
        self._rollout.close(Reason.SHUTDOWN)
        try:
            await self._sync.synchronize(self._versions.n)
            if self._config.evaluation.episodes:
                row.update(await self._evaluate(self._step))
            await self.save()
            await self._call(Export(self._switchboard.next_seq(), str(self._folder.weights)), Done)
        except BaseException:
            self._file.write(row)
            raise

    async def save(self) -> None:
        """Have the trainer write a checkpoint and let go of the oldest; it is there when this returns."""
        await self._saved()
        await self._call(self._checkpoint(), Done)

    def _checkpoint(self) -> SaveCheckpoint:
        options = self._config.trainer
        path = self._folder.checkpoints / f"step-{self._step:06}"
        keep = options.keep_checkpoints or KEEP_CHECKPOINTS
        seq = self._switchboard.next_seq()
        return SaveCheckpoint(seq, str(path), keep, options.keep_best, self._score)

    async def _save_soon(self, row: Row) -> None:
        """Start a checkpoint in the background, once the one before it is there."""
        await self._saved()
        score = row.get("eval_success" if self._config.evaluation.every else "success_rate")
        if isinstance(score, int | float):
            self._score = float(score)
        self._saving = asyncio.get_running_loop().create_task(self._save_now(self._checkpoint()))
        # Its request must be on the way before the next TrainStep: it speaks of the weights between the two.
        await asyncio.sleep(0)

    async def _save_now(self, request: SaveCheckpoint) -> None:
        try:
            await self._call(request, Done)
        except RunError as error:
            self._run.bug(error)

    async def _saved(self) -> None:
        """Until no checkpoint is on its way."""
        if self._saving is not None:
            await self._saving

    async def salvage(self, timeout_s: float) -> str:
        """Of a run that ends early, save what the trainer can save so quickly; what came of it, in a sentence."""
        export = Export(self._switchboard.next_seq(), str(self._folder.weights))
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(export, Done)
                await self.save()
        except (RunError, TimeoutError) as error:
            return f"the weights could not be saved: {str(error) or 'the trainer is busy'}"
        return f"saved the weights after {self._step} train_steps"

    async def _call(
        self, request: Message, expect: type[Answer], payload: list[bytes] | None = None
    ) -> Answer:
        try:
            return await self._switchboard.call(
                self._trainer,
                request,
                expect,
                timeout_s=self._config.trainer.step_timeout_s,
                payload=payload,
            )
        except CallError as error:
            raise RunError(f"step {self._step}: {type(request).__name__} failed: {error}") from error
