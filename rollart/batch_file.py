"""A batch in a file: what the trainer keeps of a step that it skipped, to be looked at.

from rollart.batch_file import read_batch
for group in read_batch("runs/NAME/skipped/step-000012.batch"):
    ...  # rollart.protocol.TrainGroup; rollart.packing unpacks ids and log-probabilities
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollart.protocol import TrainGroup

__all__ = ["MOST_KEPT", "batch_path", "read_batch", "write_batch"]

MOST_KEPT = 8
"""Batches that a run leaves of its skipped steps: the last ones."""


def batch_path(run_dir: str | Path, step_id: int) -> Path:
    """Where the batch of a skipped step is kept."""
    return Path(run_dir) / "skipped" / f"step-{step_id:06}.batch"


def write_batch(path: Path, frames: Sequence[bytes]) -> None:
    """Write encoded groups, one a frame; of the files beside it the newest ``MOST_KEPT`` stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(msgspec.msgpack.encode([bytes(frame) for frame in frames]))
    temporary.rename(path)
    for old in sorted(path.parent.glob("step-*.batch"))[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def read_batch(path: str | Path) -> list[TrainGroup]:
    """The groups in the file; ``ValueError`` when it is none."""
    try:
        frames = msgspec.msgpack.decode(Path(path).read_bytes(), type=list[bytes])
        return [msgspec.msgpack.decode(frame, type=TrainGroup) for frame in frames]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no batch: {error}") from error
