"""Policy losses per token, and the log-probabilities they compare.  Pure functions of torch tensors.

A log-probability is always that of the distribution the engine sampled: the logits divided by the
temperature, every token outside ``allowed`` impossible, normalised in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PolicyTerms", "SamplingDistribution", "clipped_policy_loss", "entropy"]


class SamplingDistribution:
    """What the engine sampled from, given the logits: ``temperature`` > 0 and the ids that were allowed.

    An empty ``allowed`` means the whole vocabulary.  ``ValueError`` for an allowed id outside it.
    """

    def __init__(self, *, temperature: float, allowed: list[int], vocab_size: int) -> None:
        outside = [each for each in allowed if not 0 <= each < vocab_size]
        if outside:
            raise ValueError(
                f"allowed_token_ids {outside[:5]} are outside the model's vocabulary of {vocab_size} tokens"
            )
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.allowed = torch.tensor(sorted(set(allowed)), dtype=torch.int64) if allowed else None
        self._place = torch.arange(vocab_size)
        if self.allowed is not None:
            self._place = torch.full((vocab_size,), -1)
            self._place[self.allowed] = torch.arange(len(self.allowed))

    def places(self, ids: Tensor) -> Tensor:
        """Where ids [n] stand among the possible tokens; -1 for those that can't be sampled."""
        inside = (ids >= 0) & (ids < self.vocab_size)
        places = self._place.to(ids.device)[ids.clamp(0, self.vocab_size - 1)]
        return torch.where(inside, places, -1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Logits [n, vocabulary] → log-probabilities of the possible tokens, float32 [n, possible]."""
        if self.allowed is not None:
            logits = logits.index_select(-1, self.allowed.to(logits.device))
        return torch.log_softmax(logits.float() / self.temperature, -1)


class PolicyTerms(NamedTuple):
    """Of n sampled tokens, each [n]."""

    loss: Tensor
    """Differentiable, to be averaged over tokens."""
    ratio: Tensor
    """Probability now over probability when sampled; detached."""
    clipped: Tensor
    """bool: whether clipping took the token's gradient away."""


def clipped_policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """PPO's clipped loss (arXiv 1707.06347) with separate bounds as in DAPO (arXiv 2503.14476).

    ``logprobs`` are the current policy's, ``behaviour`` those the engine reported when it sampled, each [n]
    in nats.  The loss of a token is -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A).
    """
    ratio = torch.exp(logprobs - behaviour)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    free, held = ratio * advantages, bounded * advantages
    return PolicyTerms(-torch.minimum(free, held), ratio.detach(), (held < free).detach())


def entropy(log_distribution: Tensor) -> Tensor:
    """Log-probabilities [n, possible] → entropy in nats [n]."""
    return -(log_distribution.exp() * log_distribution).sum(-1)
