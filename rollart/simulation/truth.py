"""What really happened to each sampled token, kept apart from the controller that is checked.

Engines number every token they sample; the trainer looks each number up.  So a token that is trained twice,
in another trajectory, under another version or outside the mask is seen, whatever the event stream says.
"""

from __future__ import annotations

from rollart.packing import pack_ids, unpack_ids
from rollart.protocol import TrainGroup, VersionRun

__all__ = ["FIRST_SAMPLED", "Truth"]

FIRST_SAMPLED = 1 << 20
"""Ids from here on are sampled tokens, each used once; observations have smaller ones."""


class Truth:
    """The tokens of one simulated run; ``violations`` says what was wrong with what was trained."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._made: list[tuple[str, int]] = []
        """Of token ``FIRST_SAMPLED + i``: the session it was sampled for, and the version."""
        self._trained: dict[int, int] = {}

    def sample(self, session: str, versions: list[VersionRun]) -> bytes:
        """int32 ids of new tokens for ``session``."""
        first = FIRST_SAMPLED + len(self._made)
        for run in versions:
            self._made += [(session, run.version)] * run.count
        return pack_ids(range(first, FIRST_SAMPLED + len(self._made)))

    def check_prompt(self, session: str, prompt: bytes) -> None:
        """A prompt holds only what was sampled for its own session (trajectory and attempt)."""
        for id in unpack_ids(prompt):
            if id >= FIRST_SAMPLED and self._made[id - FIRST_SAMPLED][0] != session:
                self.violations.append(
                    f"the prompt of {session} holds a token of {self._made[id - FIRST_SAMPLED][0]}"
                )
                return

    def check_batch(self, step: int, groups: list[TrainGroup]) -> None:
        """The batch of ``step`` is applied."""
        for sample in (sample for group in groups for sample in group.samples):
            at = f"step {step}, trajectory {sample.trajectory}"
            ids = unpack_ids(sample.ids)
            trained = [id for id, used in zip(ids, sample.mask, strict=True) if used]
            for id, used in zip(ids, sample.mask, strict=True):
                if bool(used) != (id >= FIRST_SAMPLED):
                    self.violations.append(f"{at}: the mask of token {id} is {used}")
            stamped = [run.version for run in sample.versions for _ in range(run.count)]
            if len(stamped) != len(trained) or len(sample.logprobs) != 4 * len(trained):
                self.violations.append(f"{at}: {len(trained)} tokens, {len(stamped)} versions")
            for id, version in zip(trained, stamped, strict=False):
                self._check_token(at, step, sample.trajectory, id, version)

    def _check_token(self, at: str, step: int, trajectory: int, id: int, version: int) -> None:
        if not 0 <= id - FIRST_SAMPLED < len(self._made):
            self.violations.append(f"{at}: no engine sampled token {id}")
            return
        session, true_version = self._made[id - FIRST_SAMPLED]
        if session.partition(".")[0] != str(trajectory):
            self.violations.append(f"{at}: token {id} was sampled for {session}")
        if version != true_version:
            self.violations.append(f"{at}: token {id} has version {version}, sampled with {true_version}")
        if self._trained.setdefault(id, step) != step:
            self.violations.append(f"{at}: token {id} was trained in step {self._trained[id]} too")
