"""The part of a run's config that says which requests go where: pools of workers, hardware affinity, disaggregation."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "AUTO",
    "DEFAULT",
    "Affinity",
    "Disaggregation",
    "HwAffinity",
    "Phase",
    "PhaseAffinity",
    "Pool",
    "check_routing",
    "classes_of",
]

DEFAULT = "default"
"""The entry of ``hw_affinity`` for tasks that have none of their own."""
AUTO = "auto"
KNOWN_CLASSES = ("H800", "H20", "H200", "CPU")
"""Those with published figures, which ``auto`` goes by (``rollart.simulation.hardware``)."""
HardwareName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]+$")]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Natural = Annotated[int, Meta(ge=0, le=2**53)]


class _Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class Phase(enum.StrEnum):
    """What part of a generation a worker is for."""

    PREFILL = "prefill"
    """It computes prompts, for others to decode."""
    DECODE = "decode"
    """It decodes what others have prefilled."""
    BOTH = "both"

    __hash__ = str.__hash__


class Pool(_Section, frozen=True, kw_only=True):
    """Inference workers of one hardware class."""

    hardware: HardwareName
    workers: Count = 1
    phase: Phase = Phase.BOTH
    threads: Count | None = None
    """CPU threads of an engine; by default ``inference.threads``."""
    devices: list[Natural] = []
    """GPUs of this machine, one for each worker (CUDA_VISIBLE_DEVICES); by default each sees all."""
    slowdown: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    """On a CPU, a step of these engines takes so many times as long: a stand-in for a slower class."""

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.workers:
            raise ValueError(
                f"pool {self.hardware} has {self.workers} workers and {len(self.devices)} devices: one for each"
            )


class PhaseAffinity(_Section, frozen=True, kw_only=True):
    """Where prefill and decode of a task run, apart: on two workers, the KV cache sent from one to the other."""

    prefill: HardwareName | list[HardwareName]
    decode: HardwareName | list[HardwareName]


Affinity = str | list[HardwareName] | PhaseAffinity
"""A hardware class, or several, the preferred one first."""
HwAffinity = str | dict[str, Affinity]


class Connector(enum.StrEnum):
    """What carries keys and values from a prefilling engine to a decoding one."""

    NIXL = "nixl"


class Disaggregation(_Section, frozen=True, kw_only=True):
    """When a request is prefilled on one worker and decoded on another."""

    connector: Connector = Connector.NIXL
    min_prompt_tokens: Natural = 0
    """Requests with a shorter prompt are served by one worker whole."""
    min_answer_tokens: Natural = 0
    """So are requests whose answer is expected to be shorter, by the mean of their task so far."""
    adapt: bool = False
    """Workers change between prefill and decode while the run goes on, by the lengths of the two queues."""


def classes_of(affinity: str | list[str]) -> list[str]:
    """The classes that an entry names, in order."""
    return [affinity] if isinstance(affinity, str) else list(affinity)


def check_routing(
    pools: list[Pool], affinity: HwAffinity, disaggregation: Disaggregation | None, tasks: list[str]
) -> None:
    """``ValueError`` where the pools can't serve what is declared, or a setting would do nothing."""
    classes = list(dict.fromkeys(pool.hardware for pool in pools))
    if affinity and DEFAULT in tasks:
        raise ValueError(
            f"inference.hw_affinity.{DEFAULT} is for the tasks that are not listed, and a task has that name: rename it"
        )
    if isinstance(affinity, str):
        if affinity != AUTO:
            raise ValueError(f"inference.hw_affinity is {affinity!r}: give {AUTO}, or a class for each task")
        unknown = [name for name in classes if name not in KNOWN_CLASSES]
        if unknown:
            raise ValueError(
                f"inference.hw_affinity: {AUTO} knows the classes {', '.join(KNOWN_CLASSES)}, not {unknown[0]}: give "
                "each task's class"
            )
        if len(tasks) < 2:
            raise ValueError(
                f"inference.hw_affinity: {AUTO} compares tasks, and there is one: give its class"
            )
        entries: Mapping[str, Affinity] = {}
    else:
        entries = affinity
        for task, entry in entries.items():
            if task != DEFAULT and task not in tasks:
                raise ValueError(
                    f"inference.hw_affinity.{task}: there is no such task; there are {', '.join([*tasks, DEFAULT])}"
                )
            _check_entry(task, entry, pools, classes)
    if affinity and len(classes) < 2 and not any(isinstance(e, PhaseAffinity) for e in entries.values()):
        raise ValueError(
            "inference.hw_affinity does nothing with one hardware class: give inference.pools of several"
        )
    phases = {pool.phase for pool in pools}
    if phases & {Phase.PREFILL, Phase.DECODE} and not (
        phases & {Phase.PREFILL, Phase.BOTH} and phases & {Phase.DECODE, Phase.BOTH}
    ):
        (only,) = phases
        raise ValueError(f"inference.pools: all are for {only}, so that nothing serves the other phase")
    if sum(pool.workers for pool in pools) < 2 and phases != {Phase.BOTH}:
        raise ValueError("inference.pools: prefill and decode apart take two workers, there is one")
    if disaggregation is not None and not splits(pools, affinity):
        raise ValueError(
            "inference.disaggregation does nothing: no pool has phase prefill or decode, and no entry of "
            "inference.hw_affinity gives prefill and decode apart"
        )
    if disaggregation is not None and disaggregation.adapt:
        _check_adapt(pools)


def _check_adapt(pools: list[Pool]) -> None:
    """``ValueError`` where no worker could ever change its phase: each phase keeps one."""
    of = {phase: sum(pool.workers for pool in pools if pool.phase is phase) for phase in Phase}
    apart = of[Phase.PREFILL], of[Phase.DECODE]
    if min(apart) < 1 or sum(apart) < 3:
        raise ValueError(
            "inference.disaggregation.adapt does nothing: it moves workers of pools with phase prefill or decode, and "
            f"each phase keeps one; there are {apart[0]} and {apart[1]}, and it takes three"
        )


def splits(pools: list[Pool], affinity: HwAffinity) -> bool:
    """Whether any request may be prefilled and decoded apart."""
    entries = {} if isinstance(affinity, str) else affinity
    return any(pool.phase is not Phase.BOTH for pool in pools) or any(
        isinstance(entry, PhaseAffinity) for entry in entries.values()
    )


def _check_entry(task: str, entry: Affinity, pools: list[Pool], classes: list[str]) -> None:
    where = f"inference.hw_affinity.{task}"
    parts = (
        {"": entry}
        if not isinstance(entry, PhaseAffinity)
        else {"prefill": entry.prefill, "decode": entry.decode}
    )
    for part, wanted in parts.items():
        named = classes_of(wanted)
        for name in named:
            if name not in classes:
                raise ValueError(f"{where}: no pool is of class {name}; there are {', '.join(classes)}")
        if not named or len(set(named)) != len(named):
            raise ValueError(f"{where}: name each class once, and at least one")
        other = {"prefill": Phase.DECODE, "decode": Phase.PREFILL}.get(part)
        if other is not None and all(p.phase is other for p in pools if p.hardware in named):
            raise ValueError(f"{where}.{part}: all workers of {', '.join(named)} are for {other}")
    if isinstance(entry, PhaseAffinity) and sum(p.workers for p in pools) < 2:
        raise ValueError(f"{where}: prefill and decode apart take two workers, there is one")
