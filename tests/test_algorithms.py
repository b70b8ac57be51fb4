"""Advantages and losses against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollart.algorithms.advantages import STD_EPSILON, group_relative
from rollart.algorithms.losses import SamplingDistribution, clipped_policy_loss, entropy

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def test_advantages_are_centred_and_divided_by_the_unbiased_deviation() -> None:
    advantages = group_relative(torch.tensor([0.0, 1.0, 1.0, 0.0]), normalize_std=True)
    deviation = math.sqrt(4 * 0.25 / 3)
    expected = [sign * 0.5 / (deviation + STD_EPSILON) for sign in (-1, 1, 1, -1)]
    assert advantages.tolist() == pytest.approx(expected)


def test_advantages_without_the_deviation_are_only_centred() -> None:
    assert group_relative(torch.tensor([0.0, 3.0]), normalize_std=False).tolist() == [-1.5, 1.5]


@given(st.floats(-100, 100, width=32), st.integers(2, 9), st.booleans())
def test_a_group_of_equal_rewards_has_no_signal_at_all(reward: float, size: int, normalize: bool) -> None:
    assert group_relative(torch.full((size,), reward), normalize_std=normalize).tolist() == [0.0] * size


@given(REWARDS, st.booleans())
def test_advantages_sum_to_nothing_and_keep_the_order(rewards: list[float], normalize: bool) -> None:
    values = torch.tensor(rewards)
    advantages = group_relative(values, normalize_std=normalize)
    assert float(advantages.double().sum()) == pytest.approx(0, abs=1e-3)
    order = values.argsort(stable=True)
    assert bool((advantages[order].diff() >= -1e-6).all())


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_fewer_than_two_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_relative(torch.tensor(rewards), normalize_std=True)


def test_log_probabilities_are_those_of_the_masked_and_tempered_distribution() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    distribution = SamplingDistribution(temperature=0.7, allowed=[2, 3, 9], vocab_size=11)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, [2, 3, 9]] = logits[:, [2, 3, 9]] / 0.7
    expected = masked.log_softmax(-1)[:, [2, 3, 9]]
    assert torch.allclose(distribution.log_softmax(logits), expected, atol=1e-6)


def test_places_find_the_allowed_tokens_and_no_others() -> None:
    distribution = SamplingDistribution(temperature=1.0, allowed=[9, 2, 3], vocab_size=11)
    assert distribution.places(torch.tensor([2, 3, 9, 0, 10, -1, 11])).tolist() == [0, 1, 2, -1, -1, -1, -1]


def test_without_allowed_tokens_the_whole_vocabulary_is_possible() -> None:
    distribution = SamplingDistribution(temperature=1.0, allowed=[], vocab_size=4)
    assert distribution.places(torch.tensor([0, 3, 4])).tolist() == [0, 3, -1]
    assert distribution.log_softmax(torch.zeros(1, 4)).exp().sum() == pytest.approx(1)


def test_an_allowed_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[11\].*11 tokens"):
        SamplingDistribution(temperature=1.0, allowed=[1, 11], vocab_size=11)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 1.0, -1.3, True),
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
    ],
)
def test_clipping_takes_the_gradient_away_only_where_the_policy_moved_too_far(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    behaviour = torch.tensor([-1.0])
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    terms = clipped_policy_loss(logprobs, behaviour, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3)
    torch.autograd.backward(terms.loss.sum())
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.clipped.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_entropy_of_equal_chances_is_the_logarithm_of_their_number() -> None:
    assert entropy(torch.full((2, 4), math.log(0.25))).tolist() == pytest.approx([math.log(4)] * 2)
