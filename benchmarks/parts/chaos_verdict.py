"""What became of a run under faults, by its event stream: recoveries, and what was lost, doubled or stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.chaos_run import Fault, Planned
from benchmarks.parts.report import Row, metrics_of
from rollart.controller import events
from rollart.controller.configuration import load_config
from rollart.controller.events import Event, read_events
from rollart.controller.invariants import Invariants
from rollart.simulation import order

__all__ = ["recoveries", "verdict"]


def verdict(run: Path) -> Row:
    """``trajectories``, those ``lost`` (without an end state), ``duplicated`` (trained twice), ``stale`` (beyond the
    bound), ``other`` violations of the invariants or of the order of tasks and steps, and the held-out ``score``."""
    invariants = Invariants()
    for event in read_events(run / "events"):
        invariants.feed(event)
    rows = metrics_of(run)
    steps = [row["step"] for row in rows]
    broken = invariants.violations + order.violations(
        load_config(run / "config.yaml"), (run / "events").read_bytes(), sorted(set(steps))
    )
    if steps != list(range(len(steps))):
        broken.append(f"the metrics are of steps {steps}")
    kinds = Counter({"I2": "duplicated", "I3": "stale"}.get(each[:2], "other") for each in broken)
    return {
        "steps": len(steps),
        "trajectories": len(invariants.states),
        "lost": sum(not state.ended for state in invariants.states.values()),
        **{kind: kinds[kind] for kind in ("duplicated", "stale", "other")},
        "violations": broken[:20],
        "score": rows[-1].get("eval_success"),
    }


def recoveries(run: Path, faults: Sequence[Planned]) -> list[Row]:
    """A row a fault that was carried out: ``fault``, ``at_s`` into the run, and ``recovered_s``, from the blow to work
    being done again: an inference worker's acknowledgement of weights, a ready environment worker, a train_step."""
    stream = list(_with_unix_times(run))
    begin = stream[0][0]
    return [
        {
            "fault": str(planned.fault),
            "at_s": planned.unix_time - begin,
            "recovered_s": _recovered_s(planned, stream),
            "left_over": planned.left_over,
        }
        for planned in faults
        if planned.unix_time
    ]


def _with_unix_times(run: Path) -> list[tuple[float, Event]]:
    found, zero = [], 0.0
    for event in read_events(run / "events"):
        if isinstance(event, events.Started | events.Resumed):
            zero = event.unix_time - event.t
        found.append((zero + event.t, event))
    return found


def _recovered_s(planned: Planned, stream: Sequence[tuple[float, Event]]) -> float | None:
    back = False
    for at, event in stream:
        if at < planned.unix_time:
            continue
        match event:
            case events.WorkerChanged(worker=planned.fault.victim, state="ready"):
                back = True
                if event.role == "environment":
                    return at - planned.unix_time
            case events.Resumed() if planned.fault is Fault.KILL_CONTROLLER:
                back = True
            case events.Swapped(worker=planned.fault.victim) if back:
                return at - planned.unix_time
            case events.TrainedStep() if back and planned.fault.victim in ("trainer-0", "controller"):
                return at - planned.unix_time
            case _:
                pass
    return None
