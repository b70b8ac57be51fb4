"""Order: every task instance that was drawn has its turn, in the order of an uninterrupted run, and is trained once."""

from __future__ import annotations

import io

from rollart.config import Config
from rollart.controller import events
from rollart.controller.task_source import TaskSource
from rollart.controller.trajectory import Kind

__all__ = ["violations"]


def violations(config: Config, stream: bytes, lineage: list[int]) -> list[str]:
    """Of a run that ended with success: what is wrong with its groups, and with the steps that it is of."""
    found: list[str] = []
    drawn: dict[int, tuple[str, int]] = {}
    group_of: dict[int, int] = {}
    steps: dict[int, set[int]] = {}
    applied: dict[int, bool] = {}
    left: dict[int, str] = {}
    quarantined = False
    for event in events.parse_events(io.BytesIO(stream), "the run"):
        match event:
            case events.Dispatched(kind=Kind.TRAIN):
                instance = event.task, event.seed
                if drawn.setdefault(event.group, instance) != instance:
                    found.append(f"group {event.group} is of {drawn[event.group]} and of {instance}")
                group_of[event.trajectory] = event.group
            case events.GroupEnded():
                left[event.group] = event.outcome
            case events.TrainedStep():
                # Told twice where the controller died before it had noted it: the batch is the same.
                steps[event.step] = {sample.trajectory for sample in event.samples}
                applied[event.step] = not event.skipped
            case events.Quarantined():
                quarantined = True
            case _:
                pass
    trained: dict[int, int] = {}
    for step, trajectories in steps.items():
        for group in sorted({group_of[trajectory] for trajectory in trajectories if trajectory in group_of}):
            if trained.setdefault(group, step) != step:
                found.append(f"I2 group {group} was trained in steps {trained[group]} and {step}")
    never = [group for group in drawn if group not in left and group not in trained]
    if never:
        found.append(f"groups {never} never ended")
    if sorted(drawn) != list(range(len(drawn))):
        found.append(f"groups are missing: {sorted(set(range(max(drawn))) - set(drawn))}")
    if not quarantined and not any(task.curriculum for task in config.tasks):
        source = TaskSource(config.tasks, config.seed)
        expected = [source.draw() for _ in range(len(drawn))]
        if [drawn[group] for group in sorted(drawn)] != expected:
            found.append("the tasks were not drawn in the order of an uninterrupted run")
    if lineage != [step for step in sorted(applied) if applied[step]]:
        found.append(f"the final weights are of steps {lineage}, but {applied} were trained")
    return found
