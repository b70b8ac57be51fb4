"""What a train_step trains on: groups from the wire, checked, with an advantage for each sampled token.

All sampled tokens of a batch stand one after the other, trajectory by trajectory; where a token stands there
is its slot, and everything known of sampled tokens is an array over slots.  A batch that breaks a rule of the
protocol is refused before anything is computed, with an error that names the trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from rollart.algorithms.advantages import Episode, episode_advantages, overlong_penalty, whitened
from rollart.algorithms.sampling import TaskDistributions
from rollart.config import Algorithm, MixedVersions
from rollart.config.algorithm import LossMean
from rollart.protocol import TrainGroup, TrainSample
from rollart.workers.megatron.micro_batch import Trajectory
from rollart.workers.megatron.samples import Refusal, Sample, decode_sample

__all__ = ["Batch", "Refusal", "Trajectory"]

_decoder = msgspec.msgpack.Decoder(TrainGroup)


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of trajectories; N is the number of sampled tokens."""

    trajectories: list[Trajectory]
    groups: list[range]
    """The sequences of each group, in ``trajectories``."""
    algorithms: list[Algorithm]
    """Those of the batch's tasks, each once."""
    algorithm: Tensor
    """int64 [N]: the place of each token's in ``algorithms``."""
    sampling: Tensor
    """int64 [N]: which of the tasks' distributions each token was sampled from."""
    behaviour: Tensor
    """float32 [N]: the engine's log-probabilities."""
    versions: Tensor
    """int64 [N]: the weights each token was sampled with."""
    places: Tensor
    """int64 [N]."""
    trained: Tensor
    """bool [N]: whether the token is in the loss."""
    weights: Tensor
    """float32 [N]: of a trained token's loss in the sum that is divided by ``count``; 0 of the others."""
    ends: Tensor
    """int64 [N]: 1 at the last trained token of each sequence, else 0; sums of it count sequences."""
    advantages: Tensor
    """float32 [N]; zeros until ``assign_advantages``."""
    episodes: list[Episode]
    """One a trajectory, whatever its number of sequences."""
    members: list[range]
    """The episodes of each group."""
    member_slots: list[slice]
    """The sampled tokens of each episode."""
    zero_signal_groups: int
    """Groups whose rewards are all equal."""
    mixed_version_sequences: int
    truncated_masked: int
    """Trajectories that are out of the loss because they were cut."""
    loss_mean: LossMean

    @classmethod
    def decode(
        cls,
        frames: Sequence[bytes],
        *,
        version: int,
        distribution: TaskDistributions,
        algorithm_of: Callable[[str], Algorithm],
        mixed_versions: MixedVersions,
    ) -> Batch:
        """The batch in ``frames``, one encoded ``TrainGroup`` each, for a trainer at ``version``.

        ``algorithm_of(task)`` raises ``KeyError`` for an unknown one.  ``Refusal`` for a frame that doesn't decode
        and for a sample that breaks the protocol.
        """
        if not frames:
            raise Refusal("the batch has no groups")
        builder = _Builder(version, distribution, algorithm_of, mixed_versions)
        for index, frame in enumerate(frames):
            try:
                group = _decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise Refusal(f"payload frame {index} is no TrainGroup: {error}") from error
            builder.add(group)
        return builder.batch()

    def assign_advantages(self, penalties: Tensor | None = None) -> None:
        """Compute ``advantages``; ``penalties`` [N] are taken off the rewards of tokens."""
        made: list[Tensor] = []
        for group in self.members:
            algorithm = self.algorithms[int(self.algorithm[self.member_slots[group.start].start])]
            episodes = self.episodes[group.start : group.stop]
            if penalties is not None and algorithm.kl_coefficient and not algorithm.kl_in_loss:
                slots = (self.member_slots[member] for member in group)
                episodes = [
                    one._replace(penalties=penalties[its]) for one, its in zip(episodes, slots, strict=True)
                ]
            made += episode_advantages(episodes, algorithm)
        self.advantages.copy_(torch.cat(made))
        for place, algorithm in enumerate(self.algorithms):
            if algorithm.needs_whole_batch:
                here = (self.algorithm == place) & self.trained
                self.advantages[here] = whitened(self.advantages[here])

    def count(self, slots: Tensor) -> int:
        """What the sum of the trained ``slots``' weighted losses is divided by: whole trajectories' slots."""
        if self.loss_mean is LossMean.TOKEN:
            return int(self.trained[slots].sum())
        return int(self.ends[slots].sum())

    def minibatches(self, count: int) -> list[list[Trajectory]]:
        """The groups in order, split into ``count`` nearly equal parts, or one a group if they are fewer."""
        count = min(count, len(self.groups))
        edges = [round(part * len(self.groups) / count) for part in range(count + 1)]
        return [
            [self.trajectories[member] for group in self.groups[low:high] for member in group]
            for low, high in pairwise(edges)
        ]

    @property
    def tokens(self) -> int:
        """Of all trajectories, observations included."""
        return sum(len(each.ids) for each in self.trajectories)


class _Builder:
    def __init__(
        self,
        version: int,
        distribution: TaskDistributions,
        algorithm_of: Callable[[str], Algorithm],
        mixed: MixedVersions,
    ) -> None:
        self._version = version
        self._distribution = distribution
        self._algorithm_of = algorithm_of
        self._mixed = mixed
        self._algorithms: list[Algorithm] = []
        self._trajectories: list[Trajectory] = []
        self._episodes: list[Episode] = []
        self._groups: list[range] = []
        self._members: list[range] = []
        self._slots: list[slice] = []
        self._parts: list[tuple[Tensor, ...]] = []
        self._first = 0
        self._zero_signal = 0
        self._mixed_count = 0
        self._truncated = 0

    def add(self, group: TrainGroup) -> None:
        members: dict[int, list[TrainSample]] = {}  # an agent's trajectory may be several sequences
        for sample in group.samples:
            members.setdefault(sample.trajectory, []).append(sample)
        if len(members) < 2:
            raise Refusal(
                f"group {group.group} of task {group.task} has {len(members)} sample: "
                "a group needs at least 2 to be compared"
            )
        try:
            algorithm = self._algorithm_of(group.task)
        except KeyError:
            raise Refusal(f"group {group.group} is of task {group.task}, which the config has not") from None
        if algorithm not in self._algorithms:
            self._algorithms.append(algorithm)
        start = len(self._trajectories)
        start_members = len(self._episodes)
        for sequences in members.values():
            self._add_member(sequences, algorithm, self._distribution.kind(group.task))
        self._groups.append(range(start, len(self._trajectories)))
        self._members.append(range(start_members, len(self._episodes)))
        rewards = [episode.reward for episode in self._episodes[start_members:]]
        self._zero_signal += len(set(rewards)) == 1

    def batch(self) -> Batch:
        columns = [torch.cat(parts) for parts in zip(*self._parts, strict=True)]
        behaviour, versions, places, trained, weights, ends, algorithm, sampling = columns
        return Batch(
            trajectories=self._trajectories,
            groups=self._groups,
            algorithms=self._algorithms,
            algorithm=algorithm,
            sampling=sampling,
            behaviour=behaviour,
            versions=versions,
            places=places,
            trained=trained,
            weights=weights,
            ends=ends,
            advantages=torch.zeros_like(behaviour),
            episodes=self._episodes,
            members=self._members,
            member_slots=self._slots,
            zero_signal_groups=self._zero_signal,
            mixed_version_sequences=self._mixed_count,
            truncated_masked=self._truncated,
            loss_mean=self._algorithms[0].loss_mean,
        )

    def _add_member(self, sequences: list[TrainSample], algorithm: Algorithm, kind: int) -> None:
        """A trajectory: one episode, whatever its number of sequences."""
        if len(sequences) > 1 and len({sample.reward for sample in sequences}) > 1:
            raise Refusal(f"trajectory {sequences[0].trajectory}: its sequences have different rewards")
        newest = max((run.version for sample in sequences for run in sample.versions), default=-1)
        first = self._first
        found = [self._add(sample, algorithm, newest, kind) for sample in sequences]
        self._episodes.append(_episode(sequences[0].reward, found, algorithm))
        self._slots.append(slice(first, self._first))

    def _add(self, sample: TrainSample, algorithm: Algorithm, newest: int, kind: int) -> Sample:
        """``newest``: the highest version among the tokens of all the trajectory's sequences."""
        found = decode_sample(sample)
        if newest > self._version or int(found.versions.min()) < 0:
            wrong = newest if newest > self._version else int(found.versions.min())
            raise Refusal(
                f"trajectory {sample.trajectory} has tokens of version {wrong}, "
                f"but the trainer is at version {self._version}"
            )
        places = self._places(sample, found, kind)
        mixed = bool((found.versions != newest).any())
        self._mixed_count += mixed
        trained = torch.ones_like(found.versions, dtype=torch.bool)
        if mixed and self._mixed is MixedVersions.MASK:
            trained = found.versions == newest
        if algorithm.mask_truncated and sample.truncated:
            trained = torch.zeros_like(trained)
            self._truncated += 1
        place = torch.full_like(found.versions, self._algorithms.index(algorithm))
        kinds = torch.full_like(found.versions, kind)
        ends = torch.zeros_like(found.versions)
        ends[trained.nonzero()[-1:, 0]] = 1
        self._parts.append(
            (
                found.logprobs,
                found.versions,
                places,
                trained,
                _weights(trained, algorithm),
                ends,
                place,
                kinds,
            )
        )
        self._trajectories.append(Trajectory(sample.trajectory, found.ids, found.positions, self._first))
        self._first += len(found.positions)
        return found

    def _places(self, sample: TrainSample, found: Sample, kind: int) -> Tensor:
        ids, positions = found.ids, found.positions
        places = self._distribution.places(ids[positions], kind)
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
        return places


def _weights(trained: Tensor, algorithm: Algorithm) -> Tensor:
    weights = trained.float()
    if algorithm.loss_mean is LossMean.SEQUENCE:
        return weights / weights.sum().clamp(min=1)
    if algorithm.loss_mean is LossMean.CONSTANT:
        assert algorithm.loss_mean_tokens is not None
        return weights / algorithm.loss_mean_tokens
    return weights


def _episode(reward: float, found: Sequence[Sample], algorithm: Algorithm) -> Episode:
    """Of an agent's several sequences, one after the other; its reward came with the last turn."""
    rewards = found[0].turn_rewards
    if len(found) > 1:
        rewards = torch.zeros(sum(len(each.turn_rewards) for each in found))
        rewards[-1] = reward
    if algorithm.overlong is not None:
        penalty = overlong_penalty(sum(len(each.positions) for each in found), *algorithm.overlong)
        reward += penalty
        rewards = rewards.clone()
        rewards[-1] += penalty
    anchors = [each for one in found for each in one.observations] if algorithm.uses_turns else ()
    return Episode(reward, torch.cat([each.turn_tokens for each in found]), rewards, anchors)
