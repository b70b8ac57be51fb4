"""The Megatron-core trainer against ``transformers`` and plain torch."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from rollart.algorithms.losses import SamplingDistribution
from rollart.algorithms.sampling import TaskDistributions
from rollart.config import (
    Algorithm,
    Config,
    Decay,
    DType,
    MixedVersions,
    Rollout,
    Sampling,
    Schedule,
    UpdateAt,
)
from rollart.config import Trainer as TrainerConfig
from rollart.config.tasks import TaskSampling
from rollart.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from rollart.protocol import TrainGroup, TrainSample, VersionRun, encode_group
from rollart.workers.megatron.architecture import Architecture, UnsupportedModel
from rollart.workers.megatron.batch import Batch, Refusal
from rollart.workers.megatron.checkpoint import CheckpointError, remove_older
from rollart.workers.megatron.core import StepResult, Trainer
from rollart.workers.megatron.micro_batch import MicroBatch
from tests.trainer_case import (
    ALLOWED,
    KINDS,
    TEMPERATURE,
    VOCABULARY,
    frames_of,
    grpo_steps,
    make_config,
    make_groups,
    reference_model,
    replaced,
    shape_of,
    write_model,
)

Make = Callable[..., Trainer]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root / kind, kind) for kind in KINDS}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["qwen3"]


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Builds trainers, and closes them."""
    made: list[Trainer] = []

    def build(config: Config | None = None, model_dir: Path = folder) -> Trainer:
        made.append(Trainer(config or make_config(), model_dir))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


def step(trainer: Trainer, groups: Any, step_id: int | None = None, share: float = 1.0) -> StepResult:
    return trainer.train_step(
        step_id=trainer.version if step_id is None else step_id,
        version=trainer.version,
        verify_share=share,
        frames=frames_of(groups),
    )


def all_logits(trainer: Trainer, ids: torch.Tensor) -> torch.Tensor:
    """Of ids [b, T]: [b, T, vocabulary]."""
    rows, length = ids.shape
    nothing = torch.zeros(0, dtype=torch.int64)
    micro = MicroBatch(ids, (length,) * rows, False, torch.arange(rows * length), nothing, nothing)
    return trainer.model.logits(trainer.model.module, micro)[1][0].view(length, rows, -1).transpose(0, 1)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    parameters = {name: value.detach().clone() for name, value in trainer.model.parameters()}
    return dict(trainer.named_weights(parameters))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# --- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_scores_equal_those_of_transformers(
    make: Make, folders: dict[str, Path], kind: str
) -> None:
    trainer, reference = make(model_dir=folders[kind]), reference_model(folders[kind])
    ids = torch.randint(0, VOCABULARY, (3, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits
        logits = all_logits(trainer, ids)
    assert torch.allclose(logits, expected, atol=1e-4)
    scores = expected[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert trainer.score(ids[0].tolist()) == pytest.approx(scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_bit_for_bit(make: Make, folders: dict[str, Path], kind: str) -> None:
    expected = load_file(folders[kind] / "model.safetensors")
    assert_same(weights_of(make(model_dir=folders[kind])), expected)


def test_a_folder_without_weights_gives_the_same_random_ones_from_the_same_seed(tmp_path: Path) -> None:
    shape_of("qwen3").save_pretrained(tmp_path)
    text = b"{name: r, steps: 1, model: {random: {seed: SEED}}, tasks: [{name: t, environment: 'm:C'}]}"

    def build(seed: bytes) -> dict[str, torch.Tensor]:
        trainer = Trainer(msgspec.yaml.decode(text.replace(b"SEED", seed), type=Config), tmp_path)
        trainer.close()
        return weights_of(trainer)

    assert_same(build(b"4"), build(b"4"))
    assert not torch.equal(build(b"4")["model.embed_tokens.weight"], build(b"5")["model.embed_tokens.weight"])
    with pytest.raises(FileNotFoundError, match="safetensors"):
        Trainer(make_config(), tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PreTrainedConfig(), "llama, mixtral, qwen2, qwen3, qwen3_moe"),
        (Qwen3Config(attention_bias=True), "attention_bias"),
        (Qwen3Config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_type"),
        (Qwen3Config(use_sliding_window=True, max_window_layers=0), "layer_types"),
    ],
)
def test_a_model_that_is_not_reproduced_exactly_is_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Architecture.of(config)


# --- the step ----------------------------------------------------------------------------------------------

LINEAR = (
    TrainerConfig(  # Adam's epsilon outweighs the gradient: weights move by the gradient itself, not its sign
        learning_rate=20.0,
        adam_eps=10.0,
        clip_grad_norm=0.7,
        micro_batch_sequences=3,
        weight_decay=0.001,
        warmup_optimizer_steps=3,
    )
)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.05])
def test_a_step_moves_the_weights_as_grpo_in_plain_torch(
    make: Make, folders: dict[str, Path], kind: str, minibatches: int, entropy_coefficient: float
) -> None:
    config = make_config(
        trainer=msgspec.structs.replace(LINEAR, minibatches=minibatches),
        algorithm=Algorithm(entropy_coefficient=entropy_coefficient, clip_high=0.28),
    )
    reference = reference_model(folders[kind])
    groups = make_groups(reference, config, groups=4, noise=0.5)
    trainer = make(config, folders[kind])
    before = weights_of(trainer)
    result = step(trainer, groups)
    parts = [groups] if minibatches == 1 else [groups[:2], groups[2:]]
    losses, norms = grpo_steps(reference, parts, config)

    assert result.skipped == ""
    assert result.metrics["optimizer_steps"] == minibatches
    assert 0.05 < result.metrics["clip_share"] < 0.9
    assert result.metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    if minibatches == 1:
        assert result.metrics["loss"] == pytest.approx(losses[0], abs=1e-5)
    after, expected = weights_of(trainer), reference.state_dict()
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    assert moved > 1e-2
    for name, value in after.items():
        assert torch.allclose(value, expected[name], atol=moved * 1e-3), name


def test_the_size_of_micro_batches_changes_nothing(make: Make, folder: Path) -> None:
    moved = []
    for size in (1, 5, 64):
        config = make_config(trainer=msgspec.structs.replace(LINEAR, micro_batch_sequences=size))
        trainer = make(config)
        step(trainer, make_groups(reference_model(folder), config, noise=0.3))
        moved.append(weights_of(trainer))
    for other in moved[1:]:
        assert all(torch.allclose(other[name], moved[0][name], atol=1e-5) for name in other)


def test_a_decaying_rate_reaches_zero_with_the_run(make: Make, folder: Path) -> None:
    options = TrainerConfig(learning_rate=1e-2, minibatches=2, learning_rate_decay=Decay.LINEAR)
    config = msgspec.structs.replace(make_config(trainer=options), steps=4)
    trainer = make(config)
    groups = make_groups(reference_model(folder), config, groups=2)
    rates = [
        trainer.train_step(
            step_id=number, version=number, verify_share=0.0, frames=[encode_group(group) for group in groups]
        ).metrics["learning_rate"]
        for number in range(4)
    ]
    # 8 optimiser steps; the metric is the rate of a train_step's last one.
    assert rates == pytest.approx([1e-2 * share for share in (6 / 8, 4 / 8, 2 / 8, 0.0)], abs=2e-3)
    assert rates == sorted(rates, reverse=True)


def test_fewer_groups_than_minibatches_make_a_step_each(make: Make, folder: Path) -> None:
    config = make_config(trainer=TrainerConfig(minibatches=8))
    result = step(make(config), make_groups(reference_model(folder), config, groups=3))
    assert result.metrics["optimizer_steps"] == 3


def test_on_policy_metrics_say_so(make: Make, folder: Path) -> None:
    groups = make_groups(reference_model(folder), make_config())
    metrics = step(make(), groups).metrics
    sampled = sum(sum(sample.mask) for group in groups for sample in group.samples)
    assert metrics["tokens"] == metrics["logprob_gap_tokens"] == sampled
    assert metrics["sequences"] == 12
    for name in ("ratio_mean", "ratio_max", "ess"):
        assert metrics[name] == pytest.approx(1, abs=1e-4), name
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_share"] == metrics["mixed_version_sequences"] == 0
    assert metrics["learning_rate"] == 1e-3
    assert metrics["train_seconds"] > 0


def test_a_trajectory_of_several_sequences_counts_once_in_its_baseline(folder: Path) -> None:
    """An agent that branched: its sequences share its advantage, and the others' baseline does not change."""
    config = make_config()
    model = reference_model(folder)
    (group,) = make_groups(model, config, groups=1, size=3)
    first, second, third = group.samples

    def decode(samples: list[TrainSample]) -> Batch:
        batch = Batch.decode(
            frames_of([TrainGroup(0, "task", samples)]),
            version=0,
            distribution=TaskDistributions(
                {
                    "task": SamplingDistribution(
                        temperature=TEMPERATURE, allowed=list(ALLOWED), vocab_size=VOCABULARY
                    )
                }
            ),
            algorithm_of=lambda task: config.algorithm,
            mixed_versions=MixedVersions.CORRECT,
        )
        batch.assign_advantages()
        return batch

    def advantages(batch: Batch) -> list[float]:
        return [float(batch.advantages[each.first]) for each in batch.trajectories]

    rewards = [1.0, 0.0, 0.5]
    samples = [msgspec.structs.replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True)]
    branch = msgspec.structs.replace(second, trajectory=first.trajectory, reward=1.0)
    plain, branched = decode(samples), decode([samples[0], branch, *samples[1:]])
    one, two, three = advantages(plain)
    assert advantages(branched) == [one, one, two, three]
    assert len(branched.episodes) == 3 and branched.groups == [range(4)]
    other = msgspec.structs.replace(branch, reward=0.0)
    with pytest.raises(Refusal, match="its sequences have different rewards"):
        decode([samples[0], other, *samples[1:]])
    with pytest.raises(Refusal, match="has 1 sample"):
        decode([samples[0], branch])
    assert third.trajectory not in (first.trajectory, second.trajectory)


def test_a_group_of_equal_rewards_is_counted_and_moves_nothing(make: Make, folder: Path) -> None:
    (group,) = make_groups(reference_model(folder), make_config(), groups=1)
    for member in range(4):
        group = replaced(group, member, reward=1.0)
    trainer = make()
    before = weights_of(trainer)
    metrics = step(trainer, [group]).metrics
    assert metrics["zero_signal_groups"] == 1
    assert metrics["grad_norm"] == 0
    assert_same(weights_of(trainer), before)


def test_a_step_that_comes_again_is_answered_from_memory(make: Make, folder: Path) -> None:
    groups = make_groups(reference_model(folder), make_config())
    trainer = make()
    first = step(trainer, groups, step_id=7)
    after = weights_of(trainer)
    again = trainer.train_step(step_id=7, version=0, verify_share=1.0, frames=frames_of(groups))
    assert again == first
    assert trainer.version == 1
    assert_same(weights_of(trainer), after)


@pytest.mark.parametrize("version", [1, -1])
def test_a_step_for_another_version_is_refused(make: Make, folder: Path, version: int) -> None:
    groups = make_groups(reference_model(folder), make_config())
    with pytest.raises(Refusal, match="the trainer is at version 0"):
        make().train_step(step_id=0, version=version, verify_share=0.0, frames=frames_of(groups))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_that_is_not_finite_leaves_nothing_behind(make: Make, folder: Path, minibatches: int) -> None:
    config = make_config(
        trainer=TrainerConfig(learning_rate=1e-2, minibatches=minibatches),
        algorithm=Algorithm(normalize_std=False),
    )
    good, bad = make_groups(reference_model(folder), config, groups=2)
    bad = replaced(replaced(bad, 0, reward=3e38), 1, reward=-3e38)
    trainer, untouched = make(config), make(config)
    before = weights_of(trainer)
    result = step(trainer, [good, bad], step_id=1)
    assert "loss" in result.skipped or "gradient" in result.skipped
    assert result.version == trainer.version == 0
    assert_same(weights_of(trainer), before)
    after, expected = step(trainer, [good], step_id=2), step(untouched, [good], step_id=2)
    assert after.metrics["loss"] == expected.metrics["loss"]
    assert after.metrics["learning_rate"] == expected.metrics["learning_rate"]
    assert_same(weights_of(trainer), weights_of(untouched))


@pytest.mark.parametrize(("minibatches", "failing"), [(1, 1), (2, 1), (2, 2)])
def test_an_optimizer_that_fails_half_way_is_undone_or_never_used_again(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, minibatches: int, failing: int
) -> None:
    config = make_config(trainer=TrainerConfig(learning_rate=1e-2, minibatches=minibatches))
    groups = make_groups(reference_model(folder), config, groups=2)
    trainer = make(config)
    before = weights_of(trainer)
    original, calls = trainer.optimizer.megatron.step_with_ready_grads, []

    def fail() -> None:
        original()
        calls.append(1)
        if len(calls) == failing:
            raise MemoryError("no room")

    monkeypatch.setattr(trainer.optimizer.megatron, "step_with_ready_grads", fail)
    with pytest.raises(MemoryError):
        step(trainer, groups, step_id=1)
    monkeypatch.undo()
    if minibatches == 1:
        with pytest.raises(RuntimeError, match="restart the trainer"):
            step(trainer, groups, step_id=1)
        with pytest.raises(RuntimeError, match="restart the trainer"):
            trainer.weights()
        return
    assert_same(weights_of(trainer), before)
    untouched = make(config)
    assert step(trainer, groups, step_id=1).skipped == step(untouched, groups, step_id=1).skipped == ""
    assert_same(weights_of(trainer), weights_of(untouched))


def test_weight_decay_spares_one_dimensional_weights(make: Make, folder: Path) -> None:
    config = make_config(trainer=TrainerConfig(learning_rate=0.1, weight_decay=0.5))
    (group,) = make_groups(reference_model(folder), config, groups=1)
    for member in range(4):
        group = replaced(group, member, reward=0.0)
    trainer = make(config)
    before = weights_of(trainer)
    step(trainer, [group])
    for name, value in weights_of(trainer).items():
        expected = before[name] * (0.95 if value.dim() > 1 else 1.0)
        assert torch.allclose(value, expected, atol=1e-6), name


# --- versions ----------------------------------------------------------------------------------------------


def mixed(group: Any, member: int, old: int, new: int) -> Any:
    """``group`` with one trajectory whose first token was sampled by ``old`` and the rest by ``new``."""
    count = sum(group.samples[member].mask)
    assert count > 1
    return replaced(group, member, versions=[VersionRun(old, 1), VersionRun(new, count - 1)])


def longest(group: Any) -> int:
    return max(range(len(group.samples)), key=lambda each: sum(group.samples[each].mask))


@pytest.mark.parametrize(("mode", "trains_all"), [(MixedVersions.CORRECT, True), (MixedVersions.MASK, False)])
def test_mask_trains_only_on_the_newest_version(
    make: Make, folder: Path, mode: MixedVersions, trains_all: bool
) -> None:
    config = make_config(rollout=Rollout(mixed_versions=mode))
    reference = reference_model(folder)
    trainer = make(config)
    step(trainer, make_groups(reference, config))
    groups = make_groups(reference, config, version=1, groups=1, seed=5)
    tokens = sum(sum(sample.mask) for sample in groups[0].samples)
    member = longest(groups[0])
    metrics = step(trainer, [mixed(groups[0], member, 0, 1)], share=0.0).metrics
    assert metrics["mixed_version_sequences"] == 1
    assert metrics["tokens"] == (tokens if trains_all else tokens - 1)


def test_masked_tokens_have_no_influence(make: Make, folder: Path) -> None:
    config = make_config(rollout=Rollout(mixed_versions=MixedVersions.MASK))
    reference = reference_model(folder)
    results = []
    for shift in (0.0, -3.0):
        trainer = make(config)
        step(trainer, make_groups(reference, config))
        (group,) = make_groups(reference, config, version=1, groups=1, seed=5)
        member = longest(group)
        logprobs = unpack_floats(group.samples[member].logprobs)
        logprobs[0] += shift
        group = replaced(mixed(group, member, 0, 1), member, logprobs=pack_floats(logprobs))
        step(trainer, [group], share=0.0)
        results.append(weights_of(trainer))
    assert_same(*results)


def test_each_task_is_trained_under_the_distribution_it_was_sampled_from(make: Make, folder: Path) -> None:
    """Two tasks, with temperatures and allowed tokens of their own, in one batch: no gap to either."""
    config = make_config()
    cold = TaskSampling(temperature=0.5, allowed_token_ids=[*ALLOWED, 2])
    tasks = [*config.tasks, msgspec.structs.replace(config.tasks[0], name="cold", sampling=cold)]
    own = msgspec.structs.replace(config, sampling=config.sampling_of(tasks[1]))
    config = msgspec.structs.replace(config, tasks=tasks)
    model = reference_model(folder)
    groups = make_groups(model, config, groups=2, seed=1)
    groups += [
        msgspec.structs.replace(group, group=10 + group.group, task="cold")
        for group in make_groups(model, own, groups=2, seed=2)
    ]
    metrics = step(make(config), groups).metrics
    assert metrics["logprob_gap_tokens"] == metrics["tokens"] and metrics["logprob_gap_max"] < 1e-4
    assert 0 < metrics["entropy"] < math.log(5)
    sample = groups[0].samples[0]
    ids = unpack_ids(sample.ids)
    ids[sample.mask.index(1)] = 2  # which only the other task allows
    with pytest.raises(Refusal, match="was sampled, but it is not among"):
        step(make(config), [replaced(groups[0], 0, ids=pack_ids(ids))])


def test_verification_recomputes_under_the_weights_that_sampled(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    """Tokens of two versions: true log-probabilities leave no gap, although the policy has moved since."""
    config = make_config(trainer=TrainerConfig(learning_rate=3e-2, minibatches=2))
    trainer = make(config)
    old = make_groups(reference_model(folder), config, groups=2, seed=1)
    step(trainer, make_groups(reference_model(folder), config))
    trainer.export(tmp_path / "v1")
    new = make_groups(reference_model(tmp_path / "v1"), config, version=1, groups=2, seed=2)
    metrics = step(trainer, old + new).metrics
    assert metrics["logprob_gap_tokens"] == metrics["tokens"]
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["approx_kl"] > 1e-3


def test_verification_finds_one_wrong_log_probability(make: Make, folder: Path) -> None:
    config = make_config()
    groups = make_groups(reference_model(folder), config)
    logprobs = unpack_floats(groups[1].samples[2].logprobs)
    logprobs[-1] -= 0.75
    groups[1] = replaced(groups[1], 2, logprobs=pack_floats(logprobs))
    metrics = step(make(), groups).metrics
    assert metrics["logprob_gap_max"] == pytest.approx(0.75, abs=1e-4)
    assert metrics["logprob_gap_mean"] == pytest.approx(0.75 / metrics["logprob_gap_tokens"], rel=1e-2)


def test_verify_share_chooses_trajectories(make: Make, folder: Path) -> None:
    groups = make_groups(reference_model(folder), make_config())
    part, none = step(make(), groups, share=0.25).metrics, step(make(), groups, share=0.0).metrics
    assert 3 <= part["logprob_gap_tokens"] < part["tokens"]
    assert none["logprob_gap_tokens"] == 0
    assert "logprob_gap_mean" not in none and "logprob_gap_max" not in none, "nothing verified is no gap of 0"


def test_a_token_of_a_version_that_is_not_kept_is_refused(make: Make, folder: Path) -> None:
    reference, config, trainer = reference_model(folder), make_config(), make()
    for version in range(3):
        step(trainer, make_groups(reference, config, version=version))
    with pytest.raises(
        Refusal, match="trajectory 0 has tokens of version 0, whose weights are no longer kept"
    ):
        step(trainer, make_groups(reference, config, version=0, groups=1, size=2))
    assert step(trainer, make_groups(reference, config, version=1)).skipped == ""


def test_without_a_bound_on_age_old_tokens_are_trained_unverified(make: Make, folder: Path) -> None:
    """The schedule areal keeps the bound at a trajectory's start only: its tokens may be of any version."""
    rollout = Rollout(schedule=Schedule.AREAL, update_at=UpdateAt.PUBLISH)
    reference, config = reference_model(folder), make_config(rollout=rollout)
    trainer = make(config)
    for version in range(3):
        step(trainer, make_groups(reference, config, version=version))
    result = step(trainer, make_groups(reference, config, version=0))
    assert result.skipped == ""
    assert result.metrics["logprob_gap_unverifiable"] == result.metrics["tokens"]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": b"\0\1"}, "ids, but its mask"),
        ({"logprobs": pack_floats([-1.0])}, "1 logprobs"),
        ({"logprobs": b"123"}, "4 bytes"),
        ({"logprobs": pack_floats([-1.0, float("nan")])}, "finite and at most 0, one is nan"),
        ({"logprobs": pack_floats([-1.0, 0.5])}, r"at most 0, one is 0\.5"),
        ({"versions": [VersionRun(0, 1)]}, r"version runs of \[1\]"),
        ({"versions": [VersionRun(0, 2), VersionRun(0, 0)]}, "version runs"),
        ({"versions": [VersionRun(9, 2)]}, "version 9.*at version 0"),
        ({"versions": [VersionRun(-1, 2)]}, "version -1"),
        ({"mask": b"\1\0\1"}, "0 at the first token"),
        ({"mask": b"\0\1\2"}, "0 or 1"),
        ({"mask": b"\0\0\0", "logprobs": b"", "versions": []}, "0 sampled tokens"),
        ({"ids": pack_ids([1, 5, 6])}, "token 6 was sampled"),
        ({"ids": pack_ids([VOCABULARY, 5, 7])}, "vocabulary has 48"),
        ({"reward": float("inf")}, "reward"),
    ],
)
def test_a_sample_that_breaks_the_protocol_is_refused_by_name(
    make: Make, folder: Path, changes: dict[str, Any], message: str
) -> None:
    (group,) = make_groups(reference_model(folder), make_config(), groups=1, size=2)
    fine = {
        "trajectory": 77,
        "ids": pack_ids([1, 5, 7]),
        "mask": b"\0\1\1",
        "logprobs": pack_floats([-1.0, -2.0]),
        "versions": [VersionRun(0, 2)],
    }
    trainer = make()
    with pytest.raises(Refusal, match=f"trajectory 77.*{message}"):
        step(trainer, [replaced(group, 1, **{**fine, **changes})])
    assert step(trainer, [replaced(group, 1, **fine)]).skipped == ""


def test_a_batch_that_is_none_is_refused(make: Make, folder: Path) -> None:
    trainer = make()
    (group,) = make_groups(reference_model(folder), make_config(), groups=1)
    with pytest.raises(Refusal, match="no groups"):
        step(trainer, [])
    with pytest.raises(Refusal, match="at least 2"):
        step(trainer, [msgspec.structs.replace(group, samples=group.samples[:1])])
    with pytest.raises(Refusal, match="frame 0"):
        trainer.train_step(step_id=0, version=0, verify_share=0.0, frames=[b"nonsense"])


@pytest.mark.parametrize("ids", [[], [3], [3, VOCABULARY], [-1, 3]])
def test_a_canary_that_cannot_be_scored_is_refused(make: Make, ids: list[int]) -> None:
    with pytest.raises(Refusal, match="at least 2"):
        make().score(ids)


# --- folders -----------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    children = multiprocessing.active_children()  # engines of other tests may run
    config = make_config(
        trainer=TrainerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_optimizer_steps=5, minibatches=2)
    )
    reference = reference_model(folder)
    batches = [make_groups(reference, config, version=version, seed=version) for version in range(4)]
    first = make(config)
    answers = [step(first, batch, step_id=10 + number, share=0.0) for number, batch in enumerate(batches[:2])]
    first.save_checkpoint(tmp_path / "checkpoint")
    expected = [step(first, batch, share=0.0).metrics["loss"] for batch in batches[2:]]

    second = make(config)
    second.load_checkpoint(tmp_path / "checkpoint")
    assert second.version == 2
    again = second.train_step(step_id=11, version=1, verify_share=0.0, frames=frames_of(batches[1]))
    assert again == answers[1]
    assert [step(second, batch, share=0.0).metrics["loss"] for batch in batches[2:]] == expected
    assert_same(weights_of(second), weights_of(first))
    assert set(multiprocessing.active_children()) <= set(children)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_the_start_is_one_too(make: Make, folder: Path, tmp_path: Path) -> None:
    groups = make_groups(reference_model(folder), make_config())
    first, second = make(), make()
    first.save_checkpoint(tmp_path / "checkpoint")
    second.load_checkpoint(tmp_path / "checkpoint")
    for trainer in (first, second):
        step(trainer, groups)
        step(trainer, groups)
    assert second.last_step is not None
    assert_same(weights_of(second), weights_of(first))


def test_tokens_from_before_a_restart_are_trained_unverified(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    config, reference = make_config(), reference_model(folder)
    first, second = make(), make()
    step(first, make_groups(reference, config))
    first.save_checkpoint(tmp_path / "checkpoint")
    second.load_checkpoint(tmp_path / "checkpoint")
    metrics = step(second, make_groups(reference, config, version=0)).metrics
    assert metrics["logprob_gap_tokens"] == 0
    assert metrics["logprob_gap_unverifiable"] == metrics["tokens"]


def test_a_checkpoint_is_never_overwritten_by_another(make: Make, folder: Path, tmp_path: Path) -> None:
    trainer = make()
    trainer.save_checkpoint(tmp_path / "checkpoint")
    trainer.save_checkpoint(tmp_path / "checkpoint")
    step(trainer, make_groups(reference_model(folder), make_config()))
    with pytest.raises(FileExistsError, match="there already"):
        trainer.save_checkpoint(tmp_path / "checkpoint")
    trainer.make_way(tmp_path / "checkpoint")
    trainer.save_checkpoint(tmp_path / "checkpoint")
    trainer.make_way(tmp_path / "checkpoint")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"], "the same state stays"


def test_older_checkpoints_go_and_nothing_else_does(tmp_path: Path) -> None:
    for name in ("step-999998", "step-999999", "step-1000000", "step-1000001", "step-1000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollart.json").touch()
    (tmp_path / "step-000001").mkdir()
    (tmp_path / ".step-000007.removed" / "cut off").mkdir(parents=True)
    remove_older(tmp_path / "step-1000001", 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000001", "step-1000000", "step-1000001", "step-1000002"}
    remove_older(tmp_path / "step-1000001", 9)
    assert left == {path.name for path in tmp_path.iterdir()}


def test_training_goes_on_while_a_checkpoint_is_written(make: Make, folder: Path, tmp_path: Path) -> None:
    """It has the state of its beginning, whatever is trained before it is there."""
    config = make_config(trainer=TrainerConfig(learning_rate=1e-2))
    batches = [make_groups(reference_model(folder), config, version=version) for version in range(2)]
    first, second = make(config), make(config)
    write = first.begin_checkpoint(tmp_path / "checkpoint", score=0.5)
    expected = [step(first, batch).metrics["loss"] for batch in batches]
    assert list(tmp_path.glob("checkpoint")) == []
    write()
    first.finish_checkpoint(tmp_path / "checkpoint")
    second.load_checkpoint(tmp_path / "checkpoint")
    assert second.version == 0
    assert [step(second, batch).metrics["loss"] for batch in batches] == expected
    first.begin_checkpoint(tmp_path / "never finished")
    first._writing.abandon()  # type: ignore[union-attr]  # as its end does
    first._writing = None
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_the_best_checkpoint_stays(make: Make, tmp_path: Path) -> None:
    trainer = make()
    for number, score in enumerate([0.1, 0.7, None, 0.3, 0.2]):
        path = tmp_path / f"step-{number}"
        trainer.begin_checkpoint(path, score=score)()
        trainer.finish_checkpoint(path)
        trainer.prune_checkpoints(path, 2, keep_best=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]


def test_what_is_no_checkpoint_of_the_model_is_refused(
    make: Make, folders: dict[str, Path], tmp_path: Path
) -> None:
    trainer = make()
    with pytest.raises(CheckpointError, match="not a whole one"):
        trainer.load_checkpoint(tmp_path)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="another model"):
        make(model_dir=folders["llama"]).load_checkpoint(tmp_path / "checkpoint")
    record = tmp_path / "checkpoint" / "rollart.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        trainer.load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_trained_model(
    make: Make, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    trainer = make(model_dir=folders[kind])
    step(trainer, make_groups(reference_model(folders[kind]), make_config()))
    trainer.export(tmp_path / "model")
    exported = reference_model(tmp_path / "model")
    ids = list(range(20, 40))
    with torch.no_grad():
        known = exported(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [known[place, token].item() for place, token in enumerate(ids[1:])]
    assert trainer.score(ids) == pytest.approx(expected, abs=1e-4)
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= {
        each.name for each in (tmp_path / "model").iterdir()
    }
    with pytest.raises(FileExistsError):
        trainer.export(tmp_path / "model")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_bfloat16_trains_exports_and_resumes(make: Make, folder: Path, tmp_path: Path) -> None:
    config = make_config(trainer=TrainerConfig(learning_rate=1e-3, dtype=DType.BFLOAT16))
    groups = make_groups(reference_model(folder), config)
    first, second = make(config), make(config)
    step(first, groups)
    first.save_checkpoint(tmp_path / "checkpoint")
    first.export(tmp_path / "model")
    second.load_checkpoint(tmp_path / "checkpoint")
    for trainer in (first, second):
        assert step(trainer, groups).skipped == ""
    assert_same(weights_of(first), weights_of(second))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.dtype == torch.bfloat16


def test_names_must_be_ids_by_the_time_the_trainer_starts(folder: Path) -> None:
    sampling = Sampling(temperature=TEMPERATURE, allowed_token_ids=[*ALLOWED, "left"])
    with pytest.raises(ValueError, match="left"):
        Trainer(make_config(sampling=sampling), folder)


def test_ids_and_packing_agree() -> None:
    assert unpack_ids(pack_ids(ALLOWED)) == ALLOWED
