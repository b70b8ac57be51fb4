"""What a person at the terminal sees while a run goes on."""

from __future__ import annotations

import logging
import math
import shutil
from collections import deque
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Progress"]

logger = logging.getLogger(__name__)

RECENT = 20


class Progress:
    """One line a step; on a terminal also a line that is renewed in place."""

    def __init__(self, stream: TextIO, steps: int) -> None:
        self._stream = stream
        self._steps = steps
        self.live = stream.isatty()
        """Somebody may be watching: ``status`` shows something."""
        self._shown = 0
        self._gone = False
        """Nobody reads the stream any more."""
        self._success: deque[float] = deque(maxlen=RECENT)
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"\r{text:<{self._shown}}\n" if self._shown else f"{text}\n")
        self._shown = 0

    def step(self, row: Mapping[str, float | int | str | None], live: Mapping[str, int]) -> None:
        """A step is done; ``row`` is its metrics."""
        number = int(row["step"] or 0) + 1
        self._success.append(float(row["success_rate"] or 0))
        self._seconds.append(float(row["step_seconds"] or 0))
        evaluated = f" eval {float(row['eval_success'] or 0):.2f}" if "eval_success" in row else ""
        self.say(
            f"step {number:>{len(str(self._steps))}}/{self._steps}"
            f" reward {float(row['reward_mean'] or 0):.3f}"
            f" success {float(row['success_rate'] or 0):.2f} (last {len(self._success)}: {mean(self._success):.2f})"
            f"{evaluated}"
            f" staleness {row['staleness_max']} lag {row['train_lag_max']}"
            f" gap {_short(row.get('logprob_gap_mean'))}{_troubles(row)}"
            f" {float(row['tokens_per_second'] or 0):,.0f} tok/s"
            f" {float(row['step_seconds'] or 0):.2f} s"
            f" [{in_states(live)}]"
            f" left {duration(mean(self._seconds) * (self._steps - number))}"
        )

    def status(self, text: str) -> None:
        """What goes on right now; shown on a terminal only, until the next line."""
        if self.live:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._write(f"\r{text:<{self._shown}}")
            self._shown = len(text)

    def _write(self, text: str) -> None:
        """A run goes on, and ends in order, without anybody who reads: a closed pipe, a full disk."""
        if self._gone:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            self._gone = True
            logger.warning("progress can't be shown any more: %s", error)


def _troubles(row: Mapping[str, float | int | str | None]) -> str:
    """What a person must not miss: a skipped step, episodes that failed."""
    failed = sum(int(count or 0) for name, count in row.items() if name.startswith("failed_"))
    return (f" SKIPPED ({row['skipped']})" if row.get("skipped") else "") + (
        f" {failed} failed" if failed else ""
    )


def _short(number: float | int | str | None) -> str:
    return "unknown" if number is None else f"{float(number):.1e}"


def in_states(live: Mapping[str, int]) -> str:
    """Trajectories by state, in short."""
    return " ".join(f"{state} {count}" for state, count in live.items() if count) or "none in flight"


def mean(values: deque[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0


def duration(seconds: float) -> str:
    """As a person says it."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    )
