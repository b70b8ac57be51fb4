"""Advantages: how much better than expected a trajectory, or one of its turns, was.

Nothing here needs a value model: what is expected is the mean of a group's other attempts, or of the batch.  Pure
functions of torch tensors.  A trajectory has K turns; a reward that comes after turn k counts for the sampled tokens
of turn k and all before it, and what the environment says in between (observation tokens) neither has an advantage
nor discounts anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.config.algorithm import Advantage, Algorithm

__all__ = [
    "STD_EPSILON",
    "Episode",
    "anchored",
    "episode_advantages",
    "group_relative",
    "leave_one_out",
    "overlong_penalty",
    "returns_to_go",
    "whitened",
]

STD_EPSILON = 1e-4
"""Added to the standard deviation, so that a group of nearly equal rewards is not blown up."""


class Episode(NamedTuple):
    """What advantages need to know of a trajectory with K turns and S sampled tokens."""

    reward: float
    turn_tokens: Tensor
    """int64 [K]: sampled tokens of each turn; they sum to S."""
    turn_rewards: Tensor
    """float32 [K]: what came after each turn; they sum to ``reward``."""
    anchors: Sequence[Hashable]
    """K: equal where the policy saw the same observation."""
    penalties: Tensor | None = None
    """float32 [S]: taken off the reward of each token, the divergence from a reference."""


def group_relative(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """The advantages of one group of G ≥ 2 trajectories: rewards [G] → [G].

    GRPO (arXiv 2402.03300): centred by the group's mean and, with ``normalize_std``, divided by its (unbiased)
    standard deviation; Dr. GRPO (arXiv 2503.20783) does not divide.  A group of equal rewards has advantages of
    exactly 0.  ``ValueError`` for fewer than two rewards.
    """
    _check_group(rewards)
    if bool((rewards == rewards[0]).all()):
        return rewards.new_zeros(rewards.shape)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPSILON) if normalize_std else centred


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): each reward less the mean of the others, [G] → [G], G ≥ 2 or ``ValueError``."""
    _check_group(rewards)
    count = rewards.numel()
    if bool((rewards == rewards[0]).all()):
        return rewards.new_zeros(rewards.shape)
    return (rewards - rewards.mean()) * (count / (count - 1))


def _check_group(rewards: Tensor) -> None:
    if rewards.ndim != 1 or rewards.numel() < 2:
        raise ValueError(
            f"a group needs at least 2 rewards to be compared, got a tensor of shape {tuple(rewards.shape)}"
        )


def returns_to_go(turn_rewards: Tensor, discount: float) -> Tensor:
    """The return from each turn on: rewards [K] → [K], a reward discounted once for each turn it lies ahead."""
    total = turn_rewards.new_zeros(())
    returns = torch.empty_like(turn_rewards)
    for turn in reversed(range(len(turn_rewards))):
        total = turn_rewards[turn] + discount * total
        returns[turn] = total
    return returns


def anchored(returns: Tensor, anchors: Sequence[Hashable], *, normalize_std: bool) -> Tensor:
    """GiGPO's step advantages (arXiv 2505.10978): ``group_relative`` among the turns that share an anchor, [n] → [n].

    A turn whose anchor no other turn has can't be compared and gets 0.
    """
    groups: dict[Hashable, list[int]] = {}
    for turn, anchor in enumerate(anchors):
        groups.setdefault(anchor, []).append(turn)
    advantages = torch.zeros_like(returns)
    for turns in groups.values():
        if len(turns) > 1:
            advantages[turns] = group_relative(returns[turns], normalize_std=normalize_std)
    return advantages


def whitened(values: Tensor) -> Tensor:
    """Centred by the mean and divided by the (unbiased) standard deviation, [n] → [n]; zeros where all are equal."""
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def overlong_penalty(tokens: int, most: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), scaled by ``penalty``: at most 0.

    0 up to ``most - buffer`` sampled tokens, then linearly down to ``-penalty`` at ``most``.
    """
    return -penalty * min(1.0, max(0.0, (tokens - (most - buffer)) / buffer))


def episode_advantages(group: Sequence[Episode], algorithm: Algorithm) -> list[Tensor]:
    """The advantage of each sampled token of each of the group's episodes, float32 [S].

    Where ``algorithm.needs_whole_batch`` they are still to be ``whitened`` over all tokens of the batch.
    ``ValueError`` for a group of fewer than two.
    """
    rewards = torch.tensor([_total(episode) for episode in group])
    if algorithm.advantage is Advantage.GROUP:
        return _per_token(group, group_relative(rewards, normalize_std=algorithm.divides_by_std))
    if algorithm.advantage is Advantage.RLOO:
        return _per_token(group, leave_one_out(rewards))
    if algorithm.advantage is Advantage.REINFORCE_PLUS_PLUS_BASELINE:
        return _per_token(group, group_relative(rewards, normalize_std=False))
    returns = [_token_returns(episode, algorithm.gamma) for episode in group]
    if algorithm.advantage is Advantage.REINFORCE_PLUS_PLUS:
        return returns
    if algorithm.advantage is Advantage.RETURNS:
        compared = group_relative(torch.cat(returns), normalize_std=algorithm.divides_by_std)
        return list(torch.split(compared, [len(each) for each in returns]))
    whole = group_relative(rewards, normalize_std=algorithm.divides_by_std)
    steps = anchored(
        torch.cat([returns_to_go(each.turn_rewards, algorithm.gamma) for each in group]),
        [anchor for each in group for anchor in each.anchors],
        normalize_std=algorithm.divides_by_std,
    )
    of_each = torch.split(steps, [len(each.turn_rewards) for each in group])
    return [
        (one + algorithm.omega * turns).repeat_interleave(episode.turn_tokens)
        for episode, one, turns in zip(group, whole, of_each, strict=True)
    ]


def _total(episode: Episode) -> float:
    penalty = 0.0 if episode.penalties is None else float(episode.penalties.sum())
    return episode.reward - penalty


def _per_token(group: Sequence[Episode], advantages: Tensor) -> list[Tensor]:
    return [
        advantage.expand(int(episode.turn_tokens.sum()))
        for episode, advantage in zip(group, advantages, strict=True)
    ]


def _token_returns(episode: Episode, discount: float) -> Tensor:
    """REINFORCE++'s returns (arXiv 2501.03262): the turn's return less the penalties from the token on, [S]."""
    if episode.penalties is None:
        return returns_to_go(episode.turn_rewards, discount).repeat_interleave(episode.turn_tokens)
    parts = torch.split(episode.penalties, episode.turn_tokens.tolist())
    own = torch.stack([part.sum() for part in parts])
    returns = returns_to_go(episode.turn_rewards - own, discount)
    # Within a turn the penalties of earlier tokens are no consequence of later ones.
    return torch.cat([total + part.cumsum(0) - part for total, part in zip(returns, parts, strict=True)])
