"""The inference workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rollart.config.routing import Disaggregation, HwAffinity, Pool, splits
from rollart.config.section import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rollart.config.trainer import DType

__all__ = ["Inference"]


class Inference(Section, frozen=True, kw_only=True):
    """The vLLM inference workers."""

    workers: PositiveInt = 1
    """Those of all ``pools`` where there are any."""
    pools: list[Pool] = []
    """Workers by hardware class; by default ``workers`` of class CPU."""
    hw_affinity: HwAffinity = {}
    """The hardware class of each task by name, ``default`` for the others: a class, a list of them with the preferred
    one first, or ``prefill`` and ``decode`` apart.  Classes that are not named come after, in the order of the pools.
    ``auto``: proposed from what the tasks turn out to be like, and followed."""
    disaggregation: Disaggregation | None = None
    """For prefill and decode on different workers."""
    dtype: DType = DType.FLOAT32
    max_model_len: PositiveInt = 512
    """Tokens of prompt and answers together; a trajectory that would pass it is cut, and scored as it is."""
    max_num_seqs: PositiveInt = 128
    """Sequences an engine decodes at once."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of an engine; by default 1 on CPU, and on GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Only on GPU engines; vLLM's default otherwise."""
    threads: PositiveInt = 1
    """CPU threads of an engine, or of each of its processes."""
    tensor_parallel: PositiveInt = 1
    """Processes that an engine's model is divided over; each loads only its slices of new weights."""
    max_requests: PositiveInt | None = None
    """Requests a worker is given at once, those that wait in its engine included; others wait in the controller, each
    trajectory with its own.  By default four times max_num_seqs."""
    max_tokens_in_flight: PositiveInt | None = None
    """Tokens, of prompts and of answers to come, that a worker is given at once: below its KV cache it never has to
    preempt.  By default not bounded."""
    progress_every_s: PositiveFloat = 2.0
    """Answers that take longer are reported as far as they are: what a lost worker had reported is kept, and another
    goes on from there."""
    generate_timeout_s: PositiveFloat = 600.0
    """For one answer, queueing in the engine included."""
    update_timeout_s: PositiveFloat = 120.0
    """For each of pull, suspend, update and resume; a worker that takes longer is taken out of routing."""
    restarts: NonNegativeInt = 8
    """Times in a row that a worker that ended, hung or was taken out is started again: after 1 s, then 2 s, and so on,
    up to 60.  One that served for two minutes begins anew; one that has no try left is removed from the run."""
    canary_tolerance: PositiveFloat | None = None
    """Largest log-probability difference to the trainer; by default 1e-3 in float32 and 0.25 in bfloat16."""

    def __post_init__(self) -> None:
        if not self.pools:
            return
        if self.tensor_parallel > 1 and any(pool.slowdown > 1 for pool in self.pools):
            raise ValueError(
                "pools.slowdown does nothing for an engine of several processes (tensor_parallel)"
            )
        if self.tensor_parallel > 1 and any(pool.devices for pool in self.pools):
            raise ValueError(
                f"pools.devices gives each engine one GPU, and tensor_parallel divides it over {self.tensor_parallel}"
            )
        total = sum(pool.workers for pool in self.pools)
        if self.workers not in (1, total):
            raise ValueError(f"workers is {self.workers} and the pools have {total}: leave workers out")
        msgspec.structs.force_setattr(self, "workers", total)

    @property
    def all_pools(self) -> list[Pool]:
        """``pools``, or what ``workers`` stands for."""
        return self.pools or [Pool(hardware="CPU", workers=self.workers)]

    def pool_of(self, number: int | None, hardware: str) -> Pool:
        """The pool of worker ``number`` if it is of that class; else the first of that class, or one like it."""
        first = 0
        for pool in self.all_pools:
            if number is not None and first <= number < first + pool.workers and pool.hardware == hardware:
                return pool
            first += pool.workers
        same = [pool for pool in self.all_pools if pool.hardware == hardware]
        return same[0] if same else Pool(hardware=hardware)

    @property
    def splits(self) -> bool:
        """Whether any request may be prefilled by one worker and decoded by another."""
        return splits(self.all_pools, self.hw_affinity)

    @property
    def most_requests(self) -> int:
        """What ``max_requests`` comes to."""
        return self.max_requests or 4 * self.max_num_seqs

    @property
    def tolerance(self) -> float:
        """The canary's tolerance in nats."""
        if self.canary_tolerance is not None:
            return self.canary_tolerance
        return 1e-3 if self.dtype is DType.FLOAT32 else 0.25
