"""Checkpoints through Megatron's ``dist_checkpointing``: model, optimiser, schedule, random state, record.

A checkpoint appears whole or not at all.  Megatron would write it from forked processes, and start a further
one to collect their answers, which lives on; here the same functions run in a thread of the caller's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rollart.workers.megatron.folder import appearing
from rollart.workers.megatron.model import LanguageModel
from rollart.workers.megatron.optimizer import Optimizer
from rollart.workers.megatron.parallel import Ranks

__all__ = [
    "FORMAT",
    "CheckpointError",
    "Record",
    "Writing",
    "is_one",
    "load",
    "read_record",
    "remove",
    "remove_older",
]

logger = logging.getLogger(__name__)

FORMAT = 2
RECORD = "rollart.json"
REMOVED = ".removed"


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message says why."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself, readable without Megatron."""

    format: int
    version: int
    """The trainer's version: train_steps applied."""
    architecture: str
    last_step: dict[str, Any] | None
    """The answer to the last train_step, with its ``step_id``; none before the first."""
    score: float | None = None
    """How good the weights are, if whoever asked for the checkpoint said so."""


class Writing:
    """A checkpoint on its way: begun and finished by the thread that trains, written by any other in between."""

    def __init__(
        self,
        path: Path,
        model: LanguageModel,
        optimizer: Optimizer,
        record: Record,
        ranks: Ranks,
    ) -> None:
        """Copy everything; each process what it holds.  ``FileExistsError`` when ``path`` is there already.

        The first process makes the folder, and makes it appear when all have written.
        """
        self.path = path
        self._record = record
        self._ranks = ranks
        self._appearing = appearing(path) if ranks.rank == 0 else None
        if self._appearing is not None:
            self._folder = self._appearing.__enter__()
            if ranks.world > 1:
                ranks.say(str(self._folder).encode())
        else:
            self._folder = Path(ranks.say(None).decode())
        try:
            self._prepare(model, optimizer)
        except BaseException:
            self.abandon()
            raise

    def _prepare(self, model: LanguageModel, optimizer: Optimizer) -> None:
        self._results: queue.Queue[object] = queue.Queue()
        filesystem_async._results_queue = self._results
        try:
            state = _state(model, optimizer, is_loading=False)
            self._request: AsyncRequest = dist_checkpointing.save(
                state, str(self._folder), async_sharded_save=True
            )
        finally:
            filesystem_async._results_queue = None
        self._transforms: list[object] = []
        self._buckets: list[Any] = []
        if self._request.async_fn is not None:  # else another process has all that this one holds
            (self._transforms, _) = self._request.async_fn.args
            self._buckets = [_copied(bucket) for bucket in self._request.preload_fn()]

    def write(self) -> None:
        """The files of this process."""
        self._results.put(
            {index: _write_file(self._transforms, index, each) for index, each in enumerate(self._buckets)}
        )
        self._buckets.clear()

    def finish(self) -> None:
        """All processes have written: the checkpoint appears, durably."""
        try:
            for finalize in self._request.finalize_fns:
                finalize()
            if self._appearing is None:
                return
            encoded = msgspec.json.format(msgspec.json.encode(self._record))
            (self._folder / RECORD).write_bytes(encoded + b"\n")
            for part in (*self._folder.rglob("*"), self._folder):
                _sync(part)
        except BaseException:
            self.abandon()
            raise
        self._appearing.__exit__(None, None, None)
        _sync(self.path.parent)

    def abandon(self) -> None:
        """Nothing of it stays."""
        if self._appearing is not None:
            error = InterruptedError("the checkpoint was abandoned")
            with contextlib.suppress(InterruptedError):
                self._appearing.__exit__(InterruptedError, error, None)


def _copied(bucket: Any) -> Any:
    """Of Megatron's bucket (file, key, (bytes, tensors)), with tensors that training doesn't change."""
    file, key, (raw, tensors) = bucket
    return file, key, (raw, [(item, tensor.detach().clone()) for item, tensor in tensors])


def is_one(path: Path) -> bool:
    """Whether a checkpoint is there."""
    return (path / RECORD).is_file()


def remove(path: Path) -> None:
    """Renamed first: a removal that is cut off leaves nothing that looks like a checkpoint."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}{REMOVED}")))


def remove_older(path: Path, keep: int, *, keep_best: bool = False) -> None:
    """Of the checkpoints beside ``path`` whose names are lower, leave the newest ``keep - 1``.

    With ``keep_best`` the one with the highest score stays as well; of equal ones the newest.
    What can't be removed is logged and left.
    """
    older = sorted(
        (each for each in path.parent.iterdir() if _age(each) < _age(path) and is_one(each)),
        key=_age,
    )
    try:
        for rest in path.parent.glob(f".*{REMOVED}"):
            shutil.rmtree(rest)
        spared = _best([*older, path]) if keep_best else None
        for each in older[: max(0, len(older) - keep + 1)]:
            if each == spared:
                continue
            remove(each)
    except OSError as error:
        logger.warning("checkpoints older than %s could not be removed: %s", path, error)


def _best(checkpoints: list[Path]) -> Path | None:
    scored: list[tuple[float, int, Path]] = []
    for place, each in enumerate(checkpoints):
        with contextlib.suppress(CheckpointError):
            score = read_record(each).score
            if score is not None:
                scored.append((score, place, each))
    return max(scored)[2] if scored else None


def _age(path: Path) -> tuple[int, str]:
    """Sorts names that end in a number, also one that has outgrown its zeros."""
    return len(path.name), path.name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_record(path: Path) -> Record:
    """The record of the checkpoint ``path``; ``CheckpointError`` when none that can be read is there."""
    try:
        content = (path / RECORD).read_bytes()
        found = json.loads(content).get("format")
        if found != FORMAT:
            raise CheckpointError(f"{path} has checkpoint format {found}, but this RollArt reads {FORMAT}")
        return msgspec.json.decode(content, type=Record)
    except FileNotFoundError as error:
        raise CheckpointError(f"no {RECORD} in {path}: it is no checkpoint, or not a whole one") from error
    except (json.JSONDecodeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path / RECORD} can't be read: {error}") from error


def load(path: Path, model: LanguageModel, optimizer: Optimizer) -> Record:
    """Give ``model`` and ``optimizer`` the state in ``path``.

    ``CheckpointError`` when it is no checkpoint of this model, before anything is changed; when the error
    says that reading its tensors failed, the trainer must not be used.
    """
    record = read_record(path)
    if record.architecture != str(model.architecture):
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {record.architecture}, but the trainer has "
            f"{model.architecture}"
        )
    try:
        state = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(path))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(f"reading the tensors of {path} failed: {error}") from error
    model.gpt.load_state_dict(state["model"])
    optimizer.load_state(state["optimizer"])
    optimizer.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"]["torch"])
    get_cuda_rng_tracker().set_states(state["random"]["megatron"])
    return record


def _state(model: LanguageModel, optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded = model.gpt.sharded_state_dict(metadata=metadata)
    return {
        "model": sharded,
        "optimizer": optimizer.megatron.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata),
        "scheduler": optimizer.scheduler.state_dict(),
        "random": {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()},
    }


def _write_file(transforms: list[object], index: int, bucket: object) -> object:
    answers: queue.Queue[tuple[int, object]] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, answers, running, use_fsync=True)
    _, answer = answers.get_nowait()
    if isinstance(answer, Exception):
        raise answer
    return answer
