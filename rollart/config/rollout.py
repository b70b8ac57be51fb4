"""How trajectories become batches."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from rollart.config.section import (
    NonNegativeInt,
    PositiveInt,
    Section,
)

__all__ = ["MixedVersions", "Rollout", "Schedule", "UpdateAt"]


class UpdateAt(enum.StrEnum):
    """When inference workers take new weights, which decides what ``staleness_bound`` speaks of."""

    BATCH = "batch"
    """The paper's order: all workers together, right after a batch is formed."""
    PUBLISH = "publish"
    """Each worker by itself, as soon as it holds the newest version."""


class Schedule(enum.StrEnum):
    """How generation and training take turns; all but the first are there to be compared with."""

    ROLLART = "rollart"
    """Both at once, every trajectory at its own pace, the bound kept at every turn.  With ``update_at: publish``
    and alpha 0 it is the usual synchronous loop with asynchronous environments and rewards (``sync_plus``)."""
    SYNC = "sync"
    """All trajectories of a batch take each turn together, are scored together, and are trained on before the
    next begin."""
    ONE_OFF = "one_off"
    """A batch is trained on while the next is generated, whole, with the weights from before that step."""
    AREAL = "areal"
    """As AReaL (arXiv 2505.24298): the bound is kept when a trajectory starts, and never looked at again."""


class MixedVersions(enum.StrEnum):
    """What becomes of a trajectory whose tokens were sampled by several weight versions."""

    CORRECT = "correct"
    """Train on all tokens, each with the importance ratio against the engine's own log-probability."""
    MASK = "mask"
    """Train only on the tokens of the trajectory's newest version."""
    DROP = "drop"
    """Abort the trajectory (reason ``mixed_versions``) and start another."""


class Rollout(Section, frozen=True, kw_only=True):
    """How trajectories become batches."""

    staleness_bound: NonNegativeInt = 1
    """alpha: how many versions old a trained group may be; what counts as its age depends on ``update_at``."""
    update_at: UpdateAt = UpdateAt.BATCH
    schedule: Schedule = Schedule.ROLLART
    groups_per_batch: PositiveInt = 8
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Trajectories of one task instance that share a baseline (G)."""
    min_group: Annotated[int, Meta(ge=2)] | None = None
    """A group that can't complete closes short with at least so many; by default ``group_size``."""
    redundant_groups: NonNegativeInt = 0
    """Groups in flight beyond what the bound admits for the next batches (R)."""
    redundant_members: NonNegativeInt = 0
    """Trajectories a group starts beyond ``group_size``; it closes at the first ``group_size``."""
    member_refills: NonNegativeInt = 4
    """Trajectories a group may start in place of failed or stale ones."""
    retries: NonNegativeInt = 2
    """Times a trajectory starts again after an infrastructure failure."""
    mixed_versions: MixedVersions = MixedVersions.CORRECT
    filter_groups: bool = False
    """Drop groups whose rewards are all equal, and sample others in their place."""
    max_filtered_groups: PositiveInt | None = None
    """So many filtered groups in a row stop the run, for it gets no signal; by default 256."""
    max_failed_groups: PositiveInt = 32
    """So many groups in a row that end without a sample stop the run: its environments or engines are broken."""

    def __post_init__(self) -> None:
        if self.update_at is UpdateAt.BATCH and self.staleness_bound == 0:
            raise ValueError(
                "staleness_bound 0 can't exist with update_at: batch, since get_batch would wait for the update "
                "and the update for get_batch; use update_at: publish, where 0 is exactly on-policy"
            )
        fixed = _FIXED_BY_SCHEDULE[self.schedule]
        for name, wanted in fixed.items():
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"schedule {self.schedule} is defined with {name}: {wanted}; it is {getattr(self, name)} here"
                )
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"min_group ({self.min_group}) must be at most group_size ({self.group_size})")
        if self.max_filtered_groups is not None and not self.filter_groups:
            raise ValueError("max_filtered_groups does nothing without filter_groups: true")

    @property
    def most_open_members(self) -> int:
        """Trajectories of one batch, the redundant ones included."""
        return (self.groups_per_batch + self.redundant_groups) * (self.group_size + self.redundant_members)

    @property
    def smallest_group(self) -> int:
        """Members a group needs to be trained on."""
        return self.min_group or self.group_size


_FIXED_BY_SCHEDULE: dict[Schedule, dict[str, object]] = {
    Schedule.ROLLART: {},
    Schedule.SYNC: {"update_at": UpdateAt.PUBLISH, "staleness_bound": 0},
    Schedule.ONE_OFF: {"update_at": UpdateAt.BATCH, "staleness_bound": 1},
    Schedule.AREAL: {"update_at": UpdateAt.PUBLISH},
}
