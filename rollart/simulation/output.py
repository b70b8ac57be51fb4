"""What a simulated run leaves: the event stream and the metrics, in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rollart.controller.journal import JournalStorage

__all__ = ["MemoryJournal", "MemoryOutput"]


class _KeptBytes(io.BytesIO):
    on_write: Callable[[], None] = staticmethod(lambda: None)

    def write(self, data: Any, /) -> int:
        """As of ``BytesIO``; told to who listens."""
        count = super().write(data)
        self.on_write()
        return count

    def close(self) -> None:
        """What was written stays readable."""


class _KeptText(io.StringIO):
    def close(self) -> None:
        """What was written stays readable."""


class MemoryJournal:
    """Fills ``JournalStorage``."""

    def __init__(self, content: bytes = b"") -> None:
        self._file = self._unfinished = _KeptBytes(content)
        self.on_write: Callable[[], None] = lambda: None
        """Called after each write."""

    @property
    def content(self) -> bytes:
        """What the file would hold."""
        return self._file.getvalue()

    def existing(self) -> BinaryIO:
        """The file."""
        self._file.seek(0)
        self._file.on_write = self._written
        return self._file

    def fresh(self) -> BinaryIO:
        """Beside it, until it is installed."""
        self._unfinished = _KeptBytes()
        self._unfinished.on_write = self._written
        return self._unfinished

    def install(self) -> None:
        """At once."""
        self._file = self._unfinished

    def _written(self) -> None:
        self.on_write()


class MemoryOutput:
    """Fills ``RunOutput``; its paths are names that simulated workers are told and nobody opens."""

    def __init__(
        self, *, events: bytes = b"", metrics: str = "", journal: MemoryJournal | None = None
    ) -> None:
        """``events`` and ``metrics`` are those of a run that is resumed; without ``journal`` none is kept."""
        self.path = Path("simulation")
        self.model = self.path / "model"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.store: Path | None = self.path / "store"
        self._events = _KeptBytes(events)
        self._metrics = _KeptText(metrics)
        self.journal: JournalStorage | None = journal

    @property
    def events(self) -> bytes:
        """The event stream as the file would hold it."""
        return self._events.getvalue()

    @property
    def metrics(self) -> str:
        """The metrics as the file would hold them."""
        return self._metrics.getvalue()

    def open_events(self, *, more: bool = False) -> BinaryIO:
        """The event stream."""
        return self._events

    def open_metrics(self, *, more: bool = False) -> TextIO:
        """The metrics."""
        return self._metrics

    def clean(self) -> None:
        """Nothing is left to remove."""
