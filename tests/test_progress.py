"""What a person at the terminal sees, and what happens when nobody looks."""

from __future__ import annotations

import io

import pytest

from rollart.controller.progress import Progress

ROW: dict[str, float | int | str | None] = {
    "step": 3,
    "success_rate": 0.5,
    "step_seconds": 1.0,
    "reward_mean": 0.5,
    "staleness_max": 1,
    "train_lag_max": 2,
    "tokens_per_second": 10.0,
}


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("closed", [False, True])
def test_a_run_goes_on_when_nobody_reads_its_progress(closed: bool) -> None:
    stream = io.StringIO() if closed else Closed()
    progress = Progress(stream, 10)
    if closed:
        stream.close()
    progress.say("a line")
    progress.step(ROW, {"generating": 3})
    progress.status("working")


def test_a_terminal_without_unicode_gets_what_it_can_show() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    Progress(stream, 10).say("run folder runs/ünï")
    stream.flush()
    assert b"runs/\\xfcn\\xef" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_skipped_step_and_failed_episodes_are_seen() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 10)
    progress.step({**ROW, "skipped": "the loss is nan", "failed_env_error": 2, "failed_env_timeout": 1}, {})
    progress.step(ROW, {})
    troubled, fine = stream.getvalue().splitlines()
    assert "SKIPPED (the loss is nan)" in troubled and "3 failed" in troubled
    assert "SKIPPED" not in fine and "failed" not in fine
