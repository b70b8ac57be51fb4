"""What a train_step finds out about each sampled token, and the numbers it reports of it.

The importance ratios are those at the moment of training, with several minibatches thus of weights that the
earlier ones have moved.  The gaps compare the engine's log-probabilities with those recomputed under the same
weights: they measure the engine's numerical truth, not how far the policy has moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rollart.config.algorithm import Correction
from rollart.workers.megatron.batch import Batch
from rollart.workers.megatron.micro_batch import Trajectory
from rollart.workers.megatron.passes import Told

__all__ = ["TokenTable", "report"]

LAGS_TOLD = 4
"""Lags with a share of their own in the report; what is older is one."""


class TokenTable:
    """Arrays over the slots of ``batch``, filled as it is trained on."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        count = len(batch.behaviour)
        self.told = Told(*torch.zeros(len(Told._fields), count))
        self.gap = torch.zeros(count)
        self.verified = torch.zeros(count, dtype=torch.bool)
        self.unverifiable = 0
        self._chosen = torch.zeros(count, dtype=torch.bool)

    def choose(self, trajectory: Trajectory) -> None:
        """The tokens of ``trajectory`` are to be verified."""
        self._chosen[trajectory.slots] = True

    def cannot_verify(self, trajectory: Trajectory, version: int) -> None:
        """Its tokens of ``version`` can't be verified."""
        self.unverifiable += int((self.batch.versions[trajectory.slots] == version).sum())

    def scored(self, logprobs: Tensor, among: Tensor, version: int) -> None:
        """Log-probabilities [N] recomputed under the weights of ``version``, of the tokens ``among`` [N]."""
        here = self._chosen & (self.batch.versions == version) & among
        self.gap[here] = (logprobs[here] - self.batch.behaviour[here]).abs()
        self.verified[here] = True

    def trained(self, told: Told, *, scored_version: int | None) -> None:
        """What a training pass found; ``scored_version`` if it ran with exactly that version's weights."""
        for mine, new in zip(self.told, told, strict=True):
            mine += new
        if scored_version is not None:
            self.scored(told.logprobs, told.in_pass > 0, scored_version)


def report(tables: Sequence[TokenTable], *, version: int) -> dict[str, float]:
    """What is known of the tokens of one train_step on ``version``; numbers that are not finite are left out."""
    told = Told(*(torch.cat(parts) for parts in zip(*(table.told for table in tables), strict=True)))
    batches = [table.batch for table in tables]
    seen = told.trained > 0
    tokens = max(int(seen.sum()), 1)
    ratio = told.ratio[seen].double()
    some = bool(len(ratio))
    verified = torch.cat([table.verified for table in tables])
    gap = torch.cat([table.gap for table in tables])[verified].double()
    weights = torch.cat([batch.weights for batch in batches]).double()
    count = sum(batch.count(torch.arange(len(batch.behaviour))) for batch in batches)
    found: dict[str, Tensor | float] = {
        "loss": (weights * told.loss.double()).sum() / max(count, 1),
        "entropy": told.entropy[seen].double().sum() / tokens,
        "ratio_mean": ratio.sum() / tokens,
        "ratio_max": ratio.max() if some else 0.0,
        "ratio_min": ratio.min() if some else 0.0,
        "clip_share": told.clipped[seen].sum() / tokens,
        "approx_kl": (ratio - 1 - ratio.log()).sum() / tokens,
        "ess": ratio.sum() ** 2 / (tokens * (ratio**2).sum()) if some else 0.0,
        "logprob_gap_mean": gap.mean() if len(gap) else math.nan,
        "logprob_gap_max": gap.max() if len(gap) else math.nan,
        "logprob_gap_tokens": len(gap),
        "logprob_gap_unverifiable": sum(table.unverifiable for table in tables),
        "zero_signal_groups": sum(batch.zero_signal_groups for batch in batches),
        "mixed_version_sequences": sum(batch.mixed_version_sequences for batch in batches),
        "tokens": int(seen.sum()),
        "sequences": sum(len(batch.trajectories) for batch in batches),
    }
    versions = torch.cat([batch.versions for batch in batches])[seen]
    found.update(_lags(version - versions, tokens))
    found.update(_of_choices(told, seen, tokens, batches))
    numbers = {name: float(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _lags(lags: Tensor, tokens: int) -> dict[str, float]:
    """The share of the trained tokens by how many versions older they are."""
    shares = {f"train_lag_share/{lag}": int((lags == lag).sum()) / tokens for lag in range(LAGS_TOLD)}
    shares[f"train_lag_share/{LAGS_TOLD}+"] = int((lags >= LAGS_TOLD).sum()) / tokens
    return {name: share for name, share in shares.items() if share}


def _of_choices(told: Told, seen: Tensor, tokens: int, batches: Sequence[Batch]) -> dict[str, Tensor | float]:
    """What only some algorithms have."""
    algorithms = [algorithm for batch in batches for algorithm in batch.algorithms]
    found: dict[str, Tensor | float] = {}
    if any(algorithm.correction is not Correction.NONE for algorithm in algorithms):
        weight = told.weight[seen].double()
        found["correction_mean"] = weight.sum() / tokens
        found["correction_max"] = weight.max() if len(weight) else 0.0
        found["correction_zero_share"] = (weight == 0).sum() / tokens
    if any(algorithm.kl_coefficient for algorithm in algorithms):
        found["kl_reference"] = told.kl[seen].double().sum() / tokens
    if any(algorithm.mask_truncated for algorithm in algorithms):
        found["truncated_masked"] = sum(batch.truncated_masked for batch in batches)
    return found
