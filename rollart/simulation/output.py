"""What a simulated run leaves: the event stream and the metrics, in memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, TextIO

__all__ = ["MemoryOutput"]


class _KeptBytes(io.BytesIO):
    def close(self) -> None:
        """What was written stays readable."""


class _KeptText(io.StringIO):
    def close(self) -> None:
        """What was written stays readable."""


class MemoryOutput:
    """Fills ``RunOutput``; its paths are names that simulated workers are told and nobody opens."""

    def __init__(self) -> None:
        self.path = Path("simulation")
        self.model = self.path / "model"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.store: Path | None = self.path / "store"
        self._events = _KeptBytes()
        self._metrics = _KeptText()

    @property
    def events(self) -> bytes:
        """The event stream as the file would hold it."""
        return self._events.getvalue()

    @property
    def metrics(self) -> str:
        """The metrics as the file would hold them."""
        return self._metrics.getvalue()

    def open_events(self) -> BinaryIO:
        """The event stream."""
        return self._events

    def open_metrics(self) -> TextIO:
        """The metrics."""
        return self._metrics

    def clean(self) -> None:
        """Nothing is left to remove."""
