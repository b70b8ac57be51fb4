"""Limits on a run's numbers."""

from __future__ import annotations

import msgspec
import pytest

from rollart.config import health as config
from rollart.controller.health import Health


def judged(text: str, rows: list[dict[str, object]]) -> list[tuple[list[str], str]]:
    health = Health(msgspec.yaml.decode(text, type=config.Health))
    return [tuple(health.judge(row)) for row in rows]  # type: ignore[misc]


def test_a_number_outside_warns_once_until_it_was_inside_again() -> None:
    found = judged("{ess: {warn_below: 0.5}}", [{"ess": e} for e in (0.9, 0.4, 0.3, 0.6, 0.2)])
    assert [len(warnings) for warnings, _ in found] == [0, 1, 0, 0, 1]
    assert found[1][0] == ["ess is 0.4, below health.ess.warn_below (0.5)"]
    assert not any(stop for _, stop in found)


def test_a_run_stops_only_after_the_steps_in_a_row() -> None:
    text = "{grad_norm: {warn_above: 5, stop_above: 10, steps: 2}}"
    found = judged(text, [{"grad_norm": n} for n in (20.0, 3.0, 20.0, 30.0)])
    assert [stop for _, stop in found[:3]] == [""] * 3
    assert found[3] == (
        ["grad_norm is 30, above health.grad_norm.warn_above (5) in 2 steps in a row"],
        "grad_norm is 30, above health.grad_norm.stop_above (10) in 2 steps in a row",
    )


def test_a_step_without_the_number_is_passed_over() -> None:
    found = judged("{logprob_gap_mean: {stop_above: 1}}", [{"logprob_gap_mean": None}, {}])
    assert found == [([], ""), ([], "")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ess: {}}", "at least one of"),
        ("{ess: {warn_below: 0.1, stop_below: 0.2}}", "would do nothing"),
        ("{grad_norm: {warn_above: 9, stop_above: 8}}", "would do nothing"),
        ("{gradient: {warn_above: 9}}", "unknown field"),
    ],
)
def test_limits_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.yaml.decode(text, type=config.Health)
