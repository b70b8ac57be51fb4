"""What the config's algorithm does to a whole train_step, and what must change nothing of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollart.config import Algorithm, Config, Recompute, Task
from rollart.config import Trainer as TrainerConfig
from rollart.config.algorithm import Advantage, Correction, Denominator, KLPlace, Loss, LossMean
from rollart.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from rollart.protocol import TrainGroup, encode_group
from rollart.workers.megatron.batch import Refusal
from rollart.workers.megatron.core import Trainer
from tests.test_trainer import Make, folder, folders, make, one_thread, step, weights_of  # noqa: F401
from tests.trainer_case import distribution, make_config, make_groups, reference_model, replaced

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
]
LINEAR = TrainerConfig(learning_rate=2.0, adam_eps=10.0, clip_grad_norm=5.0)
"""Weights move by the gradient itself, not its sign."""


@pytest.fixture
def trained(make: Make, folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Of a config: a trainer at version 1, with the models of versions 0 and 1 in ``transformers``."""

    def build(config: Config) -> tuple[Trainer, Any, Any]:
        trainer = make(config)
        groups = make_groups(reference_model(folder), config)
        assert step(trainer, groups, share=0.0).skipped == ""
        trainer.export(tmp_path / "v1")
        return trainer, reference_model(folder), reference_model(tmp_path / "v1")

    return build


def known_of(model: Any, group: TrainGroup, config: Config) -> list[list[float]]:
    """Log-probabilities of the sampled tokens of each of the group's trajectories."""
    found = []
    for sample in group.samples:
        ids = unpack_ids(sample.ids)
        with torch.no_grad():
            rows = distribution(model, ids, config)
        found.append([rows[at - 1, ids[at]].item() for at, mark in enumerate(sample.mask) if mark])
    return found


def test_corrections_references_and_means_make_the_loss_that_is_written_out_by_hand(trained: Any) -> None:
    config = make_config(
        trainer=LINEAR,
        algorithm=Algorithm(
            denominator=Denominator.PROXIMAL,
            correction=Correction.TRUNCATE,
            correction_high=1.2,
            kl_coefficient=0.3,
            loss_mean=LossMean.SEQUENCE,
        ),
    )
    trainer, old, new = trained(config)
    (group,) = make_groups(new, config, version=1, groups=1, noise=0.6, seed=3)
    rewards = torch.tensor([sample.reward for sample in group.samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    now, then = known_of(new, group, config), known_of(old, group, config)
    means, kls, weights = [], [], []
    for number, sample in enumerate(group.samples):
        losses = []
        for policy, reference, engine in zip(
            now[number], then[number], unpack_floats(sample.logprobs), strict=True
        ):
            weight = min(math.exp(policy - engine), 1.2)
            kl = math.exp(reference - policy) - 1 - (reference - policy)
            losses.append(-weight * float(advantages[number]) + 0.3 * kl)
            kls.append(kl)
            weights.append(weight)
        means.append(sum(losses) / len(losses))
    metrics = step(trainer, [group]).metrics
    assert metrics["loss"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert metrics["kl_reference"] == pytest.approx(sum(kls) / len(kls), abs=1e-5)
    assert metrics["kl_reference"] > 1e-5
    assert metrics["correction_mean"] == pytest.approx(sum(weights) / len(weights), abs=1e-4)
    assert metrics["correction_max"] == pytest.approx(1.2)


def test_a_divergence_in_the_reward_counts_there(trained: Any) -> None:
    algorithm = Algorithm(advantage=Advantage.RLOO, kl_coefficient=0.5, kl_place=KLPlace.REWARD)
    config = make_config(trainer=LINEAR, algorithm=algorithm)
    trainer, old, new = trained(config)
    (group,) = make_groups(new, config, version=1, groups=1, seed=3)
    then = known_of(old, group, config)
    totals = [
        sample.reward - 0.5 * sum(n - o for n, o in zip(unpack_floats(sample.logprobs), own, strict=True))
        for sample, own in zip(group.samples, then, strict=True)
    ]
    loss = tokens = 0.0
    for number, total in enumerate(totals):
        others = [each for place, each in enumerate(totals) if place != number]
        loss -= (total - sum(others) / len(others)) * len(then[number])
        tokens += len(then[number])
    assert step(trainer, [group]).metrics["loss"] == pytest.approx(loss / tokens, abs=1e-4)


def test_each_task_has_its_own_algorithm(make: Make, folder: Path) -> None:
    """The gradient of a batch of two tasks is the sum of what each has alone."""
    other = Algorithm(loss=Loss.CISPO, advantage=Advantage.RLOO)
    base = make_config(trainer=LINEAR)
    tasks = [*base.tasks, Task(name="other", environment="module:Class", algorithm=other)]
    config = msgspec.structs.replace(base, tasks=tasks)
    groups = make_groups(reference_model(folder), config, groups=2, noise=0.4)
    both = [groups[0], msgspec.structs.replace(groups[1], task="other")]
    alone = make_config(trainer=LINEAR, algorithm=other)
    found = step(make(config), both).metrics
    parts = [step(make(base), groups[:1]).metrics, step(make(alone), groups[1:]).metrics]
    assert found["loss"] * found["tokens"] == pytest.approx(
        sum(part["loss"] * part["tokens"] for part in parts), abs=1e-4
    )
    with pytest.raises(Refusal, match="task unknown, which the config has not"):
        step(make(config), [msgspec.structs.replace(groups[0], task="unknown")])


def test_a_truncated_trajectory_is_left_out_but_stays_in_the_baseline(make: Make, folder: Path) -> None:
    config = make_config(trainer=LINEAR, algorithm=Algorithm(mask_truncated=True, normalize_std=False))
    (group,) = make_groups(reference_model(folder), config, groups=1)
    cut = replaced(group, 0, truncated=True)
    metrics = step(make(config), [cut]).metrics
    rewards = [sample.reward for sample in group.samples]
    counts = [sum(sample.mask) for sample in group.samples]
    mean = sum(rewards) / len(rewards)
    expected = -sum((r - mean) * c for r, c in zip(rewards[1:], counts[1:], strict=True)) / sum(counts[1:])
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["truncated_masked"] == 1
    assert metrics["tokens"] == sum(counts[1:])


def test_turns_that_do_not_fit_are_refused(make: Make, folder: Path) -> None:
    (group,) = make_groups(reference_model(folder), make_config(), groups=1)
    sampled = sum(group.samples[0].mask)
    for changes in (
        {"turn_tokens": pack_ids([sampled + 1]), "turn_rewards": pack_floats([0.0])},
        {"turn_tokens": pack_ids([sampled]), "turn_rewards": pack_floats([0.0, 1.0])},
        {"turn_tokens": pack_ids([sampled]), "turn_rewards": pack_floats([math.nan])},
        {"turn_tokens": b"abc"},
    ):
        with pytest.raises(Refusal, match=f"trajectory {group.samples[0].trajectory}"):
            step(make(), [replaced(group, 0, **changes)])


@pytest.mark.parametrize("loss", [Loss.PPO, Loss.GSPO, Loss.TOPR])
def test_packing_padding_and_recompute_make_the_same_step(make: Make, folder: Path, loss: Loss) -> None:
    """Ragged trajectories: side by side, in one row, in several; whole layers and the attention computed again."""
    algorithm = Algorithm(loss=loss, kl_coefficient=0.1, entropy_coefficient=0.01)
    layouts = [
        {"micro_batch_sequences": 4},
        {"micro_batch_tokens": 1000},
        {"micro_batch_tokens": 20},
        {"micro_batch_tokens": 40, "recompute": Recompute.LAYERS},
        {"micro_batch_sequences": 3, "recompute": Recompute.ATTENTION},
    ]
    moved, losses, padding = [], [], []
    for layout in layouts:
        config = make_config(trainer=msgspec.structs.replace(LINEAR, **layout), algorithm=algorithm)
        trainer = make(config)
        groups = make_groups(reference_model(folder), config, groups=4, noise=0.3)
        metrics = step(trainer, groups).metrics
        losses.append(metrics["loss"])
        padding.append(metrics["padding_share"])
        moved.append(weights_of(trainer))
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    assert padding[0] > 0.02
    assert padding[1] == padding[2] == padding[3] == 0
    for other in moved[1:]:
        assert all(torch.allclose(other[name], moved[0][name], atol=1e-5) for name in other)


@pytest.mark.parametrize("loss_mean", [LossMean.TOKEN, LossMean.SEQUENCE])
def test_a_batch_that_streams_in_makes_the_step_of_one_that_is_whole(
    make: Make, folder: Path, loss_mean: LossMean
) -> None:
    algorithm = Algorithm(loss_mean=loss_mean, kl_coefficient=0.1, denominator=Denominator.PROXIMAL)
    config = make_config(trainer=msgspec.structs.replace(LINEAR, stream_batch=True), algorithm=algorithm)
    batches = [
        make_groups(reference_model(folder), config, groups=4, noise=0.3, seed=seed, version=seed)
        for seed in range(2)
    ]
    whole, streamed = make(config), make(config)
    for number, groups in enumerate(batches):
        frames = [encode_group(group) for group in groups]
        assert streamed.stream(step_id=90 + number, frames=frames[:2]) == 2, "of a step that never comes"
        for known in (1, 3, 3):
            assert streamed.stream(step_id=number, frames=frames[:known]) == known
        streamed.save_checkpoint(folder.parent / f"{loss_mean}-{number}-while-it-streams")
        streamed.score([3, 4, 5])
        expected, found = (
            trainer.train_step(step_id=number, version=number, verify_share=1.0, frames=frames)
            for trainer in (whole, streamed)
        )
        assert found.version == number + 1
        for name in ("loss", "grad_norm", "tokens", "sequences", "ess", "logprob_gap_mean", "kl_reference"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-6), name
        assert streamed.stream(step_id=number, frames=frames) == 4, "known already"
    mine, other = weights_of(streamed), weights_of(whole)
    assert all(torch.allclose(mine[name], other[name], atol=1e-5) for name in other)


def test_a_group_that_breaks_a_rule_or_is_not_finite_ends_its_stream_only(make: Make, folder: Path) -> None:
    config = make_config(trainer=msgspec.structs.replace(LINEAR, stream_batch=True))
    good, other = make_groups(reference_model(folder), config, groups=2)
    frames = [encode_group(good), encode_group(other)]
    trainer, untouched = make(config), make(config)
    with pytest.raises(Refusal, match="no TrainGroup"):
        trainer.stream(step_id=0, frames=[frames[0], b"nonsense"])
    never = pack_floats([-1000.0] * sum(other.samples[0].mask))
    bad = replaced(replaced(other, 0, reward=-1.0, logprobs=never), 1, reward=1.0)
    trainer.stream(step_id=1, frames=[encode_group(bad)])
    skipped = trainer.train_step(
        step_id=1, version=0, verify_share=0.0, frames=[encode_group(bad), frames[0]]
    )
    assert skipped.skipped and skipped.version == 0
    results = [
        each.train_step(step_id=2, version=0, verify_share=0.0, frames=frames)
        for each in (trainer, untouched)
    ]
    assert results[0].metrics["grad_norm"] == results[1].metrics["grad_norm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {stream_batch: true, minibatches: 2}", "needs minibatches: 1"),
        (
            "trainer: {stream_batch: true}, algorithm: {advantage: reinforce_plus_plus}",
            "over the whole batch",
        ),
        ("trainer: {micro_batch_tokens: 9, micro_batch_sequences: 9}", "give either"),
        ("trainer: {data_parallel: 2, expert_parallel: 4}", "must divide data_parallel"),
        ("trainer: {distributed_optimizer: true}", "does nothing while data_parallel is 1"),
        ("trainer: {context_parallel: 2}, algorithm: {loss: gspo}", "needs the ratio of whole trajectories"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(text: str, message: str) -> None:
    whole = f"{{name: r, steps: 9, model: {{path: m}}, tasks: [{{name: a, environment: 'm:C'}}], {text}}}"
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.yaml.decode(whole, type=Config)
