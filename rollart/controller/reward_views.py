"""From a trajectory's state to the view that its reward function gets."""

from __future__ import annotations

from rollart.controller.trajectory import Kind, Trajectory
from rollart.packing import unpack_ids
from rollart.rewards.view import EnvironmentView, TrajectoryView

__all__ = ["view_of"]


def view_of(trajectory: Trajectory, *, ids: bool = False) -> TrajectoryView:
    """The view of a trajectory with a record; ``ids`` puts token ids and mask into it."""
    record = trajectory.record
    assert record is not None  # every trajectory of a task with reward functions has one
    return TrajectoryView(
        id=trajectory.id,
        task=trajectory.task,
        seed=trajectory.seed,
        split=trajectory.kind.value,
        group=trajectory.group if trajectory.kind is Kind.TRAIN else -1,
        member=trajectory.member,
        turns=list(record.turns),
        final_observation=record.last,
        truncated=trajectory.truncated,
        environment=EnvironmentView(
            trajectory.reward, trajectory.success, dict(record.info), record.reference
        ),
        versions=(-1 if trajectory.oldest is None else trajectory.oldest, trajectory.newest),
        ids=unpack_ids(trajectory.ids) if ids else None,
        mask=list(trajectory.mask) if ids else None,
    )
