"""Trainers of two processes do what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollart.config import Algorithm, Config, DType
from rollart.config import Trainer as TrainerConfig
from rollart.config.algorithm import Denominator, Loss
from rollart.workers.megatron.architecture import UnsupportedModel
from rollart.workers.megatron.batch import Refusal
from rollart.workers.megatron.group import TrainerGroup
from tests.test_trainer import assert_same, folders, one_thread  # noqa: F401
from tests.trainer_case import frames_of, make_config, make_groups, reference_model
from tests.trainer_mate import Mate

Open = Callable[..., TrainerGroup]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
]
LINEAR = TrainerConfig(learning_rate=2.0, adam_eps=10.0, clip_grad_norm=5.0, micro_batch_sequences=3)
"""Weights move by the gradient itself, not its sign."""


@pytest.fixture(scope="module")
def mate() -> Iterator[Mate]:
    mate = Mate()
    yield mate
    mate.close()


@pytest.fixture
def opened(mate: Mate, tmp_path: Path) -> Iterator[Open]:
    """Opens trainers, one at a time: the process groups are the process's."""
    last: list[TrainerGroup] = []

    def build(config: Config, model_dir: Path) -> TrainerGroup:
        close()
        last.append(TrainerGroup(config, model_dir, scratch=tmp_path, start=mate.start))
        return last[-1]

    def close() -> None:
        while last:
            last.pop().close()

    yield build
    close()
    assert list(tmp_path.glob("ranks-*")) == []


def step(trainer: TrainerGroup, groups: Any, share: float = 1.0) -> Any:
    return trainer.train_step(
        step_id=trainer.version, version=trainer.version, verify_share=share, frames=frames_of(groups)
    )


def whole(trainer: TrainerGroup) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.named_weights(trainer.weights())}


LAYOUTS = {
    "tp": ("qwen3-tied", {"tensor_parallel": 2}),
    "tp-qwen2": ("qwen2", {"tensor_parallel": 2, "micro_batch_sequences": None, "micro_batch_tokens": 40}),
    "tp-experts": ("qwen3-moe", {"tensor_parallel": 2}),
    "pp": ("qwen3-tied", {"pipeline_parallel": 2}),
    "pp-packed": ("llama", {"pipeline_parallel": 2, "micro_batch_sequences": None, "micro_batch_tokens": 40}),
    "dp": ("qwen3", {"data_parallel": 2}),
    "dp-shared": ("qwen3-tied", {"data_parallel": 2, "distributed_optimizer": True, "minibatches": 2}),
    "ep": ("qwen3-moe", {"data_parallel": 2, "expert_parallel": 2}),
    "ep-mixtral": ("mixtral", {"data_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True}),
    "cp": ("qwen3", {"context_parallel": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_make_the_steps_of_one(
    opened: Open,
    folders: dict[str, Path],
    tmp_path: Path,
    layout: str,
) -> None:
    kind, changes = LAYOUTS[layout]
    algorithm = Algorithm(denominator=Denominator.PROXIMAL, kl_coefficient=0.1, entropy_coefficient=0.01)
    if layout == "pp":
        algorithm = Algorithm(loss=Loss.GSPO)
    one = make_config(
        trainer=msgspec.structs.replace(LINEAR, minibatches=changes.get("minibatches", 1)),
        algorithm=algorithm,
    )
    two = msgspec.structs.replace(one, trainer=msgspec.structs.replace(LINEAR, **changes))
    reference = reference_model(folders[kind])
    batches = [make_groups(reference, one, groups=3, noise=0.2, seed=seed, version=seed) for seed in range(2)]
    found: list[Any] = []
    for config in (one, two):
        trainer = opened(config, folders[kind])
        start = whole(trainer)
        results = [step(trainer, batch).metrics for batch in batches]
        trainer.export(tmp_path / f"{layout}-{len(found)}")
        found.append((start, results, whole(trainer), trainer.score(list(range(3, 30)))))
    (start, expected, after, scores), (start2, results, after2, scores2) = found
    assert_same(start, start2)
    for mine, other in zip(results, expected, strict=True):
        for name in ("loss", "grad_norm", "entropy", "ratio_mean", "logprob_gap_mean"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=2e-5), name
        assert mine["tokens"] == other["tokens"]
    assert max(float((after[name] - start[name]).abs().max()) for name in after) > 1e-2
    for name in after:
        assert torch.allclose(after2[name], after[name], atol=1e-4), name
    assert scores2 == pytest.approx(scores, abs=1e-3)
    exported = reference_model(tmp_path / f"{layout}-1").state_dict()
    assert all(torch.isfinite(value).all() for value in exported.values())


def test_a_refusal_leaves_the_group_as_it_was(opened: Open, folders: dict[str, Path]) -> None:
    config = make_config(trainer=msgspec.structs.replace(LINEAR, data_parallel=2))
    trainer = opened(config, folders["qwen3"])
    groups = make_groups(reference_model(folders["qwen3"]), config)
    with pytest.raises(Refusal, match="no groups"):
        step(trainer, [])
    assert step(trainer, groups).skipped == ""
    with pytest.raises(Refusal, match="the trainer is at version 1"):
        trainer.train_step(step_id=5, version=0, verify_share=0.0, frames=frames_of(groups))
    again = trainer.train_step(step_id=0, version=0, verify_share=1.0, frames=frames_of(groups))
    assert again.version == 1


def test_a_batch_streams_into_two_processes(opened: Open, folders: dict[str, Path]) -> None:
    options = msgspec.structs.replace(LINEAR, data_parallel=2, distributed_optimizer=True, stream_batch=True)
    config = make_config(trainer=options)
    frames = frames_of(make_groups(reference_model(folders["qwen3"]), config, groups=3, noise=0.2))
    found = []
    for streams in (False, True):
        trainer = opened(config, folders["qwen3"])
        if streams:
            assert [trainer.stream(step_id=0, frames=frames[:known]) for known in (1, 2)] == [1, 2]
        result = trainer.train_step(step_id=0, version=0, verify_share=0.0, frames=frames)
        found.append((result.metrics["loss"], result.metrics["grad_norm"], whole(trainer)))
    (loss, norm, weights), (loss2, norm2, weights2) = found
    assert (loss2, norm2) == pytest.approx((loss, norm), rel=1e-4)
    assert all(torch.allclose(weights2[name], weights[name], atol=1e-5) for name in weights)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"tensor_parallel": 4}, r"tensor_parallel \(4\) must divide the model's key-value heads"),
        ("qwen3", {"pipeline_parallel": 3}, r"pipeline_parallel \(3\) must divide the model's layers"),
        ("qwen3", {"data_parallel": 2, "expert_parallel": 2}, "the qwen3 model has 0"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(
    folders: dict[str, Path],
    kind: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    from rollart.workers.megatron.core import Trainer

    with pytest.raises(UnsupportedModel, match=message):
        Trainer(make_config(trainer=TrainerConfig(**changes)), folders[kind])


def test_checkpoints_of_two_processes_go_on_as_if_never_interrupted(
    opened: Open,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    options = TrainerConfig(
        learning_rate=1e-2, weight_decay=0.1, data_parallel=2, distributed_optimizer=True, minibatches=2
    )
    config = make_config(trainer=options)
    reference = reference_model(folders["qwen3"])
    batches = [make_groups(reference, config, version=version, seed=version) for version in range(5)]
    trainer = opened(config, folders["qwen3"])
    for batch in batches[:2]:
        step(trainer, batch, share=0.0)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    expected = [step(trainer, batch, share=0.0).metrics["loss"] for batch in batches[2:]]
    weights = whole(trainer)

    trainer = opened(config, folders["qwen3"])
    trainer.load_checkpoint(tmp_path / "checkpoint")
    assert trainer.version == 2
    assert [step(trainer, batch, share=0.0).metrics["loss"] for batch in batches[2:]] == expected
    assert_same(whole(trainer), weights)


def test_a_checkpoint_is_loaded_into_another_layout(
    opened: Open,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    """One process, then two that divide each layer, then two that divide the layers, then one: the same steps."""
    base = TrainerConfig(learning_rate=1e-2, dtype=DType.FLOAT32)
    layouts = [base] + [
        msgspec.structs.replace(base, **changes)
        for changes in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}, {})
    ]
    config = make_config(trainer=base)
    reference = reference_model(folders["qwen3"])
    batches = [make_groups(reference, config, version=version, seed=version) for version in range(4)]
    whole_run = opened(config, folders["qwen3"])
    expected = [step(whole_run, batch, share=0.0).metrics["loss"] for batch in batches]
    losses = []
    for number, (layout, batch) in enumerate(zip(layouts, batches, strict=True)):
        trainer = opened(make_config(trainer=layout), folders["qwen3"])
        if number:
            trainer.load_checkpoint(tmp_path / str(number - 1))
        losses.append(step(trainer, batch, share=0.0).metrics["loss"])
        trainer.save_checkpoint(tmp_path / str(number))
    assert losses == pytest.approx(expected, rel=1e-3)
