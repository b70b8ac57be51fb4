"""What a train_step finds out about each sampled token, and the numbers it reports of it.

The importance ratios are those at the moment of training, with several minibatches thus of weights that the
earlier ones have moved.  The gaps compare the engine's log-probabilities with those recomputed under the same
weights: they measure the engine's numerical truth, not how far the policy has moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollart.workers.megatron.batch import Batch, Trajectory

__all__ = ["TokenTable"]


class TokenTable:
    """Arrays over the slots of ``batch``, filled as micro-batches are run."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        count = len(batch.behaviour)
        self._loss = torch.zeros(count)
        self._ratio = torch.zeros(count)
        self._clipped = torch.zeros(count, dtype=torch.bool)
        self._entropy = torch.zeros(count)
        self._seen = torch.zeros(count, dtype=torch.bool)
        self._gap = torch.zeros(count)
        self._chosen = torch.zeros(count, dtype=torch.bool)
        self._verified = torch.zeros(count, dtype=torch.bool)
        self._unverifiable = 0

    def choose(self, trajectory: Trajectory) -> None:
        """The tokens of ``trajectory`` are to be verified."""
        self._chosen[trajectory.slots] = True

    def unverifiable(self, trajectory: Trajectory, version: int) -> None:
        """Its tokens of ``version`` can't be verified."""
        self._unverifiable += int((self._batch.versions[trajectory.slots] == version).sum())

    def scored(self, output: dict[str, Tensor], version: int) -> None:
        """Log-probabilities recomputed under the weights of ``version``."""
        slots, batch = output["all_slots"], self._batch
        here = self._chosen[slots] & (batch.versions[slots] == version)
        at = slots[here]
        self._gap[at] = (output["logprobs"][here] - batch.behaviour[at]).abs()
        self._verified[at] = True

    def trained(self, output: dict[str, Tensor], *, scored_version: int | None) -> None:
        """What the training pass found; ``scored_version`` if it ran with exactly that version's weights."""
        slots = output["slots"]
        self._loss[slots] = output["loss"].float()
        self._ratio[slots] = output["ratio"].float()
        self._clipped[slots] = output["clipped"]
        self._entropy[slots] = output["entropy"].float()
        self._seen[slots] = True
        if scored_version is not None:
            self.scored(output, scored_version)

    def metrics(self, norms: Sequence[float], learning_rate: float, started: float) -> dict[str, float]:
        """The step's report, without numbers that are not finite; ``started``: ``time.perf_counter``."""
        seen = self._seen
        ratio = self._ratio[seen].double()
        tokens = max(int(seen.sum()), 1)
        gap = self._gap[self._verified].double()
        report: dict[str, Any] = {
            "loss": self._loss[seen].double().sum() / tokens,
            "grad_norm": sum(norms) / max(len(norms), 1),
            "entropy": self._entropy[seen].double().sum() / tokens,
            "learning_rate": learning_rate,
            "ratio_mean": ratio.sum() / tokens,
            "ratio_max": ratio.max() if len(ratio) else 0.0,
            "clip_share": self._clipped[seen].sum() / tokens,
            "approx_kl": (ratio - 1 - ratio.log()).sum() / tokens,
            "ess": ratio.sum() ** 2 / (tokens * (ratio**2).sum()) if len(ratio) else 0.0,
            "logprob_gap_mean": gap.mean() if len(gap) else math.nan,
            "logprob_gap_max": gap.max() if len(gap) else math.nan,
            "logprob_gap_tokens": len(gap),
            "logprob_gap_unverifiable": self._unverifiable,
            "zero_signal_groups": self._batch.zero_signal_groups,
            "mixed_version_sequences": self._batch.mixed_version_sequences,
            "tokens": int(seen.sum()),
            "sequences": len(self._batch.trajectories),
            "optimizer_steps": len(norms),
            "train_seconds": time.perf_counter() - started,
        }
        numbers = {name: float(value) for name, value in report.items()}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}
