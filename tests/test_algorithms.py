"""Advantages and losses against formulas written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.algorithms.advantages import (
    STD_EPSILON,
    Episode,
    episode_advantages,
    group_relative,
    overlong_penalty,
    whitened,
)
from rollart.algorithms.losses import (
    SampledTokens,
    SamplingDistribution,
    entropy,
    kl_estimate,
    policy_loss,
)
from rollart.algorithms.sampling import TaskDistributions
from rollart.config import Algorithm, Config
from rollart.config.algorithm import Advantage, Correction, Denominator, KLEstimator, Loss, LossMean
from tests import algorithm_case as case

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
    tokens = SampledTokens(logprobs, behaviour, None, torch.tensor([advantage]), torch.tensor([0]))
    terms = policy_loss(tokens, Algorithm(clip_low=0.2, clip_high=0.3))
    torch.autograd.backward(terms.loss.sum())
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.clipped.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_entropy_of_equal_chances_is_the_logarithm_of_their_number() -> None:
    assert entropy(torch.full((2, 4), math.log(0.25))).tolist() == pytest.approx([math.log(4)] * 2)


# --- advantages of turns ------------------------------------------------------------------------------------

REWARD = st.sampled_from([0.0, 0.0, 0.5, 1.0, -1.0])
TURN = st.builds(case.Turn, st.integers(1, 4), REWARD, st.sampled_from(["a", "b", "c"]))
ATTEMPTS = st.lists(st.lists(TURN, min_size=1, max_size=5), min_size=2, max_size=6)


def episodes(group: list[case.Attempt]) -> list[Episode]:
    return [
        Episode(
            reward=sum(turn.reward for turn in attempt),
            turn_tokens=torch.tensor([turn.tokens for turn in attempt]),
            turn_rewards=torch.tensor([turn.reward for turn in attempt]),
            anchors=[turn.seen for turn in attempt],
        )
        for attempt in group
    ]


@pytest.mark.parametrize(
    ("algorithm", "by_hand"),
    [
        (Algorithm(), case.grpo),
        (Algorithm(normalize_std=False), case.dr_grpo),
        (Algorithm(advantage=Advantage.RLOO), case.rloo),
        (Algorithm(advantage=Advantage.REINFORCE_PLUS_PLUS), case.reinforce_plus_plus),
        (
            Algorithm(advantage=Advantage.REINFORCE_PLUS_PLUS, discount=0.9),
            lambda group: case.reinforce_plus_plus(group, 0.9),
        ),
        (
            Algorithm(advantage=Advantage.REINFORCE_PLUS_PLUS_BASELINE),
            case.reinforce_plus_plus_baseline,
        ),
        (
            Algorithm(advantage=Advantage.GIGPO, discount=0.95, turn_weight=0.5),
            lambda group: case.gigpo(group, 0.95, 0.5),
        ),
    ],
)
@given(group=ATTEMPTS)
@settings(max_examples=40, deadline=None)
def test_advantages_are_those_written_out_by_hand(
    algorithm: Algorithm, by_hand: Callable[..., list[list[float]]], group: list[case.Attempt]
) -> None:
    found = torch.cat(episode_advantages(episodes(group), algorithm))
    if algorithm.needs_whole_batch:
        found = whitened(found)
    expected = [value for attempt in by_hand(group) for value in attempt]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)


def test_a_return_passes_the_observations_undiscounted() -> None:
    """Three answers, a reward after the last only: each of its tokens knows of it, however much was read between."""
    attempt = [case.Turn(2, 0.0, "x"), case.Turn(1, 0.0, "y"), case.Turn(3, 1.0, "z")]
    algorithm = Algorithm(advantage=Advantage.REINFORCE_PLUS_PLUS, discount=0.5)
    (found,) = episode_advantages(episodes([attempt]), algorithm)
    assert found.tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_a_penalty_of_a_token_counts_for_it_and_what_came_before() -> None:
    episode = Episode(
        1.0, torch.tensor([2, 2]), torch.tensor([0.0, 1.0]), (), torch.tensor([0.1, 0.2, 0.3, 0.4])
    )
    (found,) = episode_advantages([episode], Algorithm(advantage=Advantage.REINFORCE_PLUS_PLUS))
    assert found.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.6], abs=1e-6)
    pair = episode_advantages(
        [episode, episode._replace(penalties=None)], Algorithm(advantage=Advantage.RLOO)
    )
    assert [each[0].item() for each in pair] == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("tokens", "expected"), [(60, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (120, -0.5)]
)
def test_the_overlong_punishment_rises_in_its_buffer(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, 100, 20, 0.5) == pytest.approx(expected)


# --- losses and corrections ---------------------------------------------------------------------------------

LOGPROB = st.floats(-4, -0.01)
TOKEN = st.builds(case.Token, LOGPROB, LOGPROB, LOGPROB, st.floats(-2, 2))
ALGORITHMS = [
    Algorithm(clip_low=0.2, clip_high=0.28),
    Algorithm(dual_clip=3.0),
    Algorithm(loss=Loss.GSPO, loss_mean=LossMean.SEQUENCE),
    Algorithm(loss=Loss.GSPO, clip_low=0.3, clip_high=0.5),
    Algorithm(loss=Loss.CISPO),
    Algorithm(loss=Loss.CISPO, clip_low=0.5, clip_high=2.0),
    Algorithm(loss=Loss.TOPR),
    Algorithm(loss=Loss.TOPR, topr_high=0.5),
    Algorithm(loss=Loss.REINFORCE),
    Algorithm(denominator=Denominator.PROXIMAL),
    Algorithm(denominator=Denominator.PROXIMAL, correction=Correction.IMPORTANCE),
    Algorithm(denominator=Denominator.PROXIMAL, correction=Correction.TRUNCATE, correction_high=1.5),
    Algorithm(denominator=Denominator.PROXIMAL, correction=Correction.MASK),
    Algorithm(loss=Loss.REINFORCE, denominator=Denominator.PROXIMAL, correction=Correction.TRUNCATE),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: "-".join(map(str, each.given().values())))
@given(sequences=st.lists(st.lists(TOKEN, min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_losses_and_their_gradients_are_those_written_out_by_hand(
    algorithm: Algorithm, sequences: list[list[case.Token]]
) -> None:
    if algorithm.loss is Loss.GSPO:  # the paper's advantages are those of sequences
        sequences = [[token._replace(advantage=each[0].advantage) for token in each] for each in sequences]
    columns = torch.tensor([token for each in sequences for token in each], dtype=torch.float64).T
    number = torch.tensor([row for row, each in enumerate(sequences) for _ in each])
    now = columns[0].clone().requires_grad_()
    tokens = SampledTokens(now, columns[1], columns[2], columns[3], number)
    terms = policy_loss(tokens, algorithm)
    torch.autograd.backward(terms.loss.sum())
    expected = [pair for each in sequences for pair in case.losses_and_slopes(each, algorithm)]
    assert terms.loss.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-6, abs=1e-9)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-9)


def test_estimates_of_the_divergence_have_its_mean() -> None:
    """Over the policy's own samples k1 and k3 have the exact divergence as their mean, and k2 nearly."""
    policy = torch.log_softmax(torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.zeros(4, dtype=torch.float64), 0)
    exact = float((policy.exp() * (policy - reference)).sum())
    found = {each: float((policy.exp() * kl_estimate(policy, reference, each)).sum()) for each in KLEstimator}
    assert found[KLEstimator.K1] == pytest.approx(exact)
    assert found[KLEstimator.K3] == pytest.approx(exact)
    assert found[KLEstimator.K2] == pytest.approx(exact, rel=0.2)
    apart = [-0.7, 0.0, 0.4]
    for each, formula in {
        KLEstimator.K1: lambda d: d,
        KLEstimator.K2: lambda d: d * d / 2,
        KLEstimator.K3: lambda d: math.exp(-d) - 1 + d,
    }.items():
        values = kl_estimate(torch.tensor(apart), torch.zeros(3), each).tolist()
        assert values == pytest.approx([formula(d) for d in apart])


def test_a_masked_token_counts_for_nothing_even_where_its_loss_is_infinite() -> None:
    algorithm = Algorithm(denominator=Denominator.PROXIMAL, correction=Correction.MASK)
    now = torch.tensor([800.0]).requires_grad_()
    tokens = SampledTokens(
        now, torch.tensor([-9.0]), torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([0])
    )
    terms = policy_loss(tokens, algorithm)
    assert terms.loss.item() == 0.0


# --- what the config refuses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{advantage: rloo, normalize_std: false}", "normalize_std does nothing with advantage: rloo"),
        ("{discount: 0.9}", "discount does nothing with advantage: group"),
        ("{advantage: returns, turn_weight: 2}", "turn_weight does nothing"),
        ("{loss: reinforce, clip_low: 0.1}", "clip_low does nothing with loss: reinforce"),
        ("{loss: gspo, dual_clip: 3}", "dual_clip does nothing"),
        ("{topr_high: 2}", "topr_high does nothing with loss: ppo"),
        ("{loss_mean_tokens: 5}", "loss_mean_tokens does nothing"),
        ("{loss_mean: constant}", "needs loss_mean_tokens"),
        ("{correction: truncate}", "does nothing with denominator: behaviour"),
        ("{loss: topr, denominator: proximal}", "does nothing with loss: topr"),
        ("{loss: reinforce, denominator: proximal}", "unless a correction"),
        (
            "{denominator: proximal, correction: importance, correction_high: 3}",
            "correction_high does nothing",
        ),
        ("{denominator: proximal, correction: truncate, correction_low: 0.1}", "correction_low does nothing"),
        ("{kl_estimator: k2}", "while kl_coefficient is 0"),
        ("{kl_place: reward}", "while kl_coefficient is 0"),
        ("{kl_coefficient: 0.1, kl_estimator: k1}", "expectation is 0"),
        ("{overlong_penalty: 1}", "without overlong_tokens"),
        ("{overlong_tokens: 10, overlong_buffer: 10}", "must be below overlong_tokens"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.yaml.decode(text, type=Algorithm)


def test_a_batch_has_one_mean() -> None:
    text = (
        "{name: r, steps: 1, model: {path: m}, tasks: [{name: a, environment: 'm:C', "
        "algorithm: {loss: gspo, loss_mean: sequence}}]}"
    )
    with pytest.raises(msgspec.ValidationError, match="a batch has one mean"):
        msgspec.yaml.decode(text, type=Config)


def test_tasks_with_distributions_of_their_own_in_one_softmax() -> None:
    alone = {
        "cold": SamplingDistribution(temperature=0.5, allowed=[2, 3], vocab_size=11),
        "warm": SamplingDistribution(temperature=1.0, allowed=[3, 9, 7], vocab_size=11),
        "same": SamplingDistribution(temperature=0.5, allowed=[3, 2], vocab_size=11),
    }
    both = TaskDistributions(alone)
    assert both.kind("cold") == both.kind("same") != both.kind("warm")
    logits = torch.randn(6, 11, requires_grad=True)
    names = ["cold", "warm", "same", "warm", "cold", "warm"]
    kinds = torch.tensor([both.kind(name) for name in names])
    found = both.log_softmax(logits, kinds)
    for row, name in enumerate(names):
        expected = alone[name].log_softmax(logits[row : row + 1])[0]
        for id in range(11):
            place, there = (
                alone[name].places(torch.tensor([id])),
                both.places(torch.tensor([id]), int(kinds[row])),
            )
            assert (int(place) < 0) == (int(there) < 0)
            if int(place) >= 0:
                assert torch.equal(found[row, there], expected[place])
        assert torch.allclose(entropy(found[row : row + 1]), entropy(expected[None]))
    entropy(found).sum().backward()
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())
    assert bool((logits.grad[0, [0, 1, 4, 5, 6, 7, 8, 9, 10]] == 0).all())
    free = TaskDistributions(
        {
            "free": SamplingDistribution(temperature=1.0, allowed=[], vocab_size=5),
            "bound": SamplingDistribution(temperature=1.0, allowed=[1], vocab_size=5),
        }
    )
    assert free.places(torch.tensor([0, 1]), free.kind("bound")).tolist() == [-1, 1]
    assert free.places(torch.tensor([0, 5]), free.kind("free")).tolist() == [0, -1]
