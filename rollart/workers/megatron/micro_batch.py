"""Micro-batches: trajectories side by side, padded on the right, or one after the other without padding.

Every data-parallel rank has its own trajectories and as many micro-batches as the others, since experts exchange
tokens between them; where it has fewer, empty ones make up for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["MicroBatch", "Trajectory", "cut", "empty", "padding_share"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """T tokens, S of them sampled, which have the slots ``first`` to ``first + S - 1``."""

    number: int
    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [S]: where the sampled tokens are in ``ids``, in order, never 0."""
    first: int

    @property
    def slots(self) -> slice:
        """Its sampled tokens."""
        return slice(self.first, self.first + len(self.positions))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """b rows of T tokens that hold n sampled tokens; a packed one has one row with whole trajectories in it."""

    tokens: Tensor
    """int64 [b, T]."""
    lengths: tuple[int, ...]
    """Of the trajectories; of a packed one they sum to T."""
    packed: bool
    rows: Tensor
    """int64 [n]: position · b + row of the token before each sampled one."""
    slots: Tensor
    """int64 [n]."""
    sequences: Tensor
    """int64 [n]: which of its trajectories a sampled token is of, from 0."""

    def to(self, device: torch.device) -> MicroBatch:
        """On ``device``; slots and sequences stay, since what they index does."""
        return replace(self, tokens=self.tokens.to(device), rows=self.rows.to(device))

    @property
    def positions(self) -> Tensor:
        """int64 [b, T]: each token's place in its trajectory."""
        if self.packed:
            return torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.tokens.device)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)


def cut(
    trajectories: Sequence[Trajectory],
    *,
    sequences: int,
    tokens: int | None,
    ranks: int,
    rank: int,
    multiple: int = 1,
) -> list[MicroBatch]:
    """The micro-batches of data-parallel ``rank`` of ``ranks``; the same number on each.

    With ``tokens`` they are packed up to so many (a longer trajectory has one of its own), else ``sequences`` stand
    side by side.  The length of a row is a multiple of ``multiple``.
    """
    shares = _shares(trajectories, ranks)
    if tokens is None:
        parts = [
            [share[low : low + sequences] for low in range(0, len(share), sequences)] for share in shares
        ]
        made = [_pad(part, multiple) for part in parts[rank]]
    else:
        parts = [_bins(share, tokens) for share in shares]
        made = [_pack(part, multiple) for part in parts[rank]]
    most = max(len(part) for part in parts)
    return made + [empty(multiple, packed=tokens is not None) for _ in range(most - len(made))]


def _shares(trajectories: Sequence[Trajectory], ranks: int) -> list[list[Trajectory]]:
    """For each rank, sorted by length: the longest first to whom has the fewest tokens."""
    shares: list[list[Trajectory]] = [[] for _ in range(ranks)]
    load = [(0, 0, rank) for rank in range(ranks)]
    for trajectory in sorted(trajectories, key=lambda each: -len(each.ids)):
        tokens, count, rank = heapq.heappop(load)
        shares[rank].append(trajectory)
        heapq.heappush(load, (tokens + len(trajectory.ids), count + 1, rank))
    return [share[::-1] for share in shares]


def _bins(share: Sequence[Trajectory], tokens: int) -> list[list[Trajectory]]:
    """First-fit decreasing: ``share``, sorted by length, in bins of at most ``tokens``."""
    bins: list[list[Trajectory]] = []
    room: list[int] = []
    for trajectory in reversed(share):
        size = len(trajectory.ids)
        at = next((place for place, left in enumerate(room) if left >= size), None)
        if at is None:
            bins.append([trajectory])
            room.append(tokens - size)
        else:
            bins[at].append(trajectory)
            room[at] -= size
    return bins


def _pad(members: Sequence[Trajectory], multiple: int) -> MicroBatch:
    longest = max(len(member.ids) for member in members)
    tokens = torch.zeros(len(members), _up(longest, multiple), dtype=torch.int64)
    for row, member in enumerate(members):
        tokens[row, : len(member.ids)] = member.ids
    rows = [(member.positions - 1) * len(members) + row for row, member in enumerate(members)]
    return _micro_batch(tokens, members, rows, packed=False, filler=0)


def _pack(members: Sequence[Trajectory], multiple: int) -> MicroBatch:
    total = sum(len(member.ids) for member in members)
    filler = _up(total, multiple) - total
    tokens = torch.cat([*(member.ids for member in members), torch.zeros(filler, dtype=torch.int64)])[None]
    rows, start = [], 0
    for member in members:
        rows.append(member.positions - 1 + start)
        start += len(member.ids)
    return _micro_batch(tokens, members, rows, packed=True, filler=filler)


def _micro_batch(
    tokens: Tensor, members: Sequence[Trajectory], rows: list[Tensor], *, packed: bool, filler: int
) -> MicroBatch:
    lengths = tuple(len(member.ids) for member in members)
    return MicroBatch(
        tokens=tokens,
        lengths=(*lengths, filler) if filler else lengths,
        packed=packed,
        rows=torch.cat(rows),
        slots=torch.cat([torch.arange(member.slots.start, member.slots.stop) for member in members]),
        sequences=torch.cat([torch.full((len(each.positions),), row) for row, each in enumerate(members)]),
    )


def empty(multiple: int, *, packed: bool) -> MicroBatch:
    """One without a sampled token."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        torch.zeros(1, multiple, dtype=torch.int64), (multiple,), packed, nothing, nothing, nothing
    )


def padding_share(micro_batches: Sequence[MicroBatch], tokens: int) -> float:
    """Of what is computed for ``tokens`` real ones, the share that is padding."""
    computed = sum(micro.tokens.numel() for micro in micro_batches)
    return 1 - tokens / computed if computed else 0.0


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
