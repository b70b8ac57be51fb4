"""The exchange that ``benchmarks.controller`` measures: "generate, then step", ten times a trajectory.

A prompt begins with 64 tokens and grows by 48 a turn, 16 of them sampled and 32 observed.
"""

from __future__ import annotations

from benchmarks.parts.turns_shape import ANSWER_TOKENS, FIRST_TOKENS, OBSERVATION_TOKENS, TURNS
from rollart.config import (
    Config,
    Environments,
    Inference,
    Model,
    RandomModel,
    Rollout,
    Sampling,
    Task,
    Trainer,
)
from rollart.packing import pack_floats, pack_ids
from rollart.protocol import VersionRun

__all__ = [
    "ANSWER",
    "ANSWER_TOKENS",
    "CONTEXT_TOKENS",
    "FIRST",
    "LOGPROBS",
    "OBSERVATION",
    "TASK",
    "TURNS",
    "groups_for",
    "turns_config",
    "versions_of",
]

TASK = "turns"
CONTEXT_TOKENS = 1024
FIRST = pack_ids(range(100, 100 + FIRST_TOKENS))
ANSWER = pack_ids(range(7, 7 + ANSWER_TOKENS))
LOGPROBS = pack_floats([-0.5] * ANSWER_TOKENS)
OBSERVATION = pack_ids(range(40, 40 + OBSERVATION_TOKENS))
GROUP_SIZE, REDUNDANT_MEMBERS, REDUNDANT_GROUPS, ALPHA = 8, 1, 1, 1


def versions_of(version: int) -> list[VersionRun]:
    """The runs of an answer that ``version`` sampled."""
    return [VersionRun(version, ANSWER_TOKENS)]


def groups_for(live: int) -> int:
    """Groups per batch with which about ``live`` trajectories are in flight."""
    return max(1, (live // (GROUP_SIZE + REDUNDANT_MEMBERS) - REDUNDANT_GROUPS) // (ALPHA + 1))


def turns_config(live: int) -> Config:
    """A run that goes on until it is interrupted, with groups, redundancy and the bound as shipped."""
    return Config(
        name="benchmark",
        steps=1_000_000,
        model=Model(random=RandomModel(max_position_embeddings=CONTEXT_TOKENS)),
        tasks=[Task(name=TASK, environment="benchmarks.parts.turns:nothing", max_turns=TURNS)],
        sampling=Sampling(max_tokens=ANSWER_TOKENS),
        rollout=Rollout(
            staleness_bound=ALPHA,
            groups_per_batch=groups_for(live),
            group_size=GROUP_SIZE,
            redundant_groups=REDUNDANT_GROUPS,
            redundant_members=REDUNDANT_MEMBERS,
        ),
        trainer=Trainer(verify_share=0.0),
        inference=Inference(max_model_len=CONTEXT_TOKENS, max_requests=1_000_000),
        environments=Environments(max_sessions=1_000_000),
    )
