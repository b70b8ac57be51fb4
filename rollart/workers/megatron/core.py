"""The trainer itself, synchronous and without networking: one thread calls it.

A train_step is applied as a whole or not at all.  n = ``version`` counts the applied steps.  The gradient of
an optimiser step is that of the sum of its minibatch's token losses over the number of its trained tokens.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollart.algorithms.losses import SamplingDistribution, kl_estimate
from rollart.algorithms.sampling import TaskDistributions
from rollart.config import Config, DType, Schedule
from rollart.config.algorithm import Algorithm, Denominator
from rollart.workers.megatron import checkpoint
from rollart.workers.megatron.architecture import Architecture
from rollart.workers.megatron.batch import Batch, Refusal, Trajectory
from rollart.workers.megatron.convert import to_hugging_face, to_megatron
from rollart.workers.megatron.folder import read_config, read_weights, write_export
from rollart.workers.megatron.history import WeightHistory
from rollart.workers.megatron.metrics import TokenTable, report
from rollart.workers.megatron.model import LanguageModel
from rollart.workers.megatron.optimizer import Optimizer
from rollart.workers.megatron.parallel import Place, join_parallel, leave_parallel
from rollart.workers.megatron.passes import Known, Passes
from rollart.workers.megatron.shards import Collector, cut_share, share_of

__all__ = ["TORCH_DTYPES", "StepResult", "Trainer"]

logger = logging.getLogger(__name__)

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
REMEMBERED_STEPS = 64
"""Answers kept for requests that come again."""


class StepResult(msgspec.Struct, frozen=True):
    """What a train_step did; ``skipped`` says why nothing was applied, or is empty."""

    step_id: int
    version: int
    skipped: str
    metrics: dict[str, float]


class _NotFinite(ArithmeticError):
    """A loss or gradient is NaN or infinite."""


class _Stream:
    """A step whose batch is coming in."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.tables: list[TokenTable] = []
        self.groups = 0
        self.seconds = 0.0
        self.broken = ""
        """Why the step will be skipped."""


class Trainer:
    """Holds a model of ``model_dir`` and trains it as ``config`` says.

    ``UnsupportedModel``, ``FileNotFoundError`` or ``ValueError`` when the folder can't be trained.  Of a group of
    processes each has one, and all call the same methods in the same order.
    """

    def __init__(self, config: Config, model_dir: Path, place: Place | None = None) -> None:
        self.config = config
        self.model_dir = model_dir
        self.version = 0
        hf_config = read_config(model_dir)
        self.architecture = Architecture.of(hf_config)
        self.architecture.check_layout(config.trainer)
        samplings = {task.name: config.sampling_of(task) for task in config.tasks}
        self._distribution = TaskDistributions(
            {
                name: SamplingDistribution(
                    temperature=sampling.temperature,
                    allowed=_resolved(sampling.allowed_token_ids),
                    vocab_size=self.architecture.vocab_size,
                )
                for name, sampling in samplings.items()
            }
        )
        seed = config.model.random.seed if config.model.random else None
        weights = read_weights(model_dir, hf_config, seed)
        self.dtype = TORCH_DTYPES[config.trainer.dtype]
        self.ranks = join_parallel(config.seed, config.trainer, place)
        try:
            self.model = LanguageModel(self.architecture, self.dtype, config.trainer)
            self._load_weights(weights)
            self.optimizer = Optimizer(self.model, config.trainer, steps=config.optimizer_steps)
            self._collector = Collector(self.model, self.ranks)
        except BaseException:
            leave_parallel()
            raise
        self.history = WeightHistory(self.model, keep=config.rollout.staleness_bound + 2)
        algorithms = [config.algorithm_of(task.name) for task in config.tasks]
        if any(algorithm.kl_coefficient for algorithm in algorithms):
            self.history.keep_reference()
        self._passes = Passes(
            self.model, self.optimizer.module, self._distribution, config.trainer, self.ranks
        )
        self._answers: OrderedDict[int, StepResult] = OrderedDict()
        self._stream: _Stream | None = None
        self._writing: checkpoint.Writing | None = None

    @property
    def parameter_count(self) -> int:
        """Trained numbers that this process holds."""
        return sum(parameter.numel() for _, parameter in self.model.parameters())

    def close(self) -> None:
        """Leave the process groups; the trainer can't be used afterwards."""
        if self._writing is not None:
            self._writing.abandon()
        leave_parallel()

    # --- training -------------------------------------------------------------------------------------

    def train_step(
        self, *, step_id: int, version: int, verify_share: float, frames: Sequence[bytes]
    ) -> StepResult:
        """Train on ``frames``, an encoded ``TrainGroup`` each; a repeated ``step_id`` only answers again.

        ``Refusal`` when ``version`` is not the trainer's or the batch breaks a rule.
        """
        self.optimizer.require_whole()
        known = self.answered(step_id)
        if known is not None:
            return known
        self._check_version(step_id, version)
        started = time.perf_counter()
        if self._stream is not None and self._stream.step_id == step_id:
            return self._finish_stream(self._stream, frames, started)
        self._stream = None
        table = TokenTable(self._decode(frames))
        minibatches = table.batch.minibatches(self.config.trainer.minibatches)
        self.history.remember(version)
        self._verify(table, minibatches, step_id, verify_share)
        norms: list[float] = []
        skipped = ""
        try:
            self._train(table, minibatches, norms)
        except _NotFinite as error:
            logger.warning("train_step %d is skipped: %s", step_id, error)
            skipped = str(error)
        else:
            self.version = version + 1
        return self._conclude(step_id, skipped, [table], norms, started)

    def stream(self, *, step_id: int, frames: Sequence[bytes]) -> int:
        """Add the gradients of the first groups of the batch of ``step_id``, which isn't whole yet; how many it has.

        ``frames`` are all groups that are there so far, in order; those that were added before are not added again.
        ``train_step`` adds what is missing and makes the step.  What another step had so far is forgotten.
        ``Refusal`` when a group breaks a rule: the step must then begin anew.
        """
        self.optimizer.require_whole()
        if self.answered(step_id) is not None:
            return len(frames)
        stream = self._stream
        if stream is None or stream.step_id != step_id:
            self.optimizer.zero_gradients()
            stream = self._stream = _Stream(step_id)
        new = list(frames[stream.groups :])
        if new and not stream.broken:
            try:
                self._add_to_stream(stream, new)
            except BaseException:
                self._stream = None
                raise
        return stream.groups

    def _add_to_stream(self, stream: _Stream, frames: list[bytes]) -> None:
        started = time.perf_counter()
        table = TokenTable(self._decode(frames))
        self.history.remember(self.version)
        every = table.batch.trajectories
        share = self.config.trainer.verify_share
        self._verify(table, [every], stream.step_id * 1_000_003 + stream.groups, share)
        stream.tables.append(table)
        stream.groups += len(frames)
        try:
            self._accumulate(table, every, self._prepare(table.batch), first=True)
        except _NotFinite as error:
            stream.broken = str(error)
        stream.seconds += time.perf_counter() - started

    def _finish_stream(self, stream: _Stream, frames: Sequence[bytes], started: float) -> StepResult:
        self.stream(step_id=stream.step_id, frames=frames)
        norms: list[float] = []
        skipped = stream.broken
        self._stream = None
        try:
            if not skipped:
                slots = (torch.arange(len(each.batch.behaviour)) for each in stream.tables)
                counts = [each.batch.count(its) for each, its in zip(stream.tables, slots, strict=True)]
                norms.append(self._optimizer_step(sum(counts)))
                self.version += 1
        except _NotFinite as error:
            skipped = str(error)
        finally:
            self.optimizer.zero_gradients()
        if skipped:
            logger.warning("train_step %d is skipped: %s", stream.step_id, skipped)
        result = self._conclude(stream.step_id, skipped, stream.tables, norms, started)
        result.metrics["stream_seconds"] = stream.seconds
        return result

    def answered(self, step_id: int) -> StepResult | None:
        """The answer to a train_step that was made already."""
        return self._answers.get(step_id)

    @property
    def last_step(self) -> StepResult | None:
        """The answer to the last train_step."""
        return next(reversed(self._answers.values()), None)

    def _check_version(self, step_id: int, version: int) -> None:
        if version != self.version:
            raise Refusal(
                f"train_step {step_id} is for version {version}, but the trainer is at version {self.version}"
            )

    def _decode(self, frames: Sequence[bytes]) -> Batch:
        return Batch.decode(
            frames,
            version=self.version,
            distribution=self._distribution,
            algorithm_of=self.config.algorithm_of,
            mixed_versions=self.config.rollout.mixed_versions,
        )

    def _conclude(
        self, step_id: int, skipped: str, tables: list[TokenTable], norms: list[float], started: float
    ) -> StepResult:
        trained_on = self.version if skipped else self.version - 1
        metrics = report(tables, version=trained_on)
        metrics["grad_norm"] = 0.0 if skipped else sum(norms) / max(len(norms), 1)
        metrics["learning_rate"] = 0.0 if skipped else self.optimizer.learning_rate
        metrics["optimizer_steps"] = 0.0 if skipped else float(len(norms))
        metrics["padding_share"] = self._passes.padding_share
        metrics["train_seconds"] = time.perf_counter() - started
        result = StepResult(step_id, self.version, skipped, metrics)
        self._answer(result)
        return result

    def _answer(self, result: StepResult) -> None:
        self._answers[result.step_id] = result
        while len(self._answers) > REMEMBERED_STEPS:
            self._answers.popitem(last=False)

    def _train(self, table: TokenTable, minibatches: list[list[Trajectory]], norms: list[float]) -> None:
        """One optimiser step a minibatch; appends their gradient norms.  When it raises, the weights are as before."""
        before = self.optimizer.snapshot() if len(minibatches) > 1 else None
        try:
            known = self._prepare(table.batch)
            for trajectories in minibatches:
                self.optimizer.zero_gradients()
                self._accumulate(table, trajectories, known, first=not norms)
                slots = torch.cat([torch.arange(each.slots.start, each.slots.stop) for each in trajectories])
                norms.append(self._optimizer_step(table.batch.count(slots)))
        except BaseException:
            if before is not None:
                self.optimizer.restore(before)
                self.history.load(self.version)
            raise
        finally:
            self.optimizer.zero_gradients()

    def _prepare(self, batch: Batch) -> Known:
        """Log-probabilities that the batch's losses compare with, under the weights as they are; its advantages."""
        proximal = reference = penalties = None
        with torch.no_grad():
            if any(each.denominator is Denominator.PROXIMAL for each in batch.algorithms):
                chosen = _of(batch, lambda each: each.denominator is Denominator.PROXIMAL)
                proximal = self._passes.score(batch, chosen)
            if any(each.kl_coefficient for each in batch.algorithms):
                with self.history.reference_loaded(current=self.version):
                    chosen = _of(batch, lambda each: each.kl_coefficient > 0)
                    reference = self._passes.score(batch, chosen)
                penalties = _penalties(batch, proximal, reference)
        batch.assign_advantages(penalties)
        return Known(proximal, reference)

    def _accumulate(
        self, table: TokenTable, trajectories: list[Trajectory], known: Known, *, first: bool
    ) -> None:
        told = self._passes.accumulate(table.batch, trajectories, known)
        table.trained(told, scored_version=self.version if first else None)
        loss = float(told.loss.sum())
        if not math.isfinite(loss):
            raise _NotFinite(f"the loss is {loss}")

    def _optimizer_step(self, count: int) -> float:
        self._passes.finish(count)
        norm = self.optimizer.gradient_norm()
        if not math.isfinite(norm):
            raise _NotFinite(f"the gradient's norm is {norm}")
        self.optimizer.apply(norm)
        return norm

    # --- verification ---------------------------------------------------------------------------------

    def _verify(
        self, table: TokenTable, minibatches: list[list[Trajectory]], step_id: int, share: float
    ) -> None:
        """Recompute log-probabilities under the weights that sampled, for a share of the trajectories.

        Those of the current weights come from the training pass itself, as long as the weights are unchanged.
        """
        batch = table.batch
        count = math.ceil(share * len(batch.trajectories))
        chosen = random.Random(step_id).sample(batch.trajectories, count)
        trained_first = {trajectory.first for trajectory in minibatches[0]}
        by_version: dict[int, list[Trajectory]] = {}
        for trajectory in chosen:
            table.choose(trajectory)
            for version in torch.unique(batch.versions[trajectory.slots]).tolist():
                if self._is_kept(version, trajectory, table) and not (
                    version == self.version and trajectory.first in trained_first
                ):
                    by_version.setdefault(version, []).append(trajectory)
        for version, trajectories in sorted(by_version.items()):
            among = torch.zeros(len(batch.behaviour), dtype=torch.bool)
            for trajectory in trajectories:
                among[trajectory.slots] = True
            with self.history.loaded(version, current=self.version), torch.no_grad():
                table.scored(self._passes.score(batch, trajectories), among, version)

    def _is_kept(self, version: int, trajectory: Trajectory, table: TokenTable) -> bool:
        if version in self.history:
            return True
        rollout = self.config.rollout
        oldest = self.version - rollout.staleness_bound - 1
        unbounded = rollout.schedule is Schedule.AREAL  # it trains on tokens of any age
        if (
            unbounded or oldest <= version < self.history.first
        ):  # else: sampled before this trainer was restored
            table.cannot_verify(trajectory, version)
            return False
        raise Refusal(
            f"trajectory {trajectory.number} has tokens of version {version}, whose weights are no longer "
            f"kept at version {self.version} with staleness_bound {self.config.rollout.staleness_bound}"
        )

    # --- weights --------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ids[1:], each given the ids before it, at temperature 1 and without a mask.

        ``Refusal`` for fewer than two ids, or one outside the vocabulary.
        """
        if len(ids) < 2 or not all(0 <= each < self.architecture.vocab_size for each in ids):
            raise Refusal(
                f"can't score {len(ids)} ids: at least 2 are needed, "
                f"inside the vocabulary of {self.architecture.vocab_size} tokens"
            )
        return self._passes.full_logprobs(ids)

    def snapshot(self, version: int, canary: Sequence[int]) -> tuple[list[float], Mapping[str, Tensor]]:
        """``score`` of ``canary`` and the weights of ``version``, which is the current one or still remembered.

        Of a group the first process has the weights, whole, and the others none.  ``Refusal`` for another version.
        """
        current = self._remembered()
        if version == self.version:
            return self.score(canary), self._collector.collect(current, self.dtype)
        if version not in self.history:
            raise Refusal(f"version {version} can't be published: the trainer is at {self.version}")
        with self.history.loaded(version, current=self.version):
            own = self.history.remember(version)
            return self.score(canary), self._collector.collect(own, self.dtype)

    def weights(self) -> Mapping[str, Tensor]:
        """A copy of the current version's weights in host memory, under Megatron's names; never changes.

        Of a group the first process has them, whole, and the others none.
        """
        return self._collector.collect(self._remembered(), self.dtype)

    def _remembered(self) -> Mapping[str, Tensor]:
        self.optimizer.require_whole()
        return self.history.remember(self.version)

    def named_weights(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """``weights`` under their Hugging Face names, in that layout."""
        return to_hugging_face(self.architecture, weights)

    def export(self, path: Path) -> None:
        """Write the current weights as a Hugging Face folder; ``FileExistsError`` when ``path`` is there."""
        if path.exists():
            raise FileExistsError(f"{path} is there already: remove it, or choose another path")
        weights = self.weights()
        if self.ranks.rank == 0:
            write_export(self.model_dir, path, self.named_weights(weights), self.dtype)

    @torch.no_grad()
    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        names = [name for name, _ in self.model.parameters()]
        converted = to_megatron(self.architecture, names, weights)
        for name, parameter in self.model.parameters():
            share = cut_share(name, converted[name], *share_of(name))
            if share.shape != parameter.shape:
                raise ValueError(
                    f"weight {name} has shape {tuple(share.shape)}, but the config gives {tuple(parameter.shape)}"
                )
            parameter.copy_(share)

    # --- checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path) -> None:
        """Write everything that training goes on from; again for the same state, it is left as it is.

        ``FileExistsError`` when ``path`` is there and holds anything else.
        """
        self.begin_checkpoint(path)()
        self.finish_checkpoint(path)

    def make_way(self, path: Path) -> None:
        """Remove a checkpoint of another state in ``path``: it was written and nobody lived to hear of it."""
        if checkpoint.is_one(path) and not self._is_saved(path):
            checkpoint.remove(path)

    def begin_checkpoint(self, path: Path, *, score: float | None = None) -> Callable[[], None]:
        """Copy what ``save_checkpoint`` would write; the call that writes it, for any thread.

        Training may go on before that is done and ``finish_checkpoint`` makes the checkpoint appear.
        """
        self.optimizer.require_whole()
        if not self.will_save(path):
            return lambda: None
        told = msgspec.to_builtins(self.last_step) if self.last_step is not None else None
        record = checkpoint.Record(checkpoint.FORMAT, self.version, str(self.model.architecture), told, score)
        self._writing = checkpoint.Writing(path, self.model, self.optimizer, record, self.ranks)
        return self._writing.write

    def finish_checkpoint(self, path: Path) -> None:
        """The checkpoint that was begun is written by all: make it appear."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()

    @staticmethod
    def prune_checkpoints(path: Path, keep: int, *, keep_best: bool = False) -> None:
        """As of ``checkpoint.remove_older``, from any thread."""
        checkpoint.remove_older(path, keep, keep_best=keep_best)

    def will_save(self, path: Path) -> bool:
        """Whether ``save_checkpoint`` writes; ``FileExistsError`` when ``path`` is there and holds anything else."""
        if self._is_saved(path):
            return False
        if path.exists() and self.ranks.rank == 0:
            raise FileExistsError(f"{path} is there already: remove it, or choose another path")
        return True

    def _is_saved(self, path: Path) -> bool:
        if not checkpoint.is_one(path):
            return False
        record = checkpoint.read_record(path)
        return record.version == self.version and record.last_step == msgspec.to_builtins(self.last_step)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from a checkpoint; ``CheckpointError`` when it can't be used, and then nothing is changed."""
        record = checkpoint.load(path, self.model, self.optimizer)
        self.version = record.version
        self._stream = None
        self.history.restart(record.version)
        self._answers.clear()
        if record.last_step is not None:
            self._answer(msgspec.convert(record.last_step, StepResult))


def _resolved(ids: Sequence[int | str]) -> list[int]:
    names = [each for each in ids if isinstance(each, str)]
    if names:
        raise ValueError(f"allowed_token_ids must be ids by now, but {names[:5]} are names")
    return [each for each in ids if isinstance(each, int)]


def _of(batch: Batch, wanted: Callable[[Algorithm], bool]) -> list[Trajectory]:
    """The trajectories whose algorithm is ``wanted``."""
    those = [wanted(algorithm) for algorithm in batch.algorithms]
    return [each for each in batch.trajectories if those[int(batch.algorithm[each.first])]]


def _penalties(batch: Batch, proximal: Tensor | None, reference: Tensor) -> Tensor:
    """What the divergence from the reference takes off the reward of each token, where it counts there; [N]."""
    penalties = torch.zeros_like(reference)
    for place, algorithm in enumerate(batch.algorithms):
        if algorithm.kl_coefficient and not algorithm.kl_in_loss:
            here = batch.algorithm == place
            decoupled = algorithm.denominator is Denominator.PROXIMAL and proximal is not None
            policy = proximal if decoupled and proximal is not None else batch.behaviour
            kl = kl_estimate(policy[here], reference[here], algorithm.kl)
            penalties[here] = algorithm.kl_coefficient * kl
    return penalties
