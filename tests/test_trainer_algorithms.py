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
from rollart.config_algorithm import Advantage, Correction, Denominator, KLPlace, Loss, LossMean
from rollart.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from rollart.protocol import TrainGroup
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
