"""A trajectory: its states, its tokens, and what it needs next.  No I/O, no clock.

The owner (a coroutine of ``EnvManager``) does what ``Next`` says and tells the trajectory what came of it.
Every change of state goes through ``Trajectory.move``, which refuses what ``LEGAL`` does not list and tells
the observer.  Tokens in, tokens out: the prompt of turn t+1 is the ids of turn t, the ids the engine
returned and the ids of the new observation; nothing is ever tokenised again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from rollart.controller.record import Record
from rollart.controller.sequences import Branches
from rollart.errors import InvariantError
from rollart.packing import ID_BYTES, pack_floats, pack_ids
from rollart.protocol import TrainSample, VersionRun

__all__ = ["LEGAL", "Kind", "Limits", "Next", "Reason", "State", "Trajectory"]


class State(enum.StrEnum):
    """Where a trajectory is in its life."""

    PENDING = "pending"
    RESETTING = "resetting"
    GENERATING = "generating"
    STEPPING = "stepping"
    SCORING = "scoring"
    SCORED = "scored"
    CONSUMED = "consumed"
    ABORTED = "aborted"
    FAILED = "failed"

    __hash__ = str.__hash__  # an enum's own is a call, and states are looked up at every move

    @property
    def ended(self) -> bool:
        """No further state follows."""
        return self in _ENDS


_ENDS = frozenset({State.CONSUMED, State.ABORTED, State.FAILED})
_BROKEN = frozenset({State.ABORTED, State.FAILED})

LEGAL: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.RESETTING}) | _BROKEN,
    State.RESETTING: frozenset({State.GENERATING, State.PENDING}) | _BROKEN,
    State.GENERATING: frozenset({State.STEPPING, State.PENDING}) | _BROKEN,
    State.STEPPING: frozenset({State.GENERATING, State.SCORING, State.PENDING}) | _BROKEN,
    State.SCORING: frozenset({State.SCORED}) | _BROKEN,
    State.SCORED: frozenset({State.CONSUMED}) | _BROKEN,
    State.CONSUMED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}
"""A move back to PENDING is a new attempt after an infrastructure failure."""


class Reason(enum.StrEnum):
    """Why a trajectory ended without being consumed, or began again."""

    NONE = ""
    STALE = "stale"
    REDUNDANT = "redundant"
    CANCELLED = "cancelled"
    GROUP_FILTERED = "group_filtered"
    GROUP_INCOMPLETE = "group_incomplete"
    MIXED_VERSIONS = "mixed_versions"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    GENERATION_ERROR = "generation_error"
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    CONTEXT_OVERFLOW = "context_overflow"
    NAN = "nan"
    SHUTDOWN = "shutdown"

    __hash__ = str.__hash__


class Kind(enum.StrEnum):
    """What a trajectory is for."""

    TRAIN = "train"
    EVAL = "eval"


class Next(enum.Enum):
    """What a trajectory's owner has to do now."""

    RESET = enum.auto()
    GENERATE = enum.auto()
    STEP = enum.auto()
    SCORE = enum.auto()
    NOTHING = enum.auto()

    __hash__ = object.__hash__


class Limits:
    """What bounds a trajectory of some task."""

    __slots__ = ("context_tokens", "max_tokens", "max_turns", "retries")

    def __init__(self, *, max_turns: int, max_tokens: int, context_tokens: int, retries: int) -> None:
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.context_tokens = context_tokens
        self.retries = retries


Observer = Callable[["Trajectory", State, Reason], None]


class Trajectory:
    """One episode of one task instance; ids of trajectories are never used twice in a run."""

    __slots__ = (
        "_answer_bytes",
        "_branches",
        "_observer",
        "attempt",
        "detail",
        "group",
        "id",
        "ids",
        "kind",
        "limits",
        "logprobs",
        "mask",
        "member",
        "record",
        "retries_left",
        "reward",
        "score",
        "seed",
        "state",
        "success",
        "task",
        "tokens",
        "truncated",
        "turn_rewards",
        "turn_tokens",
        "turns",
        "versions",
    )

    def __init__(
        self,
        *,
        id: int,
        group: int,
        member: int,
        task: str,
        seed: int,
        kind: Kind,
        limits: Limits,
        observer: Observer,
    ) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.task = task
        self.seed = seed
        self.kind = kind
        self.limits = limits
        self.state = State.PENDING
        self.attempt = 0
        self.retries_left = limits.retries
        self.detail = ""
        self.score = 0.0
        self.record: Record | None = None
        """What was said, where a reward function is to read it."""
        self._observer = observer
        self._clear()

    def _clear(self) -> None:
        self.ids = bytearray()
        """int32[T]: everything so far, prompt of the next turn."""
        self.mask = bytearray()
        """uint8[T]: 1 where the engine sampled the token."""
        self.logprobs = bytearray()
        """float32[S], of the sampled tokens."""
        self.versions: list[VersionRun] = []
        """Runs over the S sampled tokens; their versions never fall."""
        self.tokens = 0
        """T, prompt and observations included."""
        self._branches: Branches | None = None
        """An agent's other conversations; all of the above is of the one that was taken up last."""
        self._answer_bytes = 0
        self.turns = 0
        self.turn_tokens = b""
        """int32[turns]: sampled in each."""
        self.turn_rewards = b""
        """float32: what came after each turn so far."""
        self.reward = 0.0
        """Sum of the environment's step rewards."""
        self.success: float | None = None
        self.truncated = ""
        if self.record is not None:
            self.record = Record()

    # --- what happened → what is next ------------------------------------------------------------------

    def begin(self) -> Next:
        """Start, or start again after ``failed``."""
        self.move(State.RESETTING)
        return Next.RESET

    def observed(
        self, ids: bytes, reward: float, done: bool, info: dict[str, float], *, overdue: bool = False
    ) -> Next:
        """The environment answered a reset or a step; an ``overdue`` trajectory takes no more turns."""
        self.reward += reward
        if self.state is State.STEPPING:
            self.turn_rewards += pack_floats((reward,))
        if "success" in info:
            self.success = info["success"]
        count = len(ids) // ID_BYTES
        fits = self.room - count >= 1
        if self.state is State.RESETTING and (done or not fits):
            if done:
                return self.fail(Reason.ENV_ERROR, "the episode was over before its first turn")
            return self.fail(
                Reason.CONTEXT_OVERFLOW,
                f"the first observation has {count} tokens, the context {self.limits.context_tokens}",
            )
        overdue = overdue and self.turns > 0
        if done or not fits or overdue or self.turns >= self.limits.max_turns:
            # The last observation has no answer after it, so nothing in it is ever trained on.
            if not done:
                self.truncated = "max_turns" if self.turns >= self.limits.max_turns else "context"
                if overdue and fits:
                    self.truncated = "deadline"
            self.move(State.SCORING)
            return Next.SCORE
        # Not +=, which would leave room for an eighth more.
        self.ids = self.ids + ids
        self.mask = self.mask + bytes(count)
        self.tokens += count
        self.move(State.GENERATING)
        return Next.GENERATE

    def generated(self, ids: bytes, logprobs: bytes, versions: Sequence[VersionRun]) -> Next:
        """The engine answered; greedy answers (of evaluations) carry no log-probabilities."""
        count = len(ids) // ID_BYTES
        self._answer_bytes = len(ids)
        self.ids = self.ids + ids
        self.mask = self.mask + b"\x01" * count
        self.tokens += count
        self.logprobs = self.logprobs + logprobs
        for run in versions:
            self._append_run(run)
        self.turns += 1
        self.turn_tokens += pack_ids((count,))
        self.move(State.STEPPING)
        return Next.STEP

    def asked(self, sequence: int, ids: bytes) -> None:
        """An agent called: ``ids`` follow what its conversation ``sequence`` holds; a new number is a new one.

        Conversations are numbered from 0.  What a branch shares with another is in its ``ids``, as context: each
        sampled token is trained in the one sequence that it was sampled in.
        """
        if self._branches is not None or sequence:
            self._branches = self._branches or Branches()
            self._branches.take_up(self, sequence)
        count = len(ids) // ID_BYTES
        self.ids = self.ids + ids
        self.mask = self.mask + bytes(count)
        self.tokens += count
        self.move(State.GENERATING)

    def withdrawn(self) -> None:
        """The agent ended without waiting for the answer to its last call: as if it had not called."""
        kept = self.mask.rfind(1) + 1
        del self.mask[kept:], self.ids[kept * ID_BYTES :]
        self.tokens = kept
        self.move(State.STEPPING)

    def played(self, reward: float, info: dict[str, float]) -> Next:
        """The agent ended."""
        self.reward = reward
        if "success" in info:
            self.success = info["success"]
        if not self.turns:
            return self.fail(Reason.ENV_ERROR, "the agent ended without one answered call")
        self.move(State.SCORING)
        return Next.SCORE

    def scored(self, score: float) -> Next:
        """The reward is known."""
        self.score = score
        self.move(State.SCORED)
        return Next.NOTHING

    def failed(self, reason: Reason, detail: str, *, retry: bool) -> Next:
        """The environment or an engine failed it; an infrastructure failure (``retry``) has a new attempt."""
        self.detail = detail
        if not retry or self.retries_left == 0:
            return self.fail(reason, detail)
        self.retries_left -= 1
        self.move(State.PENDING, reason)
        self.attempt += 1
        self._clear()
        return self.begin()

    def fail(self, reason: Reason, detail: str) -> Next:
        """End as FAILED."""
        self.detail = detail
        self.move(State.FAILED, reason)
        return Next.NOTHING

    def abort(self, reason: Reason) -> None:
        """End as ABORTED, from any state that is not an end."""
        self.detail = reason.value
        self.move(State.ABORTED, reason)

    def move(self, to: State, reason: Reason = Reason.NONE) -> None:
        """Change state; ``InvariantError`` when the table does not allow it."""
        if to not in LEGAL[self.state]:
            raise InvariantError(
                f"trajectory {self.id} can't go from {self.state} to {to} ({reason or 'no reason'})"
            )
        before, self.state = self.state, to
        self._observer(self, before, reason)

    # --- what it holds --------------------------------------------------------------------------------

    @property
    def sampled(self) -> int:
        """S, the tokens the engine sampled."""
        return sum(run.count for run in self.runs)

    @property
    def runs(self) -> list[VersionRun]:
        """Runs over all sampled tokens, those of an agent's other conversations included."""
        return self.versions if self._branches is None else [*self._branches.versions, *self.versions]

    @property
    def length(self) -> int:
        """Tokens of all its sequences."""
        return self.tokens + (0 if self._branches is None else self._branches.tokens)

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.limits.context_tokens - self.tokens

    @property
    def oldest(self) -> int | None:
        """v: the lowest version among the sampled tokens; ``None`` before the first."""
        if self._branches is not None:
            return min((run.version for run in self.runs), default=None)
        return self.versions[0].version if self.versions else None

    @property
    def newest(self) -> int:
        """The highest version among the sampled tokens; -1 before the first."""
        if self._branches is not None:
            return max((run.version for run in self.runs), default=-1)
        return self.versions[-1].version if self.versions else -1

    @property
    def answer(self) -> bytes:
        """The ids of the last answer; only until the next observation."""
        return bytes(self.ids[-self._answer_bytes :])

    @property
    def session(self) -> str:
        """The name of this attempt's episode at its environment worker."""
        return f"{self.id}.{self.attempt}"

    def ids_of(self, sequence: int) -> bytearray:
        """int32 ids of an agent's conversation, which is not to be changed."""
        return self.ids if self._branches is None else self._branches.ids_of(self, sequence)

    def take_samples(self) -> list[TrainSample]:
        """As ``copy_samples``; the tokens themselves are not kept here any longer."""
        samples = self.copy_samples()
        self.ids, self.mask, self.logprobs = bytearray(), bytearray(), bytearray()
        if self._branches is not None:
            self._branches.let_go()
        return samples

    def copy_samples(self) -> list[TrainSample]:
        """What the trainer gets of it: a sample for each sequence that has sampled tokens."""
        if self._branches is None:
            return [self._sample()]
        own = [self._sample()] if self.versions else []
        return [*self._branches.samples(self), *own]

    def _sample(self) -> TrainSample:
        """The current sequence's."""
        return TrainSample(
            self.id,
            bytes(self.ids),
            bytes(self.mask),
            bytes(self.logprobs),
            list(self.versions),
            self.score,
            self.turn_tokens,
            self.turn_rewards,
            bool(self.truncated),
        )

    def _append_run(self, run: VersionRun) -> None:
        if self.versions and self.versions[-1].version == run.version:
            run = VersionRun(run.version, self.versions.pop().count + run.count)
        self.versions.append(run)
