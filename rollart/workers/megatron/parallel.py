"""The process groups Megatron-core works in, and this process's place in them.

They belong to the process, not to a trainer: the first ``join_parallel`` makes them, the last ``leave_parallel``
removes them.  A trainer of one process meets nobody: its rendezvous is a store inside the process, so that no port
is opened.  Several meet at a file that all of them see.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store

from rollart.config import Trainer as TrainerConfig
from rollart.workers.megatron import ON_CPU

__all__ = ["Place", "Ranks", "join_parallel", "leave_parallel"]

PATIENCE = timedelta(days=365)
"""Of a collective: the others may wait for the first rank's next request as long as it takes.  One that died breaks
the connection, which ends the wait."""

_users = 0
_host_group: dist.ProcessGroup | None = None


class Place(NamedTuple):
    """Where a process of a trainer of several stands."""

    rank: int
    rendezvous: Path
    """A file that all of them see, and that isn't there before them."""
    device: int = 0
    """Of this machine's GPUs."""


class Ranks:
    """This process among the trainer's: what it computes, and talk between the processes over host memory."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.tensor = parallel_state.get_tensor_model_parallel_world_size()
        self.data = parallel_state.get_data_parallel_world_size()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.context = parallel_state.get_context_parallel_world_size()
        self.context_rank = parallel_state.get_context_parallel_rank()
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self.tells = self.last_stage and self.tensor_rank == 0
        """Of the processes that know the same of a token's loss, this is the one that tells the others."""
        self._group = _host_group

    def add_up(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def say(self, content: bytes | None) -> bytes:
        """What the first process says, at all of them; the others give ``None``."""
        size = torch.tensor([len(content or b"")])
        dist.broadcast(size, 0, group=self._group)
        said = torch.empty(int(size), dtype=torch.uint8)
        if content:
            said = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if len(said):
            dist.broadcast(said, 0, group=self._group)
        return said.numpy().tobytes()

    def send(self, tensor: Tensor, to: int) -> None:
        """To process ``to``, which ``receive``s."""
        dist.send(tensor.contiguous(), to, group=self._group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, sender: int) -> Tensor:
        """What ``sender`` sends, of known shape."""
        tensor = torch.empty(*shape, dtype=dtype)
        dist.recv(tensor, sender, group=self._group)
        return tensor

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier(group=self._group)


def join_parallel(seed: int, layout: TrainerConfig, place: Place | None = None) -> Ranks:
    """Make sure that the process groups are there, and seed the random-number generators with ``seed``."""
    global _users, _host_group
    if not dist.is_initialized():
        _meet(layout.processes, place)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel,
            pipeline_model_parallel_size=layout.pipeline_parallel,
            context_parallel_size=layout.context_parallel,
            expert_model_parallel_size=layout.expert_parallel,
            distributed_timeout_minutes=int(PATIENCE.total_seconds() / 60),
        )
        if layout.processes > 1 and not ON_CPU:
            _host_group = dist.new_group(backend="gloo", timeout=PATIENCE)
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=ON_CPU)
    _users += 1
    return Ranks()


def _meet(processes: int, place: Place | None) -> None:
    if place is None:
        if processes > 1:
            raise ValueError(
                f"this trainer is a group of {processes} processes, but its place in it is not given"
            )
        store: Store = HashStore()
        rank = 0
    else:
        store, rank = FileStore(str(place.rendezvous), processes), place.rank
        if sys.platform == "linux" and ON_CPU:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
        if not ON_CPU:
            torch.cuda.set_device(place.device)
    dist.init_process_group(
        "gloo" if ON_CPU else "nccl", store=store, rank=rank, world_size=processes, timeout=PATIENCE
    )


def leave_parallel() -> None:
    """Undo one ``join_parallel``."""
    global _users, _host_group
    _users -= 1
    if _users == 0:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _host_group = None
