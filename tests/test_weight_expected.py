"""A version that the engine can't load is refused before it is published, and the tensor named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollart.weights.expected import checked, expected_shapes
from rollart.weights.store import StoreError
from rollart.workers.megatron.core import Trainer
from tests.trainer_case import KINDS, make_config, write_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def served(folder: Path) -> Tensors:
    trainer = Trainer(make_config(), folder)
    try:
        _, weights = trainer.snapshot(0, list(range(3, 20)))
        return dict(trainer.named_weights(weights))
    finally:
        trainer.close()


def check(tensors: Tensors, folder: Path) -> Tensors:
    return dict(checked(tensors.items(), expected_shapes(folder), torch.float32))


def test_what_the_trainer_publishes_is_what_the_engine_takes(folder: Path, served: Tensors) -> None:
    assert check(served, folder) == served


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_a_folder_without_weights_is_described_by_its_config(kind: str, tmp_path: Path) -> None:
    """Such a folder is a random model's, which is a Qwen3."""
    (tmp_path / "whole").mkdir()
    whole = write_model(tmp_path / "whole", kind)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert expected_shapes(tmp_path) == expected_shapes(whole)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda name, t: (name, t[:-1]),
            r"tensor 'model\.norm\.weight' has shape \(\d+,\), the engine's model has",
        ),
        (
            lambda name, t: (name, t.bfloat16()),
            "tensor 'model.norm.weight' is torch.bfloat16, the engine takes",
        ),
        (
            lambda name, t: ("model.nrom.weight", t),
            "tensor 'model.nrom.weight' is none of the engine's model",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, served: Tensors, change: object, reason: str) -> None:
    wrong = dict(
        change(name, tensor) if name == "model.norm.weight" else (name, tensor)  # type: ignore[operator]
        for name, tensor in served.items()
    )
    with pytest.raises(StoreError, match=reason):
        check(wrong, folder)


def test_a_version_that_lacks_a_tensor_is_refused(folder: Path, served: Tensors) -> None:
    lacking = {name: tensor for name, tensor in served.items() if name != "model.norm.weight"}
    with pytest.raises(StoreError, match=r"lacks 'model\.norm\.weight'"):
        check(lacking, folder)
