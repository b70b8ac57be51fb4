"""How many instances of a function there should be.  Numbers in, numbers out: the simulation decides with it too.

An instance is paid from its start to its end. So another one is started only when the calls that wait would keep it
busy for several times what its start costs. One without calls stays for as long as a start takes: whoever rents what
he could buy pays at most twice what is needed (ski rental, Karlin et al. 1988). And it ends at once where the next
call for it is farther away than that on average, for when calls come at random, waiting brings none nearer.
"""

from __future__ import annotations

import math

import msgspec

__all__ = ["Limits", "Load", "Means", "further", "patience_s"]

PAYOFF = 8.0
"""Busy time that the waiting calls must promise a further instance, in cold starts."""
FIRST_BUSY_S, FIRST_COLD_S = 0.1, 0.3
"""Taken for true until there is a call, and a start, to go by."""
MEMORY = 0.1
"""Weight of the newest observation in a mean."""
SHORTEST_PATIENCE_S = 0.005


class Limits(msgspec.Struct, frozen=True):
    """What the config allows."""

    least: int = 0
    most: int = 32
    calls_each: int = 1
    """Calls that an instance serves at the same time."""
    idle_s: float | None = None
    """Of an instance without calls; ``None``: as long as a start takes, where calls come that often."""


class Means(msgspec.Struct):
    """What calls and starts take, by exponential means."""

    busy_s: float = FIRST_BUSY_S
    cold_s: float = FIRST_COLD_S
    gap_s: float = 0.0
    """Between the arrivals of calls."""
    calls: int = 0
    starts: int = 0
    arrived_at: float | None = None

    def arrived(self, now: float) -> None:
        """A call came."""
        if self.arrived_at is not None:
            self.gap_s += MEMORY * (now - self.arrived_at - self.gap_s)
        self.arrived_at = now

    def called(self, seconds: float) -> None:
        """A call took so long in its instance."""
        self.busy_s = seconds if not self.calls else self.busy_s + MEMORY * (seconds - self.busy_s)
        self.calls += 1

    def started(self, seconds: float) -> None:
        """An instance took so long from the wish to its first call."""
        # The first start also made the template; the second says what starts take from now on.
        weight = 1.0 if self.starts <= 1 else MEMORY
        self.cold_s += weight * (seconds - self.cold_s)
        self.starts += 1


class Load(msgspec.Struct, frozen=True):
    """What there is now."""

    waiting: int
    """Calls without an instance."""
    running: int
    """Calls in instances."""
    instances: int
    """Those that start included."""


def further(load: Load, limits: Limits, means: Means) -> int:
    """How many instances to start now."""
    short = max(0, limits.least - load.instances)
    if not load.waiting:
        return short
    work_s = load.waiting * means.busy_s
    worthwhile = math.ceil(work_s / (limits.calls_each * PAYOFF * max(means.cold_s, 1e-6)))
    # No more than there are calls for, and one at least: somebody waits.
    wanted = min(
        max(1, worthwhile), math.ceil((load.waiting + load.running) / limits.calls_each), limits.most
    )
    return max(short, wanted - load.instances, 0)


def patience_s(limits: Limits, means: Means, resting: int) -> float:
    """How long an instance without calls stays, unless it is one of the least; ``resting`` others have none, too."""
    if limits.idle_s is not None:
        return limits.idle_s
    until_next_s = means.gap_s * (resting + 1)
    return SHORTEST_PATIENCE_S if until_next_s > means.cold_s else max(means.cold_s, SHORTEST_PATIENCE_S)
