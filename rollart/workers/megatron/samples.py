"""A trajectory from the wire, checked: what breaks a rule of the protocol is refused by name."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollart.protocol import TrainSample
from rollart.workers.worker import Deterministic

__all__ = ["Refusal", "Sample", "decode_sample"]


class Refusal(Deterministic, ValueError):
    """A request breaks a rule and would be refused again; nothing was changed."""


class Sample(NamedTuple):
    """T tokens, S of them sampled in K turns."""

    ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [S]: where the sampled tokens are in ``ids``, in order, never 0."""
    logprobs: Tensor
    """float32 [S]."""
    versions: Tensor
    """int64 [S]."""
    turn_tokens: Tensor
    """int64 [K], they sum to S."""
    turn_rewards: Tensor
    """float32 [K], they sum to the sample's reward."""
    observations: list[bytes]
    """K: the ids that came before each turn since the one before it."""


def decode_sample(sample: TrainSample) -> Sample:
    """``sample`` as tensors; ``Refusal`` if its parts don't fit together."""
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
    tokens, rewards = _turns(sample, mask, positions)
    return Sample(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(positions),
        torch.from_numpy(logprobs.astype(np.float32)),
        torch.from_numpy(versions.astype(np.int64)),
        torch.from_numpy(tokens.astype(np.int64)),
        torch.from_numpy(rewards.astype(np.float32)),
        _observations(ids, positions, tokens),
    )


def _turns(sample: TrainSample, mask: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sampled tokens and reward of each turn; what no turn's reward explains came with the last."""
    where = f"trajectory {sample.trajectory}"
    if len(sample.turn_tokens) % 4 or len(sample.turn_rewards) % 4:
        raise Refusal(f"{where}: turn_tokens and turn_rewards must be packed 4 bytes a number")
    if sample.turn_tokens:
        tokens = np.frombuffer(sample.turn_tokens, "<i4")
    else:
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        tokens = np.add.reduceat(mask, starts, dtype=np.int64)
    rewards = np.zeros(len(tokens))
    if sample.turn_rewards:
        rewards = np.frombuffer(sample.turn_rewards, "<f4").astype(np.float64)
    if len(rewards) != len(tokens) or tokens.sum() != len(positions) or tokens.min(initial=1) < 1:
        raise Refusal(
            f"{where}: {len(tokens)} turns of {tokens.sum()} tokens and {len(rewards)} rewards don't fit its "
            f"{len(positions)} sampled tokens"
        )
    if not np.isfinite(rewards).all():
        raise Refusal(f"{where}: the reward of one of its turns is not finite")
    rewards[-1] += sample.reward - rewards.sum()
    return tokens, rewards


def _observations(ids: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> list[bytes]:
    edges = np.concatenate([[0], tokens.cumsum()])
    seen, start = [], 0
    for first, after in pairwise(edges):
        seen.append(ids[start : positions[first]].tobytes())
        start = positions[after - 1] + 1
    return seen
