"""Policy losses per token, and the log-probabilities they compare.  Pure functions of torch tensors.

A log-probability is always that of the distribution the engine sampled: the logits divided by the
temperature, every token outside ``allowed`` impossible, normalised in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollart.config.algorithm import Algorithm, Correction, Denominator, KLEstimator, Loss

__all__ = [
    "PolicyTerms",
    "SampledTokens",
    "SamplingDistribution",
    "correction_weights",
    "entropy",
    "kl_estimate",
    "policy_loss",
]


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


class SampledTokens(NamedTuple):
    """n trained tokens of whole sequences; everything but ``logprobs`` is a constant."""

    logprobs: Tensor
    """[n] in nats, the policy's that is trained."""
    behaviour: Tensor
    """[n], those the engine reported when it sampled."""
    proximal: Tensor | None
    """[n], those of the weights at the start of the train_step; for ``denominator: proximal``."""
    advantages: Tensor
    """[n]."""
    sequences: Tensor
    """int64 [n]: which of the sequences a token is of, from 0."""


class PolicyTerms(NamedTuple):
    """Of n sampled tokens, each [n]."""

    loss: Tensor
    """Differentiable, to be averaged over tokens."""
    ratio: Tensor
    """Probability now over probability when sampled; detached."""
    clipped: Tensor
    """bool: whether clipping took the token's gradient away (cispo, topr: lowered it)."""
    weight: Tensor
    """What the correction weighted the token with, 1 without one; detached."""


def policy_loss(tokens: SampledTokens, algorithm: Algorithm) -> PolicyTerms:
    """The loss that ``algorithm.loss`` names.

    r is the policy's probability over that of the denominator (the engine's, or the proximal policy's), A the
    advantage, w the correction's weight (1 without one), sg stops the gradient.

    * ``ppo``: -w · min(r · A, clip(r, 1 - low, 1 + high) · A), PPO (arXiv 1707.06347) with the bounds apart as in
      DAPO (arXiv 2503.14476); with ``dual_clip`` c, at most -c · A where A < 0 (arXiv 1912.09729).  Over the
      proximal policy and with w = its ratio to the engine, decoupled PPO (arXiv 2110.00641, AReaL 2505.24298).
    * ``gspo``: as ppo with the sequence's ratio s = exp(mean of log r over its tokens) (arXiv 2507.18071), in the
      form GSPO-token, whose gradient is the same where the advantages of a sequence are.
    * ``cispo``: -sg(clip(r)) · w · A · log π (MiniMax-M1, arXiv 2506.13585).
    * ``topr``: -sg(t) · A · log π, t = 1 where A ≥ 0 and else the trajectory's ratio, the product of r over its
      tokens, at most ``topr_high`` (arXiv 2503.14286).
    * ``reinforce``: -w · A · log π (Williams 1992).
    """
    decoupled = algorithm.denominator is Denominator.PROXIMAL
    if decoupled and tokens.proximal is None:
        raise ValueError("denominator: proximal needs the log-probabilities of the proximal policy")
    old = tokens.proximal if decoupled and tokens.proximal is not None else tokens.behaviour
    weight = correction_weights(old, tokens.behaviour, algorithm)
    log_ratio = tokens.logprobs - old
    match algorithm.loss:
        case Loss.PPO:
            loss, clipped = _clipped(log_ratio.exp(), tokens.advantages, algorithm)
        case Loss.GSPO:
            mean = _of_sequence(log_ratio.detach(), tokens.sequences, mean=True)
            ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
            loss, clipped = _clipped(ratio, tokens.advantages, algorithm)
        case Loss.CISPO:
            low, high = algorithm.clip
            ratio = log_ratio.detach().exp()
            bounded = ratio.clamp(1 - low, 1 + high)
            loss, clipped = -bounded * tokens.advantages * tokens.logprobs, bounded != ratio
        case Loss.TOPR:
            ratio = _of_sequence(log_ratio.detach(), tokens.sequences, mean=False).exp()
            high = algorithm.topr_high or 1.0
            bad = tokens.advantages < 0
            taper = torch.where(bad, ratio.clamp(max=high), 1.0)
            loss, clipped = -taper * tokens.advantages * tokens.logprobs, bad & (ratio > high)
        case Loss.REINFORCE:
            loss = -tokens.advantages * tokens.logprobs
            clipped = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    ratio_to_engine = (tokens.logprobs.detach() - tokens.behaviour).exp()
    # Not weight * loss: where the weight is 0 a loss may be infinite, and the token must not count.
    loss = torch.where(weight > 0, weight * loss, 0.0)
    return PolicyTerms(loss, ratio_to_engine, clipped, weight)


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    low, high = algorithm.clip
    free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    objective, clipped = torch.minimum(free, held), held < free
    if algorithm.dual_clip is not None:
        floor = algorithm.dual_clip * advantages
        dual = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(dual, floor, objective), clipped | dual
    return -objective, clipped.detach()


def _of_sequence(values: Tensor, sequences: Tensor, *, mean: bool) -> Tensor:
    """The sum or mean over each token's sequence, for each token: [n] → [n]."""
    if not len(values):
        return values
    count = int(sequences.max()) + 1
    sums = values.new_zeros(count).index_add_(0, sequences, values)
    if mean:
        sums = sums / torch.bincount(sequences, minlength=count).clamp(min=1)
    return sums[sequences]


def correction_weights(proximal: Tensor, behaviour: Tensor, algorithm: Algorithm) -> Tensor:
    """What each token is weighted with for having been sampled by another policy than the proximal one, [n].

    w = exp(proximal - behaviour): ``importance`` w (decoupled PPO, arXiv 2110.00641); ``truncate`` min(w, high)
    (truncated importance sampling, Ionides 2008; between engine and trainer: Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"); ``mask`` w inside [low, high] and 0 outside (IcePop,
    Ring-1T, arXiv 2510.18855).
    """
    if algorithm.correction is Correction.NONE:
        return torch.ones_like(behaviour)
    weight = (proximal - behaviour).exp()
    low, high = algorithm.bounds
    if algorithm.correction is Correction.TRUNCATE:
        return weight.clamp(max=high)
    if algorithm.correction is Correction.MASK:
        return torch.where((weight >= low) & (weight <= high), weight, 0.0)
    return weight


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """A token's estimate of KL(policy ‖ reference) in nats, [n] (Schulman 2020, "Approximating KL divergence")."""
    apart = logprobs - reference
    match estimator:
        case KLEstimator.K1:
            return apart
        case KLEstimator.K2:
            return apart.square() / 2
        case KLEstimator.K3:
            return (-apart).exp() - 1 + apart


def entropy(log_distribution: Tensor) -> Tensor:
    """Log-probabilities [n, possible] → entropy in nats [n]."""
    return -(log_distribution.exp() * log_distribution).sum(-1)
