"""The rules that hold in every run, checked on its event stream.

I1 conservation: every trajectory has one life, by the table of legal moves, and at the end of a run each has
ended.  I2 exactly once: no trajectory is trained twice, and what is consumed was trained.  I3 staleness: at
ship time 0 ≤ reference - v ≤ alpha, and 0 ≤ n - version ≤ the bound on train_lag for every trained token.
I4 truth: each answer has one version and one log-probability ≤ 0 a token, of versions that existed.
I5 mask: what is in the loss is what the engine sampled in the attempt that survived, no more and no less.
"""

from __future__ import annotations

from collections import defaultdict

from rollart.config import Schedule, UpdateAt
from rollart.controller import events
from rollart.controller.staleness import Bound, bound_of
from rollart.controller.trajectory import LEGAL, Kind, State

__all__ = ["Invariants"]


class Invariants:
    """Feed it every event of a run, in order; ``violations`` says what was broken, and where."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.transitions = 0
        self.states: dict[int, State] = {}
        self.trained: dict[int, int] = {}
        """The step that trained a trajectory."""
        self._kinds: dict[int, str] = {}
        self._sampled: dict[tuple[int, int], int] = defaultdict(int)
        self._attempts: dict[int, int] = defaultdict(int)
        self._bound = Bound(0, UpdateAt.PUBLISH)
        self._per_batch = 0
        self._newest = -1

    def feed(self, event: events.Event) -> None:
        """Check one event against all that came before."""
        match event:
            case events.Started():
                self._bound = bound_of(Schedule(event.schedule), event.alpha, UpdateAt(event.update_at))
                self._per_batch = event.groups_per_batch
            case events.Dispatched():
                self._require(
                    event.trajectory not in self.states, f"I1 {event.trajectory} was dispatched twice"
                )
                self.states[event.trajectory] = State.PENDING
                self._kinds[event.trajectory] = event.kind
            case events.Moved():
                self._moved(event)
            case events.Sampled():
                self._answered(event)
            case events.Published():
                self._require(
                    event.version == self._newest + 1, f"version {event.version} after {self._newest}"
                )
                self._newest = event.version
            case events.Shipped():
                self._shipped(event)
            case events.TrainedStep():
                self._trained_step(event)
            case events.Resumed():
                self._resumed(event)
            case events.Ended():
                self._ended()
            case _:
                pass

    def _require(self, condition: bool, violation: str) -> None:
        if not condition:
            self.violations.append(violation)

    def _moved(self, event: events.Moved) -> None:
        self.transitions += 1
        before, after = State(event.before), State(event.after)
        known = self.states.get(event.trajectory)
        self._require(known is before, f"I1 {event.trajectory} left {before} but was in {known}")
        self._require(after in LEGAL[before], f"I1 {event.trajectory} went from {before} to {after}")
        self.states[event.trajectory] = after
        if after is State.PENDING:
            self._attempts[event.trajectory] = event.attempt + 1

    def _answered(self, event: events.Sampled) -> None:
        at = f"I4 {event.trajectory} turn {event.turn}"
        versions = [run.version for run in event.versions]
        self._require(
            sum(run.count for run in event.versions) == event.tokens, f"{at}: a token without version"
        )
        self._require(versions == sorted(versions), f"{at}: versions go back: {versions}")
        self._require(versions[0] >= event.routed_version, f"{at}: older than what its worker acknowledged")
        self._require(versions[-1] <= self._newest, f"{at}: version {versions[-1]} was never published")
        expected = 0 if self._kinds.get(event.trajectory) == Kind.EVAL else event.tokens
        self._require(event.logprobs == expected, f"{at}: {event.logprobs} log-probabilities, not {expected}")
        self._require(not event.unsound, f"{at}: {event.unsound} log-probabilities that are none")
        self._sampled[event.trajectory, event.attempt] += event.tokens

    def _shipped(self, event: events.Shipped) -> None:
        self._require(len(event.groups) == self._per_batch, f"step {event.step}: {len(event.groups)} groups")
        for group, version in event.groups:
            age = event.reference - version
            bounded = age <= self._bound.alpha or self._bound.max_train_lag is None
            self._require(age >= 0 and bounded, f"I3 step {event.step}: group {group} has staleness {age}")

    def _trained_step(self, event: events.TrainedStep) -> None:
        for sample in event.samples:
            trajectory = sample.trajectory
            for run in sample.versions:
                lag = event.before - run.version
                most = self._bound.max_train_lag
                self._require(
                    lag >= 0 and (most is None or lag <= most),
                    f"I3 step {event.step}: {trajectory} has train_lag {lag}",
                )
            sampled = self._sampled[trajectory, self._attempts[trajectory]]
            self._require(
                sample.sampled == sampled and 0 < sampled < sample.tokens,
                f"I5 {trajectory}: {sample.sampled} of {sample.tokens} tokens in the loss, {sampled} were sampled",
            )
            if not event.skipped:
                earlier = self.trained.setdefault(trajectory, event.step)
                self._require(
                    earlier == event.step, f"I2 {trajectory} is in steps {earlier} and {event.step}"
                )

    def _resumed(self, event: events.Resumed) -> None:
        """Nothing that had ended comes back; what was not kept has ended."""
        kept = {each.trajectory for each in event.kept}
        for trajectory, state in self.states.items():
            if trajectory in kept:
                self._require(not state.ended, f"I1 {trajectory} is {state} and was kept by the resumed run")
            elif not state.ended:
                consumed = trajectory in self.trained
                self.states[trajectory] = State.CONSUMED if consumed else State.ABORTED
        for each in event.kept:
            self.states[each.trajectory] = State.SCORED
            self._kinds[each.trajectory] = Kind.TRAIN
            self.trained.pop(each.trajectory, None)  # if it was, what came of it is lost
            self._attempts[each.trajectory] = each.attempt
            self._sampled[each.trajectory, each.attempt] = each.sampled
        self._newest = event.version - 1

    def _ended(self) -> None:
        for trajectory, state in self.states.items():
            self._require(state.ended, f"I1 {trajectory} is {state} at the end of the run")
            if self._kinds[trajectory] == Kind.TRAIN:
                consumed = state is State.CONSUMED
                self._require(
                    consumed == (trajectory in self.trained),
                    f"I2 {trajectory} is {state} and was {'' if trajectory in self.trained else 'not '}trained",
                )
