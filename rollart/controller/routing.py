"""Which inference worker a generation request goes to: a pure function of what is known now."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["Candidate", "choose"]


class Candidate(msgspec.Struct, gc=False):
    """An inference worker that is not suspended and not taken out."""

    name: str
    version: int
    """What it has acknowledged."""
    tokens: int
    """Prompt and answer tokens of the requests it has."""


def choose(
    candidates: Iterable[Candidate],
    *,
    lowest_version: int,
    previous: str | None,
    prompt_tokens: int,
) -> str | None:
    """The worker to use, or ``None`` when none may be used.

    Only workers that serve ``lowest_version`` or newer may.  The ``previous`` worker holds the trajectory's
    prefix in its cache: it is kept unless it has more to do than the least loaded one by over
    ``prompt_tokens``, what another worker would have to prefill again.
    """
    least = kept = None
    for candidate in candidates:
        if candidate.version < lowest_version:
            continue
        if candidate.name == previous:
            kept = candidate
        if (
            least is None
            or candidate.tokens < least.tokens
            or (candidate.tokens == least.tokens and candidate.name < least.name)
        ):
            least = candidate
    if least is None:
        return None
    if kept is not None and kept.tokens <= least.tokens + prompt_tokens:
        return kept.name
    return least.name
