"""The staleness bound alpha: who may be trained, who can still make it, how much may be in flight.

Pure arithmetic on versions.  ``n`` counts the trainer's completed train_steps, ``m`` is the lowest version
that inference workers serve, and ``busy`` says that a batch is complete and its step has not ended.  With
``update_at: batch`` (the paper's order, arXiv 2512.22560) a group's age is measured against ``m``, with
``update_at: publish`` against ``n``.
"""

from __future__ import annotations

import msgspec

from rollart.config import Schedule, UpdateAt
from rollart.errors import InvariantError

__all__ = ["Bound", "Versions", "bound_of"]


class Versions(msgspec.Struct, gc=False):
    """Where the run stands; 0 ≤ m ≤ n."""

    n: int = 0
    m: int = 0
    busy: bool = False


class Bound(msgspec.Struct, frozen=True):
    """The rule of one run: ``alpha`` ≥ 0 and what it is measured against."""

    alpha: int
    update_at: UpdateAt

    def reference(self, versions: Versions) -> int:
        """The version that ages are measured against when a batch is formed now."""
        return versions.m if self.update_at is UpdateAt.BATCH else versions.n

    def next_reference(self, versions: Versions) -> int:
        """The lowest reference that a group not yet in a batch can meet."""
        if self.update_at is UpdateAt.BATCH:
            return versions.n if versions.busy else versions.m
        return versions.n + 1 if versions.busy else versions.n

    def floor(self, versions: Versions) -> int:
        """Tokens sampled by a version below this can't be trained any more."""
        return self.next_reference(versions) - self.alpha

    def staleness(self, version: int, versions: Versions) -> int:
        """Age of a group of lowest ``version`` in a batch formed now; a negative one is a bug."""
        age = self.reference(versions) - version
        if age < 0:
            raise InvariantError(
                f"staleness {age} is negative: a group of version {version} against reference "
                f"{self.reference(versions)} (n={versions.n}, m={versions.m})"
            )
        return age

    def oldest(self, versions: Versions) -> int:
        """The lowest version that a group may have in a batch formed now."""
        return self.reference(versions) - self.alpha

    @property
    def max_train_lag(self) -> int | None:
        """The bound on n - version of every trained token; ``None``: there is none."""
        return self.alpha + 1 if self.update_at is UpdateAt.BATCH else self.alpha

    def open_groups(self, versions: Versions, *, per_batch: int, redundant: int) -> int:
        """How many groups may be open (reserved and not yet shipped) now.

        A group admitted now can be trained in a batch whose reference is at most alpha ahead of the version
        it starts with, ``m``.  The batches up to that one, less those already formed, are what it may wait for.
        """
        ahead = 1 if self.update_at is UpdateAt.BATCH else 0
        batches = versions.m + self.alpha + 1 + ahead - versions.n - int(versions.busy)
        batches = min(self.alpha + 1, batches)
        return batches * per_batch + redundant if batches > 0 else 0


class _OneOff(Bound, frozen=True):
    """A batch is generated whole while the one before it is trained on, and ages by that step."""

    def reference(self, versions: Versions) -> int:
        return versions.n

    def next_reference(self, versions: Versions) -> int:
        return versions.n + int(versions.busy)

    @property
    def max_train_lag(self) -> int | None:
        return self.alpha

    def open_groups(self, versions: Versions, *, per_batch: int, redundant: int) -> int:
        """One batch, begun once the workers have the weights that the batch in training was formed with."""
        waits = versions.busy and versions.m < versions.n
        return 0 if waits else per_batch + redundant


class _AtStart(Bound, frozen=True):
    """The bound paces what is started; what has started is trained on whatever its age."""

    def floor(self, versions: Versions) -> int:
        return 0

    def oldest(self, versions: Versions) -> int:
        return 0

    @property
    def max_train_lag(self) -> int | None:
        return None

    def open_groups(self, versions: Versions, *, per_batch: int, redundant: int) -> int:
        """All groups ever started are at most (n + alpha + 1) batches, shipped ones included."""
        return (self.alpha + 1 - int(versions.busy)) * per_batch + redundant


def bound_of(schedule: Schedule, alpha: int, update_at: UpdateAt) -> Bound:
    """The rule of a schedule."""
    kinds = {Schedule.ONE_OFF: _OneOff, Schedule.AREAL: _AtStart}
    return kinds.get(schedule, Bound)(alpha, update_at)
