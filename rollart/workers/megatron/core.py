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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rollart.algorithms.losses import SamplingDistribution, clipped_policy_loss, entropy
from rollart.config import Config, DType, Schedule
from rollart.workers.megatron import checkpoint
from rollart.workers.megatron.architecture import Architecture
from rollart.workers.megatron.batch import Batch, MicroBatch, Refusal, Trajectory
from rollart.workers.megatron.convert import to_hugging_face, to_megatron
from rollart.workers.megatron.folder import read_config, read_weights, write_export
from rollart.workers.megatron.history import WeightHistory
from rollart.workers.megatron.metrics import TokenTable
from rollart.workers.megatron.model import LanguageModel
from rollart.workers.megatron.optimizer import Optimizer
from rollart.workers.megatron.parallel import join_parallel, leave_parallel

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


class Trainer:
    """Holds a model of ``model_dir`` and trains it as ``config`` says.

    ``UnsupportedModel``, ``FileNotFoundError`` or ``ValueError`` when the folder can't be trained.
    """

    def __init__(self, config: Config, model_dir: Path) -> None:
        self.config = config
        self.model_dir = model_dir
        self.version = 0
        hf_config = read_config(model_dir)
        self.architecture = Architecture.of(hf_config)
        self._distribution = SamplingDistribution(
            temperature=config.sampling.temperature,
            allowed=_resolved(config.sampling.allowed_token_ids),
            vocab_size=self.architecture.vocab_size,
        )
        seed = config.model.random.seed if config.model.random else None
        weights = read_weights(model_dir, hf_config, seed)
        self.dtype = TORCH_DTYPES[config.trainer.dtype]
        join_parallel(config.seed)
        try:
            self.model = LanguageModel(self.architecture, self.dtype)
            self._load_weights(weights)
            self.optimizer = Optimizer(self.model, config.trainer, steps=config.optimizer_steps)
        except BaseException:
            leave_parallel()
            raise
        self.history = WeightHistory(self.model, keep=config.rollout.staleness_bound + 2)
        self._schedule = get_forward_backward_func()
        self._answers: OrderedDict[int, StepResult] = OrderedDict()

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for _, parameter in self.model.parameters())

    def close(self) -> None:
        """Leave the process groups; the trainer can't be used afterwards."""
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
        if version != self.version:
            raise Refusal(
                f"train_step {step_id} is for version {version}, but the trainer is at version {self.version}"
            )
        started = time.perf_counter()
        batch = Batch.decode(
            frames,
            version=version,
            distribution=self._distribution,
            normalize_std=self.config.algorithm.normalize_std,
            mixed_versions=self.config.rollout.mixed_versions,
        )
        minibatches = batch.minibatches(self.config.trainer.minibatches)
        table = TokenTable(batch)
        self.history.remember(version)
        self._verify(batch, table, minibatches, step_id, verify_share)
        try:
            norms = self._train(batch, table, minibatches)
        except _NotFinite as error:
            logger.warning("train_step %d is skipped: %s", step_id, error)
            result = StepResult(step_id, version, str(error), table.metrics([], 0.0, started))
        else:
            self.version = version + 1
            metrics = table.metrics(norms, self.optimizer.learning_rate, started)
            result = StepResult(step_id, self.version, "", metrics)
        self._answer(result)
        return result

    def answered(self, step_id: int) -> StepResult | None:
        """The answer to a train_step that was made already."""
        return self._answers.get(step_id)

    @property
    def last_step(self) -> StepResult | None:
        """The answer to the last train_step."""
        return next(reversed(self._answers.values()), None)

    def _answer(self, result: StepResult) -> None:
        self._answers[result.step_id] = result
        while len(self._answers) > REMEMBERED_STEPS:
            self._answers.popitem(last=False)

    def _train(self, batch: Batch, table: TokenTable, minibatches: list[list[Trajectory]]) -> list[float]:
        """One optimiser step a minibatch; their gradient norms.  When it raises, the weights are as before."""
        before = self.optimizer.snapshot() if len(minibatches) > 1 else None
        norms: list[float] = []
        try:
            for trajectories in minibatches:
                norms.append(self._optimizer_step(batch, table, trajectories, first=not norms))
        except BaseException:
            if before is not None:
                self.optimizer.restore(before)
                self.history.load(self.version)
            raise
        finally:
            self.optimizer.zero_gradients()
        return norms

    def _optimizer_step(
        self, batch: Batch, table: TokenTable, trajectories: list[Trajectory], *, first: bool
    ) -> float:
        self.optimizer.zero_gradients()
        outputs = self._run(batch, trajectories, forward_only=False)
        for output in outputs:
            table.trained(output, scored_version=self.version if first else None)
        loss = sum(float(output["loss"].sum()) for output in outputs)
        if not math.isfinite(loss):
            raise _NotFinite(f"the loss is {loss}")
        norm = self.optimizer.gradient_norm()
        if not math.isfinite(norm):
            raise _NotFinite(f"the gradient's norm is {norm}")
        self.optimizer.apply(norm)
        return norm

    def _run(
        self, batch: Batch, trajectories: list[Trajectory], *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Megatron's schedule over the micro-batches of ``trajectories``; what the loss told of each."""
        micro_batches = batch.micro_batches(trajectories, self.config.trainer.micro_batch_sequences)

        def forward_step(data: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Tensor, Any]:
            micro = next(data).to(self.model.device)
            logits = self.model.logits(module, micro.tokens, micro.rows)
            loss = self._score if forward_only else self._loss
            return logits, lambda output: loss(batch, micro, output)

        outputs: list[dict[str, Tensor]] = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.optimizer.module],
            num_microbatches=len(micro_batches),
            seq_length=max(micro.tokens.shape[1] for micro in micro_batches),
            micro_batch_size=self.config.trainer.micro_batch_sequences,
            forward_only=forward_only,
        )
        return outputs

    def _loss(
        self, batch: Batch, micro: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the trained tokens' losses, their number, and what is told of each."""
        algorithm = self.config.algorithm
        trained = batch.trained[micro.slots.cpu()].to(logits.device)
        slots = micro.slots[trained]
        at = slots.cpu()
        distribution = self._distribution.log_softmax(logits)
        logprobs = distribution.gather(-1, micro.places[:, None])[:, 0]
        terms = clipped_policy_loss(
            logprobs[trained],
            batch.behaviour[at].to(logits.device),
            batch.advantages[at].to(logits.device),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        wanted = distribution if algorithm.entropy_coefficient else distribution.detach()
        entropies = entropy(wanted[trained])
        loss = terms.loss - algorithm.entropy_coefficient * entropies
        told = {
            "all_slots": micro.slots,
            "logprobs": logprobs,
            "slots": slots,
            "loss": loss,
            "ratio": terms.ratio,
            "clipped": terms.clipped,
            "entropy": entropies,
        }
        count = torch.tensor(len(slots), dtype=torch.int, device=logits.device)
        return loss.sum(), count, {name: value.detach().cpu() for name, value in told.items()}

    def _score(
        self, batch: Batch, micro: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs = self._distribution.log_softmax(logits).gather(-1, micro.places[:, None])[:, 0]
        told = {"all_slots": micro.slots.cpu(), "logprobs": logprobs.cpu()}
        return logprobs.sum(), torch.tensor(1, dtype=torch.int, device=logits.device), told

    # --- verification ---------------------------------------------------------------------------------

    def _verify(
        self,
        batch: Batch,
        table: TokenTable,
        minibatches: list[list[Trajectory]],
        step_id: int,
        share: float,
    ) -> None:
        """Recompute log-probabilities under the weights that sampled, for a share of the trajectories.

        Those of the current weights come from the training pass itself, as long as the weights are unchanged.
        """
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
            with self.history.loaded(version, current=self.version), torch.no_grad():
                for output in self._run(batch, trajectories, forward_only=True):
                    table.scored(output, version)

    def _is_kept(self, version: int, trajectory: Trajectory, table: TokenTable) -> bool:
        if version in self.history:
            return True
        rollout = self.config.rollout
        oldest = self.version - rollout.staleness_bound - 1
        unbounded = rollout.schedule is Schedule.AREAL  # it trains on tokens of any age
        if (
            unbounded or oldest <= version < self.history.first
        ):  # else: sampled before this trainer was restored
            table.unverifiable(trajectory, version)
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
        tokens = torch.tensor([list(ids)], device=self.model.device)
        rows = torch.arange(len(ids) - 1, device=tokens.device)
        distribution = torch.log_softmax(self.model.logits(self.model.module, tokens, rows), -1)
        scores: list[float] = distribution.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        return scores

    def snapshot(self, version: int, canary: Sequence[int]) -> tuple[list[float], Mapping[str, Tensor]]:
        """``score`` of ``canary`` and the weights of ``version``, which is the current one or still remembered.

        ``Refusal`` for another.
        """
        current = self.weights()
        if version == self.version:
            return self.score(canary), current
        if version not in self.history:
            raise Refusal(f"version {version} can't be published: the trainer is at {self.version}")
        with self.history.loaded(version, current=self.version):
            return self.score(canary), self.history.remember(version)

    def weights(self) -> Mapping[str, Tensor]:
        """A copy of the current version's weights in host memory, under Megatron's names; never changes."""
        self.optimizer.require_whole()
        return self.history.remember(self.version)

    def named_weights(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """``weights`` under their Hugging Face names, in that layout."""
        return to_hugging_face(self.architecture, weights)

    def export(self, path: Path) -> None:
        """Write the current weights as a Hugging Face folder; ``FileExistsError`` when ``path`` is there."""
        write_export(self.model_dir, path, self.named_weights(self.weights()), self.dtype)

    @torch.no_grad()
    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        names = [name for name, _ in self.model.parameters()]
        converted = to_megatron(self.architecture, names, weights)
        for name, parameter in self.model.parameters():
            if converted[name].shape != parameter.shape:
                raise ValueError(
                    f"weight {name} has shape {tuple(converted[name].shape)}, "
                    f"but the config gives {tuple(parameter.shape)}"
                )
            parameter.copy_(converted[name])

    # --- checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(self, path: Path, *, keep: int | None = None) -> None:
        """Write everything that training goes on from; again for the same state, it is left as it is.

        ``FileExistsError`` when ``path`` is there and holds anything else.  With ``keep``, only so many of
        the checkpoints beside it stay, this one and the newest of the older ones.
        """
        self.optimizer.require_whole()
        if not self._is_saved(path):
            checkpoint.save(path, self.model, self.optimizer, self.version, self.last_step)
        if keep is not None:
            checkpoint.remove_older(path, keep)

    def _is_saved(self, path: Path) -> bool:
        if not (path / checkpoint.RECORD).is_file():
            return False
        record = checkpoint.read_record(path)
        return record.version == self.version and record.last_step == msgspec.to_builtins(self.last_step)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from a checkpoint; ``CheckpointError`` when it can't be used, and then nothing is changed."""
        record = checkpoint.load(path, self.model, self.optimizer)
        self.version = record.version
        self.history.restart(record.version)
        self._answers.clear()
        if record.last_step is not None:
            self._answer(msgspec.convert(record.last_step, StepResult))


def _resolved(ids: Sequence[int | str]) -> list[int]:
    names = [each for each in ids if isinstance(each, str)]
    if names:
        raise ValueError(f"allowed_token_ids must be ids by now, but {names[:5]} are names")
    return [each for each in ids if isinstance(each, int)]
