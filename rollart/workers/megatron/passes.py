"""Forward and backward passes over a batch by Megatron's schedule: log-probabilities of its tokens, and gradients.

Every process of the trainer calls the same methods with the same batch; what the last pipeline stage finds out about
the tokens is added up over all of them, so that all decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rollart.algorithms.losses import SampledTokens, entropy, kl_estimate, policy_loss
from rollart.algorithms.sampling import TaskDistributions
from rollart.config import Trainer as TrainerConfig
from rollart.workers.megatron.batch import Batch
from rollart.workers.megatron.micro_batch import MicroBatch, Trajectory, cut, padding_share
from rollart.workers.megatron.model import LanguageModel
from rollart.workers.megatron.parallel import Ranks

__all__ = ["Known", "Passes", "Told"]

Tell = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]]
"""Of a micro-batch and its logits: the loss, and what is told of each of its n sampled tokens, [columns, n]."""


class Known(NamedTuple):
    """Log-probabilities of the batch's N sampled tokens that a loss compares with, where one needs them."""

    proximal: Tensor | None = None
    reference: Tensor | None = None


class Told(NamedTuple):
    """What a training pass found out, each [N], 0 of tokens that were not in it."""

    logprobs: Tensor
    in_pass: Tensor
    trained: Tensor
    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    weight: Tensor
    entropy: Tensor
    kl: Tensor


class Passes:
    """Runs ``model`` inside ``module``, Megatron's wrapper with the gradient buffers."""

    def __init__(
        self,
        model: LanguageModel,
        module: torch.nn.Module,
        distribution: TaskDistributions,
        config: TrainerConfig,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._module = module
        self._distribution = distribution
        self._config = config
        self._ranks = ranks
        self._schedule = get_forward_backward_func()
        self.padding_share = 0.0
        """Of the last ``accumulate``, on this process."""

    def score(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Tensor:
        """Log-probabilities of the sampled tokens of ``trajectories`` under the model's weights, [N], else 0."""

        def tell(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
            logprobs = self._logprobs(batch, micro, self._log_softmax(batch, micro, logits))
            return logprobs.sum(), logprobs[None]

        return self._run(trajectories, tell, columns=1, count=len(batch.behaviour), forward_only=True)[0]

    def accumulate(self, batch: Batch, trajectories: Sequence[Trajectory], known: Known) -> Told:
        """Add the gradient of the sum of the trajectories' weighted losses to the buffers; nothing is scaled."""

        def tell(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
            return self._loss(batch, known, micro, logits)

        columns = len(Told._fields)
        return Told(
            *self._run(trajectories, tell, columns=columns, count=len(batch.behaviour), forward_only=False)
        )

    def finish(self, count: int) -> None:
        """The accumulated gradients are all there: add up those of the processes, and divide by ``count``."""
        finalize_model_grads([self._module])
        scale: Any = self._module.scale_gradients
        scale(1 / max(count, 1))

    def full_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ids[1:], each given the ids before it, at temperature 1 and over all tokens."""
        trajectory = Trajectory(0, torch.tensor(ids), torch.arange(1, len(ids)), 0)

        def tell(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
            following = torch.tensor(ids)[micro.slots + 1].to(logits.device)
            scores = torch.log_softmax(logits, -1).gather(-1, following[:, None])[:, 0]
            return scores.sum(), scores[None]

        scores: list[float] = self._run([trajectory], tell, columns=1, count=len(ids) - 1, forward_only=True)[
            0
        ].tolist()
        return scores

    # --- one pass -------------------------------------------------------------------------------------

    def _run(
        self, trajectories: Sequence[Trajectory], tell: Tell, *, columns: int, count: int, forward_only: bool
    ) -> Tensor:
        """Megatron's schedule over micro-batches of ``trajectories``; what is told, [columns, count]."""
        ranks, config = self._ranks, self._config
        micro_batches = cut(
            trajectories,
            sequences=config.sequences,
            tokens=config.micro_batch_tokens,
            ranks=ranks.data,
            rank=ranks.data_rank,
            multiple=self._model.length_multiple,
        )
        if not forward_only:
            real = sum(sum(micro.lengths) for micro in micro_batches if len(micro.slots))
            self.padding_share = padding_share(micro_batches, real)
        table = torch.zeros(columns, count)

        def forward_step(data: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Tensor, Any]:
            micro = next(data).to(self._model.device)
            micro, output = self._model.logits(module, micro)
            return output, lambda logits: losses(micro, logits)

        def losses(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, told = tell(micro, logits[0].float())
            if ranks.tells:
                table[:, micro.slots] = told.detach().float().cpu()
            return loss, torch.tensor(1, dtype=torch.int, device=loss.device), {}

        self._schedule(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._module],
            num_microbatches=len(micro_batches),
            seq_length=max(micro.tokens.shape[1] for micro in micro_batches),
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=forward_only,
        )
        return ranks.add_up(table)

    def _log_softmax(self, batch: Batch, micro: MicroBatch, logits: Tensor) -> Tensor:
        return self._distribution.log_softmax(logits, batch.sampling[micro.slots])

    def _logprobs(self, batch: Batch, micro: MicroBatch, distribution: Tensor) -> Tensor:
        places = batch.places[micro.slots].to(distribution.device)
        return distribution.gather(-1, places[:, None])[:, 0]

    def _loss(self, batch: Batch, known: Known, micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        distribution = self._log_softmax(batch, micro, logits)
        logprobs = self._logprobs(batch, micro, distribution)
        trained = batch.trained[micro.slots]
        told = torch.zeros(len(Told._fields), len(micro.slots))
        told[0], told[1], told[2] = logprobs.detach().cpu(), 1.0, trained.float()
        total = logprobs.sum() * 0.0  # of a micro-batch without a trained token, too
        for place, algorithm in enumerate(batch.algorithms):
            chosen = trained & (batch.algorithm[micro.slots] == place)
            if not bool(chosen.any()):
                continue
            slots, at = micro.slots[chosen], chosen.to(logits.device)

            def here(values: Tensor, slots: Tensor = slots) -> Tensor:
                return values[slots].to(logits.device)

            terms = policy_loss(
                SampledTokens(
                    logprobs=logprobs[at],
                    behaviour=here(batch.behaviour),
                    proximal=None if known.proximal is None else here(known.proximal),
                    advantages=here(batch.advantages),
                    sequences=micro.sequences[chosen].to(logits.device),
                ),
                algorithm,
            )
            wanted = distribution if algorithm.entropy_coefficient else distribution.detach()
            entropies = entropy(wanted[at])
            loss = terms.loss - algorithm.entropy_coefficient * entropies
            kl = torch.zeros_like(entropies)
            if algorithm.kl_coefficient and known.reference is not None:
                kl = kl_estimate(logprobs[at], here(known.reference), algorithm.kl)
                loss = loss + (algorithm.kl_coefficient * kl if algorithm.kl_in_loss else 0.0)
            total = total + (here(batch.weights) * loss).sum()
            rows = [loss, terms.ratio, terms.clipped, terms.weight, entropies, kl]
            told[3:, chosen] = torch.stack([row.detach().float().cpu() for row in rows])
        return total, told
