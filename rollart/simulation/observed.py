"""What a run's folder tells: its requests, environment calls, episodes, train_steps and weight updates, with times.

Read from ``events`` and ``metrics.jsonl``.  Only trajectories of training count; times are seconds since the run
began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollart.config import Config
from rollart.controller import events
from rollart.controller.configuration import load_config
from rollart.controller.trajectory import Kind, Reason, State
from rollart.errors import ConfigError
from rollart.simulation.fitting import scored_lengths, trained_tokens

__all__ = ["Call", "Episode", "Observed", "Request", "TrainStep", "observe", "read_run"]

WORKING = (State.RESETTING, State.GENERATING, State.STEPPING)
"""States in which a worker has a request of the trajectory's."""


class Request(msgspec.Struct, frozen=True):
    """An answer, from the trajectory's turn to it."""

    start_s: float
    end_s: float
    worker: str
    prompt_tokens: int
    tokens: int
    """Sampled."""
    cached_tokens: int
    first: bool
    """Of its trajectory's attempt: nothing of its prompt can be in a cache."""


class Call(msgspec.Struct, frozen=True):
    """Something an environment, or a reward, was asked for."""

    start_s: float
    end_s: float
    task: str
    state: str
    """``resetting``, ``stepping`` or ``scoring``."""
    failed: bool
    tokens: int
    """Of the observation that came back; 0: there was none, or the episode was over."""


class Episode(msgspec.Struct, frozen=True):
    """A trajectory that ended."""

    task: str
    group: int
    turns: int
    whole: bool
    """It came to its own end; otherwise it was cut short, and would have had more turns."""


class TrainStep(msgspec.Struct, frozen=True):
    """A train_step, with what precedes it in its worker."""

    start_s: float
    end_s: float
    tokens: float
    """As of ``trained_tokens``."""
    sequences: int


class Observed(msgspec.Struct, kw_only=True):
    """A run."""

    config: Config
    requests: list[Request] = []
    calls: list[Call] = []
    episodes: list[Episode] = []
    train_steps: list[TrainStep] = []
    swaps: list[events.Swapped] = []
    """But those of each worker's first weights."""
    publish_s: list[float] = []
    """From the end of a train_step to its version being in the store."""
    start_s: dict[str, list[float]] = {}
    """By role: from the run's beginning to a worker's readiness."""
    messages_s: list[float] = []
    """When the controller sent or received a message of a trajectory, ascending."""
    step_s: list[float] = []
    """Of each step, evaluations taken out."""
    reward: list[float] = []
    """Of each step's batch, the mean."""
    success: list[float] = []
    """Of each step's batch, the share."""


def read_run(folder: Path) -> Observed:
    """What the run in ``folder`` left; ``ConfigError`` when it isn't there or can't be read."""
    for name in ("config.yaml", "events", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no run folder to calibrate on: it has no file {name}")
    config = load_config(folder / "config.yaml")
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return observe(config, events.read_events(folder / "events"), rows)
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        raise ConfigError(f"can't calibrate on {folder}: {error}") from None


class _Life:
    """A trajectory's."""

    __slots__ = ("group", "last", "since_s", "task", "tokens", "turns")

    def __init__(self, task: str, group: int, now_s: float) -> None:
        self.task = task
        self.group = group
        self.since_s = now_s
        self.tokens = 0
        self.turns = 0
        self.last: events.Sampled | None = None


def observe(config: Config, stream: Iterable[events.Event], rows: list[dict[str, float]]) -> Observed:
    """What the events and the metrics of a run of ``config`` tell."""
    seen = Observed(config=config)
    lives: dict[int, _Life] = {}
    trained: dict[int, events.TrainedStep] = {}
    for event in stream:
        match event:
            case events.Dispatched(kind=Kind.TRAIN):
                lives[event.trajectory] = _Life(event.task, event.group, event.t)
            case events.Sampled():
                if event.trajectory in lives:
                    lives[event.trajectory].last = event
            case events.Moved():
                if event.trajectory in lives:
                    _moved(seen, lives[event.trajectory], event)
            case events.TrainedStep():
                trained[event.after] = event
                _trained(seen, event, rows)
            case events.Published():
                if event.version in trained:
                    seen.publish_s.append(event.t - trained[event.version].t)
            case events.Swapped():
                if event.before >= 0:
                    seen.swaps.append(event)
            case events.WorkerChanged(state="ready"):
                seen.start_s.setdefault(event.role, []).append(event.t)
            case _:
                pass
    for row in rows:
        seen.step_s.append(
            row["step_seconds"] - (row.get("eval_seconds", 0.0) if _evaluated_within(row, rows) else 0.0)
        )
        seen.reward.append(row["reward_mean"])
        seen.success.append(row["success_rate"])
    return seen


def _evaluated_within(row: dict[str, float], rows: list[dict[str, float]]) -> bool:
    """Its evaluation is part of its time; the last's comes after it."""
    return row is not rows[-1]


def _trained(seen: Observed, event: events.TrainedStep, rows: list[dict[str, float]]) -> None:
    if event.skipped or event.step >= len(rows):
        return
    seconds = rows[event.step]["train_step_seconds"]
    lengths = [sample.tokens for sample in event.samples]
    share = seen.config.trainer.verify_share
    scored = scored_lengths(lengths, [s.versions for s in event.samples], event.before, share, event.step)
    tokens = trained_tokens(lengths, scored, seen.config.trainer.sequences)
    seen.train_steps.append(TrainStep(event.t - seconds, event.t, tokens, len(event.samples)))


def _moved(seen: Observed, life: _Life, event: events.Moved) -> None:
    before, after = event.before, event.after
    answered = (before, after) in _ANSWERED
    if before in WORKING and (answered or event.reason in _FAILURES):
        seen.messages_s.append(event.t)
    if after in WORKING:
        seen.messages_s.append(event.t)
    if before == State.GENERATING and after == State.STEPPING and life.last is not None:
        sampled = life.last
        seen.requests.append(
            Request(
                life.since_s,
                event.t,
                sampled.worker,
                life.tokens,
                sampled.tokens,
                sampled.cached_tokens,
                sampled.turn == 0,
            )
        )
    elif before in (State.RESETTING, State.STEPPING, State.SCORING) and (
        answered or event.reason in _FAILURES
    ):
        new = event.tokens - life.tokens if after == State.GENERATING else 0
        seen.calls.append(Call(life.since_s, event.t, life.task, before, not answered, new))
    if after == State.SCORED:
        seen.episodes.append(Episode(life.task, life.group, event.turns, True))
    elif after in (State.ABORTED, State.FAILED) and before != State.SCORED and event.turns:
        seen.episodes.append(Episode(life.task, life.group, event.turns, False))
    life.since_s, life.tokens = event.t, event.tokens


_ANSWERED = frozenset(
    {
        (State.RESETTING, State.GENERATING),
        (State.GENERATING, State.STEPPING),
        (State.STEPPING, State.GENERATING),
        (State.STEPPING, State.SCORING),
        (State.SCORING, State.SCORED),
    }
)
_FAILURES = frozenset({Reason.ENV_ERROR, Reason.ENV_TIMEOUT})
