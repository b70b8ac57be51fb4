"""The folder a run leaves, and the shared-memory folder that it does not.

``runs/NAME/``: ``config.yaml`` (as resolved), ``metrics.jsonl``, ``events``, ``journal`` (to resume from),
``weights/`` (a Hugging Face
folder), ``checkpoints/``, ``model/`` (a random model's shape and tokenizer), ``logs/``, and, while the run
lasts, ``private/`` (addresses and keys).  All of it is readable by its owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

import msgspec
import yaml

from rollart.config import Config
from rollart.controller.configuration import load_config
from rollart.controller.journal import Journal, JournalStorage
from rollart.errors import ConfigError, RunError

__all__ = ["RunFolder", "RunOutput"]

SHARED_MEMORY = Path("/dev/shm")
STORE_PREFIX = "rollart-"
YOUNG_S = 60.0
"""A store that is younger may not be locked yet."""


class RunOutput(Protocol):
    """Where a run leaves what it makes; a simulated run's is no folder.

    The paths are told to people and to workers, who write there.
    """

    path: Path
    model: Path
    weights: Path
    checkpoints: Path
    logs: Path
    store: Path | None

    journal: JournalStorage | None

    def open_events(self, *, more: bool = False) -> BinaryIO:
        """The event stream, new; ``more``: as it is, to be read and appended to."""

    def open_metrics(self, *, more: bool = False) -> TextIO:
        """The metrics, new; ``more``: as they are, to be read and appended to."""

    def clean(self) -> None:
        """The run is over: remove what only a running run needs."""


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events"
        self.weights = path / "weights"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.private = path / "private"
        self.key_file = self.private / "peer.json"
        self.store: Path | None = None
        self._journal = path / "journal"
        self.journal: JournalStorage | None = JournalFile(self._journal)
        self._store_lock: int | None = None
        self._run_lock: int | None = None

    @classmethod
    def choose(cls, config: Config) -> RunFolder:
        """The folder that ``config`` asks for: ``run_dir``, which must be new or empty, or the first free one
        of ``runs/NAME``, ``runs/NAME-2``, …"""
        if config.run_dir is not None:
            path = Path(config.run_dir)
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError(f"run_dir: {path} exists already and isn't an empty folder; name another")
            return cls(path.absolute())
        base, number = Path("runs") / config.name, 1
        path = base
        while path.exists():
            number += 1
            path = base.with_name(f"{config.name}-{number}")
        return cls(path.absolute())

    def create(self, config: Config) -> None:
        """Make the folders and write the resolved config; ``ConfigError`` when the place isn't writable."""
        try:
            self._make_folders()
        except OSError as error:
            raise ConfigError(f"run_dir: can't create {error.filename}: {error.strerror}") from None
        self._run_lock = _lock(self.path)
        self.config.write_text(to_yaml(config))

    def reopen(self) -> Config:
        """Take up the run that was made here and did not end with success; its config.

        ``ConfigError`` when there is none, or when its controller still runs.
        """
        try:
            self._run_lock = _lock(self.path)
        except OSError:
            raise ConfigError(f"{self.path} is no run folder") from None
        if self._run_lock is None:
            raise ConfigError(f"the run in {self.path} still has a controller: stop it first")
        if not self.config.is_file() or not self._journal.is_file():
            raise ConfigError(
                f"{self.path} is no run that can be resumed: it has no config.yaml and no journal"
            )
        config = load_config(self.config)
        journal = Journal(self.journal, before_batch=lambda: None)
        try:
            journal.resume()
        except RunError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        finally:
            journal.close()
        if journal.ledger.finished:
            raise ConfigError(f"the run in {self.path} has made all its steps: there is nothing to resume")
        shutil.rmtree(self.private, ignore_errors=True)  # of the controller before
        if self.weights.exists():  # what that one saved last; the run's own end writes them anew
            number = 1
            while (aside := self.path / f"weights-before-resume-{number}").exists():
                number += 1
            self.weights.rename(aside)
        self._make_folders()
        return config

    def _make_folders(self) -> None:
        for folder in (self.path, self.logs, self.private, self.checkpoints):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store = _make_store(self.path)
        self._store_lock = _lock(self.store)

    def open_events(self, *, more: bool = False) -> BinaryIO:
        """The event stream's file, which must not exist yet unless there is to be ``more`` in it."""
        return self.events.open("r+b" if more else "xb")

    def open_metrics(self, *, more: bool = False) -> TextIO:
        """The metrics' file, which must not exist yet unless there is to be ``more`` in it."""
        if more:
            self.metrics.touch()
        return self.metrics.open("r+" if more else "x")

    def clean(self) -> None:
        """Remove what only a running run needs."""
        shutil.rmtree(self.private, ignore_errors=True)
        if self.store is not None:
            shutil.rmtree(self.store, ignore_errors=True)
        for lock in (self._store_lock, self._run_lock):
            if lock is not None:
                os.close(lock)
        self._store_lock = self._run_lock = None


class JournalFile:
    """The journal of a run folder.  Fills ``JournalStorage``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_suffix(".new")

    def existing(self) -> BinaryIO:
        """The file."""
        return self._path.open("r+b", buffering=0)

    def fresh(self) -> BinaryIO:
        """Beside it, until it is installed."""
        descriptor = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        return os.fdopen(descriptor, "r+b", buffering=0)

    def install(self) -> None:
        """At once, or not at all."""
        self._unfinished.replace(self._path)


def to_yaml(config: Config) -> str:
    """The config as YAML, which loads to an equal config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def _make_store(run: Path) -> Path:
    """A private folder in shared memory, or in the run folder where the system has none."""
    if not SHARED_MEMORY.is_dir():
        store = run / "store"
        store.mkdir(mode=0o700)
        return store
    _remove_orphans()
    return Path(tempfile.mkdtemp(prefix=STORE_PREFIX, dir=SHARED_MEMORY))


def _lock(store: Path) -> int | None:
    """Lock ``store`` for as long as this process lives; ``None`` when another holds it."""
    descriptor = os.open(store, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_orphans() -> None:
    """Remove the stores of this user's controllers that were killed: nobody holds their locks."""
    for folder in SHARED_MEMORY.glob(f"{STORE_PREFIX}*"):
        with contextlib.suppress(OSError):
            age_s = time.time() - folder.stat().st_mtime
            if folder.stat().st_uid != os.getuid() or age_s < YOUNG_S:
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder)
                os.close(lock)
