"""The distributions that the tasks of a run are sampled from, where they differ: one log-softmax for all tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollart.algorithms.losses import SamplingDistribution

__all__ = ["TaskDistributions"]

IMPOSSIBLE = -1e30
"""In the place of -inf, whose product with a probability of 0 is no number."""


class TaskDistributions:
    """Each task's ``SamplingDistribution``, over the tokens that any of them allows."""

    def __init__(self, tasks: Mapping[str, SamplingDistribution]) -> None:
        """All of one vocabulary."""
        kinds: dict[tuple[float, tuple[int, ...] | None], SamplingDistribution] = {}
        keys = {name: _key(each) for name, each in tasks.items()}
        for name, each in tasks.items():
            kinds.setdefault(keys[name], each)
        order = list(kinds)
        self._kind_of = {name: order.index(key) for name, key in keys.items()}
        self._first = next(iter(kinds.values()))
        self.vocab_size = self._first.vocab_size
        allowed = [each.allowed for each in kinds.values()]
        restricted = [ids.tolist() for ids in allowed if ids is not None]
        union = sorted(set().union(*restricted)) if len(restricted) == len(allowed) else []
        self._several = len(kinds) > 1
        self._union = SamplingDistribution(temperature=1.0, allowed=union, vocab_size=self.vocab_size)
        self._temperatures = torch.tensor([each.temperature for each in kinds.values()])
        possible = torch.tensor(union) if union else torch.arange(self.vocab_size)
        self._possible = torch.stack([each.places(possible) >= 0 for each in kinds.values()])

    def kind(self, task: str) -> int:
        """Which of the distributions ``task`` has; ``KeyError`` for an unknown one."""
        return self._kind_of[task]

    def places(self, ids: Tensor, kind: int) -> Tensor:
        """Where ids [n] stand among the possible tokens; -1 for those that this kind can't sample."""
        places = self._union.places(ids)
        return torch.where(self._possible[kind][places.clamp(min=0)] & (places >= 0), places, -1)

    def log_softmax(self, logits: Tensor, kinds: Tensor) -> Tensor:
        """Logits [n, vocabulary] of tokens of ``kinds`` [n] → log-probabilities of the possible tokens, float32
        [n, possible]."""
        if not self._several:
            return self._first.log_softmax(logits)
        if self._union.allowed is not None:
            logits = logits.index_select(-1, self._union.allowed.to(logits.device))
        scaled = logits.float() / self._temperatures[kinds].to(logits.device)[:, None]
        return torch.log_softmax(scaled.masked_fill(~self._possible[kinds].to(logits.device), IMPOSSIBLE), -1)


def _key(distribution: SamplingDistribution) -> tuple[float, tuple[int, ...] | None]:
    allowed = distribution.allowed
    return distribution.temperature, None if allowed is None else tuple(allowed.tolist())
