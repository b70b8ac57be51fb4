"""A trainer of several processes: the first one takes requests, says each to the others, and all carry it out.

The others are started here, on this machine, and end with the first: when it closes, when it dies (on Linux the
kernel tells them), and when a connection between them breaks.  A request that all refuse alike leaves the group as
it was; any other failure of one process is the end of the group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from rollart.config import Config
from rollart.workers.megatron.architecture import Architecture
from rollart.workers.megatron.core import StepResult, Trainer
from rollart.workers.megatron.parallel import Place
from rollart.workers.megatron.samples import Refusal

__all__ = ["Process", "TrainerGroup", "follow", "start_process"]

logger = logging.getLogger(__name__)
END_PATIENCE_S = 10.0
CONFIG = "config.msgpack"
RENDEZVOUS = "rendezvous"


class _Request(msgspec.Struct, tag=True, array_like=True):
    """What the first process says to the others."""


class _TrainStep(_Request):
    step_id: int
    version: int
    verify_share: float
    frames: list[bytes]


class _Stream(_Request):
    step_id: int
    frames: list[bytes]


class _Snapshot(_Request):
    version: int
    canary: list[int]


class _Score(_Request):
    ids: list[int]


class _Weights(_Request):
    pass


class _Save(_Request):
    path: str


class _FinishSave(_Request):
    path: str


class _Load(_Request):
    path: str


class _Close(_Request):
    pass


_decoder = msgspec.msgpack.Decoder(
    _TrainStep | _Stream | _Snapshot | _Score | _Weights | _Save | _FinishSave | _Load | _Close
)


class Process(Protocol):
    """One of the others; ``subprocess.Popen`` is one."""

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""


Start = Callable[[Place, Path, Path], Process]
"""Starts a process: its place, the file with the config, the model's folder."""


def start_process(place: Place, config: Path, model_dir: Path) -> Process:
    """The process of ``place`` on this machine; its log goes where this process's goes."""
    command = [sys.executable, "-m", "rollart.workers.megatron.follower"]
    command += [
        "--rank",
        str(place.rank),
        "--device",
        str(place.device),
        "--rendezvous",
        str(place.rendezvous),
    ]
    command += ["--config", str(config), "--model-dir", str(model_dir), "--parent", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


class TrainerGroup:
    """``Trainer`` for whoever has the requests, of as many processes as ``config.trainer`` says."""

    def __init__(
        self, config: Config, model_dir: Path, *, scratch: Path | None = None, start: Start = start_process
    ) -> None:
        """``scratch`` is a folder for what the processes share while they last; by default a temporary one."""
        count = config.trainer.processes
        self._scratch: Path | None = None
        self._processes: dict[int, Process] = {}
        self._begun = False
        place: Place | None = None
        try:
            if count > 1:
                self._scratch = Path(tempfile.mkdtemp(prefix="ranks-", dir=scratch))
                (self._scratch / CONFIG).write_bytes(msgspec.msgpack.encode(config))
                place = Place(0, self._scratch / RENDEZVOUS)
                for rank in range(1, count):
                    other = place._replace(rank=rank, device=rank)
                    self._processes[rank] = start(other, self._scratch / CONFIG, model_dir)
            self._trainer = Trainer(config, model_dir, place)
        except BaseException:
            self._end_processes(patience_s=0.0)
            raise

    # --- what needs no other process ------------------------------------------------------------------

    @property
    def architecture(self) -> Architecture:
        """Of the model."""
        return self._trainer.architecture

    @property
    def version(self) -> int:
        """Applied train_steps."""
        return self._trainer.version

    @property
    def device(self) -> torch.device:
        """Of the first process."""
        return self._trainer.model.device

    @property
    def parameter_count(self) -> int:
        """Numbers that the first process holds."""
        return self._trainer.parameter_count

    def answered(self, step_id: int) -> StepResult | None:
        """The answer to a train_step that was made already."""
        return self._trainer.answered(step_id)

    def named_weights(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """``weights`` under their Hugging Face names, in that layout."""
        return self._trainer.named_weights(weights)

    def dead(self) -> str:
        """Which of the processes has ended, and how; empty while all live."""
        ended = {rank: code for rank, each in self._processes.items() if (code := each.poll()) is not None}
        return "; ".join(
            f"process {rank} of the trainer ended with exit code {code}" for rank, code in ended.items()
        )

    # --- what all do ----------------------------------------------------------------------------------

    def train_step(
        self, *, step_id: int, version: int, verify_share: float, frames: Sequence[bytes]
    ) -> StepResult:
        """As ``Trainer.train_step``."""
        known = self.answered(step_id)
        if known is not None:
            return known
        self._say(_TrainStep(step_id, version, verify_share, [bytes(frame) for frame in frames]))
        return self._trainer.train_step(
            step_id=step_id, version=version, verify_share=verify_share, frames=frames
        )

    def stream(self, *, step_id: int, frames: Sequence[bytes]) -> int:
        """As ``Trainer.stream``."""
        self._say(_Stream(step_id, [bytes(frame) for frame in frames]))
        return self._trainer.stream(step_id=step_id, frames=frames)

    def score(self, ids: Sequence[int]) -> list[float]:
        """As ``Trainer.score``."""
        self._say(_Score(list(ids)))
        return self._trainer.score(ids)

    def snapshot(self, version: int, canary: Sequence[int]) -> tuple[list[float], Mapping[str, Tensor]]:
        """As ``Trainer.snapshot``."""
        self._say(_Snapshot(version, list(canary)))
        return self._trainer.snapshot(version, canary)

    def weights(self) -> Mapping[str, Tensor]:
        """As ``Trainer.weights``."""
        self._say(_Weights())
        return self._trainer.weights()

    def export(self, path: Path) -> None:
        """As ``Trainer.export``."""
        if not path.exists():  # else the first process alone says what is wrong
            self._say(_Weights())
        self._trainer.export(path)

    def save_checkpoint(self, path: Path) -> None:
        """As ``Trainer.save_checkpoint``."""
        self.begin_checkpoint(path)()
        self.finish_checkpoint(path)

    def make_way(self, path: Path) -> None:
        """As ``Trainer.make_way``."""
        self._trainer.make_way(path)

    def begin_checkpoint(self, path: Path, *, score: float | None = None) -> Callable[[], None]:
        """As ``Trainer.begin_checkpoint``; the other processes write theirs meanwhile."""
        self._begun = self._trainer.will_save(path)
        if self._begun:
            self._say(_Save(str(path)))
        return self._trainer.begin_checkpoint(path, score=score)

    def finish_checkpoint(self, path: Path) -> None:
        """As ``Trainer.finish_checkpoint``."""
        if self._begun:
            self._say(_FinishSave(str(path)))
        self._trainer.finish_checkpoint(path)

    def prune_checkpoints(self, path: Path, keep: int, *, keep_best: bool = False) -> None:
        """As ``Trainer.prune_checkpoints``."""
        self._trainer.prune_checkpoints(path, keep, keep_best=keep_best)

    def load_checkpoint(self, path: Path) -> None:
        """As ``Trainer.load_checkpoint``."""
        self._say(_Load(str(path)))
        self._trainer.load_checkpoint(path)

    def close(self) -> None:
        """End the other processes and leave the process groups."""
        try:
            self._say(_Close())
            self._trainer.close()
        except RuntimeError as error:  # one of them is gone, and the connection with it
            logger.warning("the trainer's processes could not part in order: %s", error)
        self._end_processes(patience_s=END_PATIENCE_S)

    def _say(self, request: _Request) -> None:
        if self._processes:
            self._trainer.ranks.say(msgspec.msgpack.encode(request))

    def _end_processes(self, *, patience_s: float) -> None:
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def follow(config: Config, model_dir: Path, place: Place) -> None:
    """Be one of the other processes, until the first says it is over; ``RuntimeError`` when it is gone."""
    trainer = Trainer(config, model_dir, place)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="save") as thread:
            follower = _Follower(trainer, thread)
            while True:
                request = _decoder.decode(trainer.ranks.say(None))
                if isinstance(request, _Close):
                    return
                with contextlib.suppress(Refusal):  # which the first process tells whoever asked
                    follower.carry_out(request)
    finally:
        trainer.close()


class _Follower:
    def __init__(self, trainer: Trainer, thread: ThreadPoolExecutor) -> None:
        self._trainer = trainer
        self._thread = thread
        self._written: Future[None] | None = None

    def carry_out(self, request: _Request) -> None:
        match request:
            case _Save():
                self._written = self._thread.submit(self._trainer.begin_checkpoint(Path(request.path)))
            case _FinishSave():
                assert self._written is not None, "_Save comes first"
                self._written.result()
                self._trainer.finish_checkpoint(Path(request.path))
            case _:
                _carry_out(self._trainer, request)


def _carry_out(trainer: Trainer, request: _Request) -> None:
    match request:
        case _TrainStep():
            trainer.train_step(
                step_id=request.step_id,
                version=request.version,
                verify_share=request.verify_share,
                frames=request.frames,
            )
        case _Stream():
            trainer.stream(step_id=request.step_id, frames=request.frames)
        case _Snapshot():
            trainer.snapshot(request.version, request.canary)
        case _Score():
            trainer.score(request.ids)
        case _Weights():
            trainer.weights()
        case _Load():
            trainer.load_checkpoint(Path(request.path))
