"""What a train_step trains on: samples from the wire, checked, and cut into padded micro-batches.

All sampled tokens of a batch stand one after the other, trajectory by trajectory; where a token stands there
is its slot, and everything known of sampled tokens is an array over slots.  A batch that breaks a rule of the
protocol is refused before anything is computed, with an error that names the trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollart.algorithms.advantages import group_relative
from rollart.algorithms.losses import SamplingDistribution
from rollart.config import MixedVersions
from rollart.protocol import TrainGroup, TrainSample
from rollart.workers.worker import Deterministic

__all__ = ["Batch", "MicroBatch", "Refusal", "Trajectory"]

_decoder = msgspec.msgpack.Decoder(TrainGroup)


class Refusal(Deterministic, ValueError):
    """A request breaks a rule and would be refused again; nothing was changed."""


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
    """b trajectories, padded on the right to T tokens, that hold n sampled tokens."""

    tokens: Tensor
    """int64 [b, T]."""
    rows: Tensor
    """int64 [n]: position · b + sequence of the token before each sampled one."""
    places: Tensor
    """int64 [n]: the sampled token's place among the possible ones."""
    slots: Tensor
    """int64 [n]."""

    def to(self, device: torch.device) -> MicroBatch:
        """On ``device``."""
        return MicroBatch(*(each.to(device) for each in (self.tokens, self.rows, self.places, self.slots)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of trajectories; N is the number of sampled tokens."""

    trajectories: list[Trajectory]
    groups: list[range]
    """The trajectories of each group."""
    behaviour: Tensor
    """float32 [N]: the engine's log-probabilities."""
    versions: Tensor
    """int64 [N]: the weights each token was sampled with."""
    places: Tensor
    """int64 [N]."""
    advantages: Tensor
    """float32 [N]: its trajectory's."""
    trained: Tensor
    """bool [N]: whether the token is in the loss."""
    zero_signal_groups: int
    """Groups whose rewards are all equal."""
    mixed_version_sequences: int

    @classmethod
    def decode(
        cls,
        frames: Sequence[bytes],
        *,
        version: int,
        distribution: SamplingDistribution,
        normalize_std: bool,
        mixed_versions: MixedVersions,
    ) -> Batch:
        """The batch in ``frames``, one encoded ``TrainGroup`` each, for a trainer at ``version``.

        ``Refusal`` for a frame that doesn't decode and for a sample that breaks the protocol.
        """
        builder = _Builder(version, distribution, mixed_versions)
        if not frames:
            raise Refusal("the batch has no groups")
        for index, frame in enumerate(frames):
            try:
                group = _decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise Refusal(f"payload frame {index} is no TrainGroup: {error}") from error
            builder.add(group, normalize_std)
        return builder.batch()

    def minibatches(self, count: int) -> list[list[Trajectory]]:
        """The groups in order, split into ``count`` nearly equal parts, or one a group if they are fewer."""
        count = min(count, len(self.groups))
        edges = [round(part * len(self.groups) / count) for part in range(count + 1)]
        return [
            [self.trajectories[member] for group in self.groups[low:high] for member in group]
            for low, high in pairwise(edges)
        ]

    def micro_batches(self, trajectories: Iterable[Trajectory], size: int) -> list[MicroBatch]:
        """``trajectories`` sorted by length, ``size`` at a time."""
        ordered = sorted(trajectories, key=lambda each: len(each.ids))
        return [self._pad(ordered[low : low + size]) for low in range(0, len(ordered), size)]

    def _pad(self, members: list[Trajectory]) -> MicroBatch:
        tokens = torch.zeros(len(members), len(members[-1].ids), dtype=torch.int64)
        for row, member in enumerate(members):
            tokens[row, : len(member.ids)] = member.ids
        rows = [(member.positions - 1) * len(members) + row for row, member in enumerate(members)]
        slots = torch.cat([torch.arange(member.slots.start, member.slots.stop) for member in members])
        return MicroBatch(tokens, torch.cat(rows), self.places[slots], slots)


class _Builder:
    def __init__(self, version: int, distribution: SamplingDistribution, mixed: MixedVersions) -> None:
        self._version = version
        self._distribution = distribution
        self._mixed = mixed
        self._trajectories: list[Trajectory] = []
        self._groups: list[range] = []
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self._first = 0
        self._zero_signal = 0
        self._mixed_count = 0

    def add(self, group: TrainGroup, normalize_std: bool) -> None:
        if len(group.samples) < 2:
            raise Refusal(
                f"group {group.group} of task {group.task} has {len(group.samples)} sample: "
                "a group needs at least 2 to be compared"
            )
        start = len(self._trajectories)
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float32)
        advantages = group_relative(rewards, normalize_std=normalize_std)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            self._add(sample, advantage)
        self._groups.append(range(start, len(self._trajectories)))
        self._zero_signal += bool((rewards == rewards[0]).all())

    def batch(self) -> Batch:
        behaviour, versions, places, advantages, trained = (
            torch.cat(parts) for parts in zip(*self._parts, strict=True)
        )
        return Batch(
            trajectories=self._trajectories,
            groups=self._groups,
            behaviour=behaviour,
            versions=versions,
            places=places,
            advantages=advantages,
            trained=trained,
            zero_signal_groups=self._zero_signal,
            mixed_version_sequences=self._mixed_count,
        )

    def _add(self, sample: TrainSample, advantage: Tensor) -> None:
        ids, positions, behaviour, versions = _arrays(sample)
        newest = int(versions.max())
        if newest > self._version or int(versions.min()) < 0:
            wrong = newest if newest > self._version else int(versions.min())
            raise Refusal(
                f"trajectory {sample.trajectory} has tokens of version {wrong}, "
                f"but the trainer is at version {self._version}"
            )
        places = self._distribution.places(ids[positions])
        if bool((places < 0).any()):
            token = int(ids[positions][places < 0][0])
            raise Refusal(
                f"trajectory {sample.trajectory}: token {token} was sampled, "
                "but it is not among the tokens that sampling.allowed_token_ids or the vocabulary allow"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._distribution.vocab_size:
            raise Refusal(
                f"trajectory {sample.trajectory}: ids reach from {int(ids.min())} to {int(ids.max())}, "
                f"but the vocabulary has {self._distribution.vocab_size} tokens"
            )
        mixed = bool((versions != newest).any())
        self._mixed_count += mixed
        masked = mixed and self._mixed is MixedVersions.MASK
        trained = versions == newest if masked else torch.ones_like(versions, dtype=torch.bool)
        self._parts.append((behaviour, versions, places, advantage.expand(len(positions)), trained))
        self._trajectories.append(Trajectory(sample.trajectory, ids, positions, self._first))
        self._first += len(positions)


def _arrays(sample: TrainSample) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [T], and positions, log-probabilities and versions [S]; ``Refusal`` if they don't fit."""
    where = f"trajectory {sample.trajectory}"
    if len(sample.ids) % 4 or len(sample.logprobs) % 4:
        raise Refusal(f"{where}: ids and logprobs must be packed 4 bytes a number")
    ids = np.frombuffer(sample.ids, "<i4")
    mask = np.frombuffer(sample.mask, np.uint8)
    logprobs = np.frombuffer(sample.logprobs, "<f4")
    counts = [run.count for run in sample.versions]
    positions = np.flatnonzero(mask)
    lengths = {"logprobs": len(logprobs), "versions": sum(counts)}
    if len(ids) != len(mask):
        raise Refusal(f"{where} has {len(ids)} ids, but its mask has {len(mask)} entries")
    if any(length != len(positions) for length in lengths.values()) or min(counts, default=0) < 1:
        raise Refusal(
            f"{where}: the mask marks {len(positions)} sampled tokens, but there are {lengths['logprobs']} "
            f"logprobs and version runs of {counts} tokens"
        )
    if mask.max() > 1 or mask[0]:
        raise Refusal(f"{where}: the mask must be 0 or 1, and 0 at the first token, which follows nothing")
    if not np.isfinite(logprobs).all() or logprobs.max() > 0:
        worst = logprobs[~(np.isfinite(logprobs) & (logprobs <= 0))][0]
        raise Refusal(f"{where}: log-probabilities must be finite and at most 0, one is {worst}")
    if not np.isfinite(sample.reward):
        raise Refusal(f"{where}: its reward is {sample.reward}")
    versions = np.repeat([run.version for run in sample.versions], counts)
    return (
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(logprobs.astype(np.float32)),
        torch.from_numpy(versions.astype(np.int64)),
    )
