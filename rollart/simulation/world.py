"""World: what the simulated workers of one run share: its seed, its workload, its machines, its faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import msgspec

from rollart.packing import pack_floats
from rollart.simulation.host import Host, Sharing
from rollart.simulation.truth import Truth
from rollart.simulation.workload import Family

__all__ = ["Ailments", "Timings", "World", "canary_logprobs"]

LOGPROB = pack_floats([-0.5])


class Timings(msgspec.Struct, frozen=True):
    """Seconds of what no other model gives."""

    start_s: float = 30.0
    """From a worker's start to its readiness."""
    pull_s: float = 1.0
    """A version from the store to an inference worker's host."""
    load_s: float = 0.03
    """From the host into the engine."""
    publish_s: float = 1.0
    """A version from the trainer to the store, in the background."""
    save_s: float = 1.0
    """A checkpoint."""


class Ailments(msgspec.Struct):
    """What is wrong with a worker now; faults set it, workers look at it."""

    slowdown: float = 1.0
    """Its times are multiplied by this."""
    lost_buckets: int = 0
    """So many pulls from now on find that a bucket of their version is lost, for everybody."""
    keeps_old_weights: bool = False
    """Updates report success and change nothing."""
    failing_requests: int = 0
    """So many requests from now on fail as infrastructure does."""
    skips: int = 0
    """So many train_steps from now on find a loss that is not finite."""


class World:
    """One run's."""

    def __init__(
        self,
        seed: int,
        families: Mapping[str, Family],
        timings: Timings,
        *,
        truth: Truth | None = None,
        sharing: Sharing | None = None,
        environment_threads: int | None = None,
    ) -> None:
        """Without ``sharing`` every worker has cores of its own; ``environment_threads`` is how many environments
        of one worker act at the same time, by default all."""
        self.seed = seed
        self.families = families
        self.timings = timings
        self.truth = truth
        self.sharing = sharing
        self.host = Host(sharing.cores) if sharing else None
        self.environment_threads = environment_threads
        self.ailments: dict[str, Ailments] = {}
        self.checkpoints: dict[str, tuple[int, tuple[int, ...]]] = {}
        """By path: the version, and the steps that it is of."""
        self.lineage: tuple[int, ...] = ()
        """The steps that the trainer's weights are of."""
        self.lost: set[str] = set()
        """Versions, by their references, of which a bucket is lost: only what is stored anew can be pulled."""
        self.violations: list[str] = []
        """What no worker may ever meet."""
        self.troubled: set[str] = set()
        """Sessions whose own environment fails, or takes longer than it may."""

    def of(self, worker: str) -> Ailments:
        """A worker's ailments; a new one of the same name has none."""
        return self.ailments.setdefault(worker, Ailments())

    async def compute(self, worker: str, work_s: float, threads: int = 1) -> None:
        """Wait while ``worker`` computes for what would take ``work_s`` seconds if it were alone."""
        if self.host is None:
            await asyncio.sleep(work_s)
        else:
            await self.host.compute(worker, work_s, threads)

    def rng(self, *names: object) -> random.Random:
        """A stream of its own for whatever ``names`` name."""
        return random.Random("/".join(map(str, (self.seed, *names))))


def canary_logprobs(version: int, canary: bytes) -> bytes:
    """What weights of ``version`` give the canary prompt; any two versions differ."""
    return pack_floats([-1.0 - 0.01 * (version % 1000)]) * (len(canary) // 4 - 1)
