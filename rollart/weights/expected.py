"""What an engine loads: the tensors of its model folder, which every published version must have.

A version that the engine can't load would be found when the engine is suspended for it, and break it.  So the trainer
compares before it publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from rollart.weights.store import StoreError

__all__ = ["checked", "expected_shapes"]

TIED_HEAD = "lm_head.weight"
COMPUTED = "rotary_emb.inv_freq"
"""Older folders hold it; no engine loads it."""
Shapes = Mapping[str, tuple[int, ...]]


def expected_shapes(folder: Path) -> Shapes:
    """Shapes by name, of the weights in ``folder``, or where it has none of the model that its config describes."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith(COMPUTED)]  # noqa: SIM118
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if not shapes:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if getattr(config, "tie_word_embeddings", False):
            shapes.pop(TIED_HEAD, None)
    return shapes


def checked(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """``tensors`` as they are; ``StoreError``, naming the tensor, for one that the engine would not load or lacks."""
    missing = dict(expected)
    for name, tensor in tensors:
        if name not in expected and name != TIED_HEAD:
            raise StoreError(f"tensor {name!r} is none of the engine's model; it has {_some(expected)}")
        shape = missing.pop(name, tuple(tensor.shape))
        if tuple(tensor.shape) != shape:
            raise StoreError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the engine's model has {shape} there"
            )
        if tensor.dtype != dtype:
            raise StoreError(f"tensor {name!r} is {tensor.dtype}, the engine takes {dtype}")
        yield name, tensor
    missing.pop(TIED_HEAD, None)  # a folder may hold a copy of the embedding under this name
    if missing:
        raise StoreError(f"the version lacks {_some(missing)} of the engine's model")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(repr(name) for name in listed[:3]) + (" …" if len(listed) > 3 else "")
