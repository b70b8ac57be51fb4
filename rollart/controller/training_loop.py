"""TrainingLoop: the iterations of a run.

With ``update_at: batch`` the paper's six steps: 1 get_batch, 2 suspend, 3 update, 4 resume, 5 recompute
(2 to 5 are ``WeightSync.synchronize``; the engine recomputes by itself), 6 train_step while generation goes
on.  With ``publish`` the workers swap by themselves and an iteration is get_batch and train_step.  After a
step the trainer publishes and goes on; nobody waits for a receiver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from rollart.batch_file import batch_path
from rollart.config import Config, UpdateAt
from rollart.controller import events
from rollart.controller.health import Health
from rollart.controller.journal import Journal, Shipped
from rollart.controller.journal import Trained as TrainedRecord
from rollart.controller.metrics import BatchMetrics, Metrics, MetricsFile, Row, trained_runs
from rollart.controller.progress import Progress
from rollart.controller.rollout import Rollout
from rollart.controller.run_context import RunContext
from rollart.controller.run_folder import RunOutput
from rollart.controller.sample_buffer import Group
from rollart.controller.staleness import Bound, Versions
from rollart.controller.switchboard import CallError, Link, LinkState, Switchboard
from rollart.controller.trainer_line import TrainerLine
from rollart.controller.trajectory import Reason
from rollart.controller.weight_sync import WeightSync
from rollart.errors import RunError
from rollart.protocol import (
    Done,
    Export,
    Message,
    PruneCheckpoints,
    SaveCheckpoint,
    Trained,
    TrainGroup,
    encode_group,
)

__all__ = ["TrainingLoop"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
MAX_SKIPPED_IN_A_ROW = 3
KEEP_CHECKPOINTS = 2
GROUPS_AT_ONCE = 16
JOURNAL_BYTES = 256 << 20
"""A journal that has grown by so much since the last checkpoint has one made, whatever the config says."""


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
        trainer: TrainerLine,
        journal: Journal,
        *,
        resumed: bool = False,
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
        self._journal = journal
        self._resumed = resumed
        self._saved_bytes = 0
        """What the journal had when it was made anew last."""
        self._run = run
        self._metrics = metrics
        self._progress = progress
        self._file = MetricsFile(folder.open_metrics(more=resumed), more=resumed)
        self._publishing: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._score: float | None = None
        self._skipped_in_a_row = 0
        self._gap_told = False
        self._health = Health(config.health)
        self._step = journal.ledger.step
        self._streamed: list[bytes] = []
        """Groups of the batch that is not complete, encoded."""
        self.doing = "starting"
        """What the loop does now, for people."""

    async def run(self) -> None:
        """All iterations, an evaluation before the first and after the last, and the final weights."""
        config = self._config
        self._tell_rows()
        anew = not self._resumed or not (self._step or self._rollout.in_training)
        first = await self._evaluate(0) if config.evaluation.episodes and anew else {}
        if first:
            self._progress.say(
                f"before the first update: eval success {first['eval_success']:.2f} on held-out episodes"
            )
        self._metrics.take_step()  # what came before is no part of the first step
        if self._step == config.steps:  # the run before this one ended while it was finishing
            await self._finish({})
            return
        self._rollout.admit()
        while self._step < config.steps:
            row = await self._iterate()
            if self._step == 0:
                row.update({f"{name}_before": value for name, value in first.items()})
            self._heed_health(row)
            self._step += 1
            if self._step == config.steps:
                await self._finish(row)
            elif self._wants_checkpoint():
                await self._save_soon(row)
            self._file.write(row)
            self._progress.step(row, self._metrics.live)

    def _wants_checkpoint(self) -> bool:
        every = self._config.trainer.checkpoint_every
        if every and self._step % every == 0:
            return True
        return self._journal.size_bytes - self._saved_bytes > JOURNAL_BYTES

    def _tell_rows(self) -> None:
        """Of a resumed run: the metrics of a step that was trained before its row was written."""
        for trained in self._journal.ledger.trained:
            if trained.step > self._file.last_step:
                self._file.write(trained.row)

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
        if self._rollout.in_training:  # when the controller before this one ended
            groups = self._rollout.in_training
            batch = self._shipped_before(groups)
        else:
            groups = await self._get_batch()
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
        trained = await self._train(groups, batch, row)
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

    async def _get_batch(self) -> list[Group]:
        """Wait for the batch; meanwhile its first groups go to the trainer, where it works on them as they come."""
        if not self._config.trainer.stream_batch:
            return await self._rollout.get_batch()
        streaming = asyncio.get_running_loop().create_task(self._stream(), name="stream batch")
        try:
            return await self._rollout.get_batch()
        finally:
            streaming.cancel()
            await asyncio.wait({streaming})
            if not streaming.cancelled() and (error := streaming.exception()) is not None:
                self._run.bug(error)

    async def _stream(self) -> None:
        while True:
            frames = list(_encoded(await self._rollout.groups_of_next_batch()))
            first, self._streamed = len(self._streamed), self._streamed + frames
            # A part that is on its way arrives, whatever becomes of the wait: else nobody knew whether it did.
            await asyncio.shield(self._trainer.stream(self._step, first, frames))

    def _ship(self, groups: list[Group]) -> BatchMetrics:
        """The batch is formed: record its ages, and abort what can't make the next one."""
        versions, bound = self._versions, self._bound
        batch = BatchMetrics(groups, bound, versions, self._config.rollout.mixed_versions)
        self._journal.write(
            Shipped(self._step, versions.n, versions.m, [(g.id, [t.id for t in g.scored]) for g in groups])
        )
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

    def _shipped_before(self, groups: list[Group]) -> BatchMetrics:
        """As ``_ship``, of a batch that the controller before this one has formed."""
        shipped = self._journal.ledger.shipped
        assert shipped is not None
        then = Versions(shipped.before, shipped.m, True)
        return BatchMetrics(groups, self._bound, then, self._config.rollout.mixed_versions)

    async def _train(self, groups: list[Group], batch: BatchMetrics, row: Row) -> Trained:
        """train_step, and what it means for the trajectories; ``row`` is what is known of the step."""
        versions, before = self._versions, self._versions.n
        streamed, self._streamed = self._streamed, []
        samples = await self._count(groups, batch)
        try:
            trained = await self._trainer.train(
                self._step, before, len(groups), _encoded(groups[len(streamed) :]), streamed=streamed
            )
        except CallError as error:
            raise RunError(f"step {self._step}: TrainStep failed: {error}") from error
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
        told = {**row, **batch.row, **trained.metrics, "skipped": trained.skipped}
        self._journal.write(TrainedRecord(self._step, trained.version, trained.skipped, told))
        self._heed_skips(trained)
        self._heed_gap(trained)
        if not trained.skipped:
            await self._publish(trained.version)
        self._rollout.review()
        await self._rollout.end_trained()
        return trained

    async def _count(self, groups: list[Group], batch: BatchMetrics) -> list[events.TrainedSample]:
        """Count the batch in; what will be told of its samples once they are trained on."""
        mixed = self._config.rollout.mixed_versions
        samples: list[events.TrainedSample] = []
        for number, group in enumerate(groups, 1):
            batch.add(group)
            samples += (
                events.TrainedSample(t.id, t.length, t.sampled, trained_runs(t, mixed)) for t in group.scored
            )
            if number % GROUPS_AT_ONCE == 0:
                await asyncio.sleep(0)  # the trajectories must not wait for a large batch
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
        self._publishing = asyncio.get_running_loop().create_task(self._sync.publish(version))
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
            await self._call(lambda seq: Export(seq, str(self._folder.weights)), Done)
        except BaseException:
            if row:
                self._file.write(row)
            raise
        self._journal.finish()
        await self._call(lambda seq: self._prune(seq, self._checkpoint_path), Done)

    async def save(self) -> None:
        """Have the trainer write a checkpoint; it is there when this returns."""
        await self._saved()
        await self._call(self._checkpoint, Done)

    def _checkpoint(self, seq: int) -> SaveCheckpoint:
        return SaveCheckpoint(seq, self._checkpoint_path, self._score)

    def _prune(self, seq: int, path: str) -> PruneCheckpoints:
        """Only when the journal doesn't name an older one any more."""
        options = self._config.trainer
        return PruneCheckpoints(seq, path, options.keep_checkpoints or KEEP_CHECKPOINTS, options.keep_best)

    @property
    def _checkpoint_path(self) -> str:
        return str(self._folder.checkpoints / f"step-{self._step:06}")

    async def _save_soon(self, row: Row) -> None:
        """Start a checkpoint in the background, once the one before it is there."""
        await self._saved()
        score = row.get("eval_success" if self._config.evaluation.every else "success_rate")
        if isinstance(score, int | float):
            self._score = float(score)
        link = await self._trainer.link()
        request = self._checkpoint(self._switchboard.next_seq())
        saving = self._save_now(link, request, self._step, self._versions.n)
        self._saving = asyncio.get_running_loop().create_task(saving)
        # Its request must be on the way before the next TrainStep: it speaks of the weights between the two.
        await asyncio.sleep(0)

    async def _save_now(self, link: Link, request: SaveCheckpoint, step: int, version: int) -> None:
        timeout_s = self._config.trainer.step_timeout_s
        try:
            await self._switchboard.call(link, request, Done, timeout_s=timeout_s)
        except CallError as error:
            if link.state is LinkState.GONE or link.leaving is not None:  # its successor makes the next one
                logger.warning("no checkpoint of step %d: %s", step, error)
            else:
                self._run.bug(RunError(f"step {step}: SaveCheckpoint failed: {error}"))
            return
        self._journal.checkpointed(request.path, step, version)
        self._saved_bytes = self._journal.size_bytes
        prune = self._prune(self._switchboard.next_seq(), request.path)
        try:
            await self._switchboard.call(link, prune, Done, timeout_s=timeout_s)
        except CallError as error:  # the next one's removes these too
            logger.warning("older checkpoints than that of step %d may be left: %s", step, error)

    async def _saved(self) -> None:
        """Until no checkpoint is on its way."""
        if self._saving is not None:
            await self._saving

    async def salvage(self, timeout_s: float) -> str:
        """Of a run that ends early, save what the trainer can save so quickly; what came of it, in a sentence."""
        step, version = self._step, self._versions.n
        quiet = not self._rollout.in_training  # else nobody knows what the trainer has made of the batch
        try:
            async with asyncio.timeout(timeout_s):
                await self._call(lambda seq: Export(seq, str(self._folder.weights)), Done)
                if quiet:
                    await self.save()
                    if self.doing != "finishing":
                        self._journal.checkpointed(self._checkpoint_path, step, version)
                    await self._call(lambda seq: self._prune(seq, self._checkpoint_path), Done)
        except (RunError, TimeoutError) as error:
            return f"the weights could not be saved: {str(error) or 'the trainer is busy'}"
        return f"saved the weights after {self._step} train_steps"

    async def _call(self, make: Callable[[int], Message], expect: type[Answer]) -> Answer:
        """The trainer's answer; ``make`` is given the request's sequence id."""
        name = ""

        def request(link: Link) -> Message:
            nonlocal name
            made = make(self._switchboard.next_seq())
            name = type(made).__name__
            return made

        try:
            return await self._trainer.call(request, expect)
        except CallError as error:
            raise RunError(f"step {self._step}: {name} failed: {error}") from error


def _encoded(groups: list[Group]) -> Iterator[bytes]:
    """Each group's frame; its samples are not kept any longer."""
    for group in groups:
        sequences = [sample for t in group.scored for sample in t.take_samples()]
        yield encode_group(TrainGroup(group.id, group.task, sequences))
