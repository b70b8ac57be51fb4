"""An answer of the engines: checked, and put together where several workers had a part in it."""

from __future__ import annotations

from rollart.packing import ID_BYTES, count_unsound
from rollart.protocol import Generated, Progress, VersionRun

__all__ = ["Answer", "Kept", "flaw"]


class Answer:
    """One turn's answer, checked, and where it came from."""

    __slots__ = ("generated", "kept_tokens", "prefilled_by", "routed_version", "worker")

    def __init__(
        self,
        generated: Generated,
        worker: str,
        routed_version: int,
        prefilled_by: str = "",
        kept_tokens: int = 0,
    ) -> None:
        self.generated = generated
        self.worker = worker
        """The one that ended it."""
        self.routed_version = routed_version
        """What the first worker that sampled any of it had acknowledged."""
        self.prefilled_by = prefilled_by
        self.kept_tokens = kept_tokens
        """Tokens of workers that were lost on the way."""


class Kept:
    """What an interrupted answer has so far: another worker goes on from there."""

    __slots__ = ("ids", "logprobs", "routed_version", "versions", "worker")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the answer anew."""
        self.ids = b""
        self.logprobs = b""
        self.versions: list[VersionRun] = []
        self.routed_version = -1
        self.worker = ""
        """The last that had a part in it."""

    @property
    def count(self) -> int:
        """Tokens."""
        return len(self.ids) // ID_BYTES

    @property
    def newest(self) -> int:
        """The highest version among them; -1: there are none."""
        return self.versions[-1].version if self.versions else -1

    def add(self, part: Progress | Generated, worker: str, routed_version: int) -> None:
        """What ``worker``, which had acknowledged ``routed_version``, has sampled after what is kept."""
        if not self.versions:
            self.routed_version = routed_version
        self.worker = worker
        self.ids += part.ids
        self.logprobs += part.logprobs
        for run in part.versions:
            if self.versions and self.versions[-1].version == run.version:
                run = VersionRun(run.version, self.versions.pop().count + run.count)
            self.versions.append(run)

    def cut(self, count: int) -> None:
        """Keep only the first ``count`` tokens."""
        if count == self.count:
            return
        self.ids, self.logprobs = self.ids[: count * ID_BYTES], self.logprobs[: count * ID_BYTES]
        versions, self.versions = self.versions, []
        for run in versions:
            taken = min(run.count, count)
            if taken:
                self.versions.append(VersionRun(run.version, taken))
            count -= taken

    def whole(self, last: Generated) -> Generated:
        """The whole answer, whose last part came with ``last``."""
        return Generated(
            last.seq, self.ids, self.logprobs, self.versions, last.finish_reason, last.cached_tokens
        )


def flaw(part: Progress | Generated, max_tokens: int, routed: int, *, greedy: bool) -> str:
    """What can't be true of tokens from a worker that acknowledged version ``routed``; empty when they can."""
    count, rest = divmod(len(part.ids), ID_BYTES)
    if rest or not 1 <= count <= max_tokens:
        return f"{len(part.ids)} bytes of ids for 1 to {max_tokens} tokens"
    if len(part.logprobs) != (0 if greedy else ID_BYTES * count):
        return f"{len(part.logprobs)} bytes of log-probabilities for {count} tokens"
    if count_unsound(part.logprobs):
        return "a log-probability that is not finite and ≤ 0"
    before, counted = routed, 0
    for run in part.versions:
        if run.version < before:
            last = f"a worker that acknowledged {routed}" if before == routed else f"version {before}"
            return f"tokens of version {run.version} after {last}"
        if run.count < 1:
            counted = -1
            break
        before, counted = run.version, counted + run.count
    if counted != count:
        return f"version runs {part.versions} for {count} tokens"
    return ""
