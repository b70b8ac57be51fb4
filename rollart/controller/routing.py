"""Which inference worker a generation request goes to: pure functions of what is known now.

The order of what counts: the request's hardware class, as declared; a version inside the bound (I7); room for one
request more; and then what would have to be computed before the answer, in tokens.  Keys and values are of one
version: a prefix counts as cached only where the worker still serves the version that computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollart.config.routing import Phase

__all__ = [
    "DECODING",
    "PLAIN",
    "PREFILLING",
    "Candidate",
    "Pair",
    "Prefix",
    "Wish",
    "choose",
    "pair",
    "place",
]

NO_BOUND = 1 << 53
PLAIN: tuple[frozenset[Phase], ...] = (
    frozenset({Phase.BOTH}),
    frozenset({Phase.DECODE}),
    frozenset({Phase.PREFILL}),
)
"""Workers for a request that is served whole, the preferred ones first: any is better than to wait."""
PREFILLING: tuple[frozenset[Phase], ...] = (frozenset({Phase.PREFILL, Phase.BOTH}),)
DECODING: tuple[frozenset[Phase], ...] = (frozenset({Phase.DECODE, Phase.BOTH}),)
NAMELESS = ""


class Candidate(msgspec.Struct, gc=False):
    """An inference worker that is not suspended and not taken out."""

    name: str
    version: int
    """What it has acknowledged."""
    tokens: int
    """Prompt and answer tokens of the requests it has."""
    requests: int = 0
    hardware: str = "CPU"
    phase: Phase = Phase.BOTH
    most_requests: int = NO_BOUND
    most_tokens: int = NO_BOUND

    @property
    def full(self) -> bool:
        """It takes no request, however small."""
        return self.requests >= self.most_requests

    def takes(self, load: int) -> bool:
        """Whether a request of so many tokens fits; a worker that has none takes any."""
        if self.requests >= self.most_requests:
            return False
        return self.tokens + load <= self.most_tokens or not self.requests


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """What a worker has of a trajectory in its cache."""

    worker: str
    version: int
    tokens: int


class Wish(msgspec.Struct, gc=False):
    """What a request asks of its worker."""

    lowest_version: int
    prompt_tokens: int
    load: int
    """Tokens of the prompt, and of the answer at most."""
    prefix: Prefix | None = None
    avoid: str = NAMELESS
    """The worker that has just failed it: used only where there is no other."""


class Pair(msgspec.Struct, frozen=True, gc=False):
    """Two workers of one version."""

    prefill: Candidate
    decode: Candidate


def choose(
    candidates: Iterable[Candidate], wish: Wish, *, exact_version: int | None = None
) -> Candidate | None:
    """The worker to use, or ``None`` when none may be used.

    The one with the least to compute before the answer: the tokens of the requests it has, and those of the prompt
    that it does not have in its cache.  So the worker that holds the trajectory's prefix is kept unless it has more to
    do than another by over what that one would have to prefill again.
    """
    best, least, best_kept = None, 0, False
    prefix, lowest, prompt, load = wish.prefix, wish.lowest_version, wish.prompt_tokens, wish.load
    avoid = wish.avoid
    for candidate in candidates:
        version, has = candidate.version, candidate.requests
        if version < lowest or has >= candidate.most_requests:
            continue
        if (
            has and candidate.tokens + load > candidate.most_tokens
        ):  # ``takes``, in line: this is for every turn
            continue
        if candidate.name == avoid or (exact_version is not None and version != exact_version):
            continue
        kept = prefix is not None and prefix.worker == candidate.name and prefix.version == version
        cost = candidate.tokens + prompt
        if kept:
            cost -= min(prefix.tokens, prompt)  # type: ignore[union-attr]
        if (
            best is None
            or cost < least
            or (cost == least and not best_kept and (kept or candidate.name < best.name))
        ):
            best, least, best_kept = candidate, cost, kept
    return best


def place(
    pools: Mapping[str, Sequence[Candidate]],
    order: Iterable[str],
    wish: Wish,
    *,
    phases: Sequence[frozenset[Phase]] = PLAIN,
    exact_version: int | None = None,
) -> Candidate | None:
    """The worker to use, by hardware class in the order of ``order``; ``None``: the request has to wait.

    Classes whose workers are all full, suspended, too old or gone are passed over.
    """
    for wanted in phases:
        for hardware in order:
            pool = pools.get(hardware, ())
            if any(candidate.phase not in wanted for candidate in pool):
                pool = [candidate for candidate in pool if candidate.phase in wanted]
            found = choose(pool, wish, exact_version=exact_version)
            if found is not None:
                return found
    if not wish.avoid:
        return None
    again = msgspec.structs.replace(wish, avoid=NAMELESS)
    return place(pools, order, again, phases=phases, exact_version=exact_version)


def pair(
    pools: Mapping[str, Sequence[Candidate]], prefill: Iterable[str], decode: Iterable[str], wish: Wish
) -> Pair | None:
    """A worker that prefills and one that decodes, of the newest version that both have; ``None``: there are none."""
    versions = {c.version for pool in pools.values() for c in pool if c.version >= wish.lowest_version}
    first = msgspec.structs.replace(wish, load=wish.prompt_tokens, prefix=None)
    for version in sorted(versions, reverse=True):
        decoder = place(pools, decode, wish, phases=DECODING, exact_version=version)
        if decoder is None:
            continue
        others = {name: [c for c in pool if c is not decoder] for name, pool in pools.items()}
        prefiller = place(others, prefill, first, phases=PREFILLING, exact_version=version)
        if prefiller is not None:
            return Pair(prefiller, decoder)
    return None
