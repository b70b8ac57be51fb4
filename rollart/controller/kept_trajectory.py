"""A scored trajectory on its way through the journal: its record, and what a resumed run makes of it."""

from __future__ import annotations

from rollart.controller.journal import Scored, Texts
from rollart.controller.record import Record
from rollart.controller.trajectory import Kind, Limits, Observer, State, Trajectory
from rollart.protocol import TrainSample
from rollart.rewards.view import TurnView

__all__ = ["KeptTrajectory", "restored", "scored_record"]


class KeptTrajectory(Trajectory):
    """Scored by the run before this one; it only waits for its batch."""

    __slots__ = ("_length", "_samples")

    def keep(self, record: Scored) -> None:
        """Take over what ``record`` holds."""
        self.state = State.SCORED
        self.attempt = record.attempt
        self.turns = record.turns
        self.success = record.success
        self.score = record.score
        self.truncated = record.truncated
        self.reward = record.reward
        if record.texts is not None:
            self.record = _record(record.texts)
            self.ids = bytearray(record.samples[-1].ids)
            self.mask = bytearray(record.samples[-1].mask)
        self.versions = [run for sample in record.samples for run in sample.versions]
        self._length = record.tokens
        self._samples = record.samples

    @property
    def length(self) -> int:
        """Tokens of all its sequences."""
        return self._length

    @property
    def oldest(self) -> int | None:
        """The lowest version among the sampled tokens."""
        return min((run.version for run in self.versions), default=None)

    @property
    def newest(self) -> int:
        """The highest version among the sampled tokens."""
        return max((run.version for run in self.versions), default=-1)

    def take_samples(self) -> list[TrainSample]:
        """What the trainer gets of it; not kept here any longer."""
        samples, self._samples = self._samples, []
        return samples


def scored_record(trajectory: Trajectory) -> Scored:
    """What the journal keeps of a trajectory that is SCORED."""
    return Scored(
        trajectory.group,
        trajectory.member,
        trajectory.attempt,
        trajectory.turns,
        trajectory.success,
        trajectory.score,
        trajectory.reward,
        trajectory.length,
        trajectory.truncated,
        trajectory.id,
        trajectory.copy_samples(),
        _texts(trajectory.record) if trajectory.record is not None else None,
    )


def _texts(record: Record) -> Texts:
    turns = [(turn.observation, turn.answer, turn.reward) for turn in record.turns]
    return Texts(turns, record.last, record.reference, record.info)


def _record(texts: Texts) -> Record:
    record = Record()
    record.started = True
    record.turns = [TurnView(*turn) for turn in texts.turns]
    record.last, record.reference = texts.last, texts.reference
    record.info = texts.info
    return record


def restored(record: Scored, task: str, seed: int, limits: Limits, observer: Observer) -> KeptTrajectory:
    """The trajectory that ``record`` is of."""
    trajectory = KeptTrajectory(
        id=record.trajectory,
        group=record.group,
        member=record.member,
        task=task,
        seed=seed,
        kind=Kind.TRAIN,
        limits=limits,
        observer=observer,
    )
    trajectory.keep(record)
    return trajectory
