"""Advantages: how much better a trajectory was than the others of its group.

Group-relative, as in GRPO (arXiv 2402.03300): the group's mean reward is the baseline, so that no value model
is needed.  Pure functions of torch tensors.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["STD_EPSILON", "group_relative"]

STD_EPSILON = 1e-4
"""Added to the standard deviation, so that a group of nearly equal rewards is not blown up."""


def group_relative(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """The advantages of one group of G ≥ 2 trajectories: rewards [G] → [G].

    Centred by the group's mean and, with ``normalize_std``, divided by its (unbiased) standard deviation.
    A group of equal rewards has advantages of exactly 0.  ``ValueError`` for fewer than two rewards.
    """
    if rewards.ndim != 1 or rewards.numel() < 2:
        raise ValueError(
            f"a group needs at least 2 rewards to be compared, got a tensor of shape {tuple(rewards.shape)}"
        )
    if bool((rewards == rewards[0]).all()):
        return rewards.new_zeros(rewards.shape)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPSILON) if normalize_std else centred
