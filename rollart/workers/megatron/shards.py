"""The share of a weight that a tensor-parallel process holds, and the whole again from the shares.

Megatron divides the embedding, the output layer and the first matrix of attention and MLP by rows, the second by
columns; of the joined gate and up projections each process holds the same rows of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from megatron.core import parallel_state
from torch import Tensor

from rollart.workers.megatron.parallel import Ranks

if TYPE_CHECKING:
    from rollart.workers.megatron.model import LanguageModel

__all__ = ["Collector", "cut_share", "join_shares", "share_dimension", "share_of"]

_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")
_ROW_PARTS = (".linear_qkv.weight", ".linear_qkv.bias")
_COLUMN_PARTS = (".linear_proj.weight", ".linear_fc2.weight")
_GATED = ".linear_fc1.weight"


def cut_share(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """What process ``rank`` of ``size`` holds of the weight ``name``."""
    if size == 1:
        return whole
    if name.endswith(_GATED):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    dimension = share_dimension(name)
    return whole if dimension is None else whole.chunk(size, dimension)[rank]


def join_shares(name: str, shares: Sequence[Tensor]) -> Tensor:
    """The whole weight from the shares of all processes, in order."""
    if len(shares) == 1:
        return shares[0]
    if name.endswith(_GATED):
        halves = zip(*(share.chunk(2) for share in shares), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    dimension = share_dimension(name)
    return shares[0] if dimension is None else torch.cat(list(shares), dimension)


def share_dimension(name: str) -> int | None:
    """By which dimension the weight ``name`` is divided; ``None``: each process has it whole."""
    if name in _ROWS or name.endswith((*_ROW_PARTS, _GATED)):
        return 0
    return 1 if name.endswith(_COLUMN_PARTS) else None


def share_of(name: str) -> tuple[int, int]:
    """This process's rank and the number of processes by which the weight ``name`` is divided."""
    if ".local_experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


class _Held(msgspec.Struct, array_like=True):
    """A share that a process holds."""

    name: str
    share: int
    shares: int
    shape: list[int]


class _Wanted(NamedTuple):
    name: str
    holders: list[int]
    """The process that gives each share, in order."""
    shapes: list[list[int]]


class Collector:
    """Brings the weights of all processes to the first one, a tensor at a time, over host memory."""

    def __init__(self, model: LanguageModel, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tied = model.architecture.tied
        self._plan = self._agree(model) if ranks.world > 1 else []

    def _agree(self, model: LanguageModel) -> list[_Wanted]:
        ranks = self._ranks
        mine = [_Held(name, *share_of(name), list(each.shape)) for name, each in model.parameters()]
        held: list[list[_Held]] = []
        for rank in range(ranks.world):
            size = ranks.add_up(
                torch.tensor(len(encoded := msgspec.msgpack.encode(mine)) if rank == ranks.rank else 0)
            )
            told = torch.zeros(int(size), dtype=torch.int32)
            if rank == ranks.rank:
                told = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).int()
            content = ranks.add_up(told).to(torch.uint8).numpy().tobytes()
            held.append(msgspec.msgpack.decode(content, type=list[_Held]))
        givers: dict[str, dict[int, tuple[int, list[int]]]] = {}
        for rank, shares in enumerate(held):
            for each in shares:
                if not (self._tied and each.name == "output_layer.weight"):
                    givers.setdefault(each.name, {}).setdefault(each.share, (rank, each.shape))
        return [
            _Wanted(name, [of[share][0] for share in sorted(of)], [of[share][1] for share in sorted(of)])
            for name, of in givers.items()
        ]

    def collect(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """On the first process all weights, whole; on the others nothing.  ``weights`` are this process's."""
        if self._ranks.world == 1:
            return weights
        return dict(self._exchange(weights, dtype))

    def _exchange(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        ranks = self._ranks
        for wanted in self._plan:
            if ranks.rank:
                for holder in wanted.holders:
                    if holder == ranks.rank:
                        ranks.send(weights[wanted.name], 0)
                continue
            shares = [
                weights[wanted.name] if holder == 0 else ranks.receive(shape, dtype, holder)
                for holder, shape in zip(wanted.holders, wanted.shapes, strict=True)
            ]
            yield wanted.name, join_shares(wanted.name, shares)
