"""The process groups Megatron-core works in.

They belong to the process, not to a trainer: the first ``join_parallel`` makes them, the last
``leave_parallel`` removes them.  The rendezvous is a store inside the process, so that no port is opened.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from rollart.workers.megatron import ON_CPU

__all__ = ["join_parallel", "leave_parallel"]

_users = 0


def join_parallel(seed: int) -> None:
    """Make sure that the process groups are there, and seed the random-number generators with ``seed``."""
    global _users
    if not dist.is_initialized():
        dist.init_process_group("gloo" if ON_CPU else "nccl", store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=ON_CPU)
    _users += 1


def leave_parallel() -> None:
    """Undo one ``join_parallel``."""
    global _users
    _users -= 1
    if _users == 0:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
