"""Hugging Face model folders: read for training, written as an export.

An export appears whole or not at all: it is written beside its place and then renamed.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["appearing", "read_config", "read_weights", "write_export"]

_NOT_COPIED = ("model", "pytorch_model", "training_args", "optimizer")


def read_config(folder: Path) -> Any:
    """The ``transformers`` config of the model in ``folder``; ``FileNotFoundError`` when there is none."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}: the model must be a Hugging Face folder")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def read_weights(folder: Path, config: Any, seed: int | None) -> dict[str, Tensor]:
    """The weights in ``folder``; where it has none, those that ``seed`` draws, the same each time.

    ``FileNotFoundError`` when there are no safetensors and no seed.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    if seed is None:
        raise FileNotFoundError(
            f"no *.safetensors in {folder}, and no model.random.seed in the config to draw weights from"
        )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return dict(model.state_dict())


def write_export(
    source: Path, target: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write ``weights`` with the config and tokenizer of ``source`` as the folder ``target``.

    ``FileExistsError`` when ``target`` is there already.
    """
    with appearing(target) as folder:
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith(_NOT_COPIED) and file.name != "config.json":
                shutil.copy2(file, folder / file.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.contiguous().cpu() for name, tensor in weights}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that becomes ``target`` when the block succeeds, and vanishes when not.

    ``FileExistsError`` when ``target`` is there already.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already: remove it, or choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
