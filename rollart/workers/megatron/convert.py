"""Weights between Hugging Face's layout and Megatron-core's.

Megatron keeps query, key and value of a layer in one matrix, interleaved by key-value group (the queries of a
group, its key, its value), and the MLP's gate and up projections one above the other.  Both directions only
move numbers, so that a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rollart.workers.megatron.architecture import Architecture

__all__ = ["hugging_face_names", "to_hugging_face", "to_megatron"]

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_ROUTER = "mlp.router.weight"
_EXPERT = "mlp.experts.local_experts."
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_GATED = "mlp.linear_fc1.weight"


def to_megatron(
    shape: Architecture, names: Iterable[str], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors for Megatron's parameter ``names``, from a Hugging Face state dict.

    ``ValueError`` when the state dict lacks a weight or has one that belongs nowhere.
    """
    expected = set(hugging_face_names(shape))
    ignored = {name for name in weights if name.endswith("rotary_emb.inv_freq")}
    if shape.tied:
        ignored.add("lm_head.weight")
    missing, unknown = expected - weights.keys(), weights.keys() - expected - ignored
    if missing or unknown:
        raise ValueError(
            f"the weights don't fit a {shape.model_type} model of {shape.layers} layers: "
            f"missing {sorted(missing)[:5] or 'none'}, unknown {sorted(unknown)[:5] or 'none'}"
        )
    return {name: _gathered(shape, name, weights) for name in names}


def to_hugging_face(shape: Architecture, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of Megatron's ``weights``; a tied model has no ``lm_head.weight``."""
    for name, tensor in weights.items():
        if name in _TOP:
            if not (shape.tied and name == "output_layer.weight"):
                yield _TOP[name], tensor
            continue
        layer, part = _split(name)
        if part in _QKV:
            yield from zip(_qkv_names(layer, part), _split_qkv(shape, tensor), strict=True)
        elif part == _GATED:
            yield from zip(_gated_names(layer), tensor.chunk(2), strict=True)
        elif part == _ROUTER:
            yield _router_name(shape, layer), tensor
        elif part.startswith(_EXPERT):
            names = _expert_names(shape, layer, part)
            yield from zip(names, tensor.chunk(len(names)), strict=True)
        else:
            yield f"{layer}.{_LAYER[part]}", tensor


def hugging_face_names(shape: Architecture) -> Iterator[str]:
    """The names a state dict of this architecture has."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not shape.tied:
        yield "lm_head.weight"
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        for part, name in _LAYER.items():
            if (shape.qk_norm or "_layernorm" not in part or not part.startswith("self_attention")) and not (
                shape.experts and part.startswith("mlp.")
            ):
                yield f"{layer}.{name}"
        yield from _qkv_names(layer, _QKV[0])
        if shape.qkv_bias:
            yield from _qkv_names(layer, _QKV[1])
        if not shape.experts:
            yield from _gated_names(layer)
            continue
        yield _router_name(shape, layer)
        for expert in range(shape.experts):
            for part in ("linear_fc1", "linear_fc2"):
                yield from _expert_names(shape, layer, f"{_EXPERT}{expert}.{part}.weight")


def _split(name: str) -> tuple[str, str]:
    """``decoder.layers.3.mlp.x`` → ``model.layers.3``, ``mlp.x``."""
    _, _, number, part = name.split(".", 3)
    return f"model.layers.{number}", part


def _qkv_names(layer: str, part: str) -> list[str]:
    kind = part.rsplit(".", 1)[1]
    return [f"{layer}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]


def _gated_names(layer: str) -> list[str]:
    return [f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"]


def _router_name(shape: Architecture, layer: str) -> str:
    return f"{layer}.{'block_sparse_moe' if shape.model_type == 'mixtral' else 'mlp'}.gate.weight"


def _expert_names(shape: Architecture, layer: str, part: str) -> list[str]:
    """Of the gate and up projections, or of the down projection, of one expert."""
    number, linear, _ = part.removeprefix(_EXPERT).split(".")
    if shape.model_type == "mixtral":
        block, names = "block_sparse_moe", {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}
    else:
        block, names = "mlp", {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
    return [f"{layer}.{block}.experts.{number}.{name}.weight" for name in names[linear]]


def _gathered(shape: Architecture, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    if name == "output_layer.weight" and shape.tied:  # the last pipeline stage's copy
        return weights["model.embed_tokens.weight"]
    if name in _TOP:
        return weights[_TOP[name]]
    layer, part = _split(name)
    if part in _QKV:
        return _join_qkv(shape, [weights[each] for each in _qkv_names(layer, part)])
    if part == _GATED:
        return torch.cat([weights[each] for each in _gated_names(layer)])
    if part == _ROUTER:
        return weights[_router_name(shape, layer)]
    if part.startswith(_EXPERT):
        return torch.cat([weights[each] for each in _expert_names(shape, layer, part)])
    return weights[f"{layer}.{_LAYER[part]}"]


def _join_qkv(shape: Architecture, parts: list[Tensor]) -> Tensor:
    """[heads · d, …] and twice [groups · d, …] → [(heads + 2 · groups) · d, …]."""
    grouped = [part.reshape(shape.kv_heads, -1, shape.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(shape: Architecture, joined: Tensor) -> list[Tensor]:
    queries = shape.heads // shape.kv_heads
    grouped = joined.reshape(shape.kv_heads, queries + 2, shape.head_dim, *joined.shape[1:])
    return [part.reshape(-1, *joined.shape[1:]) for part in torch.split(grouped, [queries, 1, 1], 1)]
