"""The inference workers as the proxy sees them, the requests each has, and those that wait for one.

Admission control: a worker is given at most ``most_requests`` requests and ``most_tokens`` tokens at once.  Who finds
no room waits here, first come, first served; a trajectory has one request at a time and goes on when it is answered,
so what waits is bounded by the trajectories in flight, which the staleness bound paces.  A request holds its place
until the worker has dropped it, by its own word: a cancel alone frees nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from rollart.config.routing import Phase
from rollart.controller.affinity import Order
from rollart.controller.routing import Candidate, Wish, pair, place
from rollart.controller.switchboard import Link

__all__ = ["Demand", "Engine", "Engines", "Seat", "Seats"]


class Engine:
    """What the proxy knows of an inference worker."""

    __slots__ = ("candidate", "link", "open")

    def __init__(self, link: Link, candidate: Candidate) -> None:
        self.link = link
        self.open = False
        """Requests may be sent."""
        self.candidate = candidate

    @property
    def version(self) -> int:
        """What it has acknowledged; -1 before its first weights."""
        return self.candidate.version

    @property
    def requests(self) -> int:
        """Requests it has, those included that it has yet to drop."""
        return self.candidate.requests


class Seat:
    """A request's place at a worker."""

    __slots__ = ("engine", "handed", "load", "taken", "version")

    def __init__(self, engine: Engine, load: int) -> None:
        self.engine = engine
        self.version = engine.version
        self.load = load
        self.taken = True
        self.handed = False
        """The worker has the request, and leaves the place by its own word."""
        engine.candidate.requests += 1
        engine.candidate.tokens += load

    @property
    def valid(self) -> bool:
        """The worker still takes requests, and serves what it served when the place was taken."""
        return self.engine.open and self.engine.version == self.version


class Seats:
    """One for the request, and one for its prefill where that is apart."""

    __slots__ = ("failed_at", "main", "prefill")

    def __init__(self, main: Seat, prefill: Seat | None = None) -> None:
        self.main = main
        self.prefill = prefill
        self.failed_at = main.engine
        """Where the request is: who is at fault when it fails."""

    @property
    def valid(self) -> bool:
        """All are."""
        return self.main.valid and (self.prefill is None or self.prefill.valid)


Alike = tuple[Order, int, bool, bool, str]


class Demand:
    """What a request needs."""

    __slots__ = ("bounded", "newest", "number", "order", "split", "wish")

    def __init__(self, order: Order, wish: Wish, *, newest: int, bounded: bool, split: bool) -> None:
        """``newest`` is the highest version of what it goes on from; ``bounded``: the staleness bound holds for it."""
        self.order = order
        self.wish = wish
        self.newest = newest
        self.bounded = bounded
        self.split = split
        self.number = 0
        """When it came, among those that wait."""

    @property
    def alike(self) -> Alike:
        """Requests of which this is the same may use the same workers, but for their size."""
        return self.order, self.newest, self.bounded, self.split, self.wish.avoid


class Engines:
    """All inference workers of a run."""

    def __init__(self, *, lowest_version: Callable[[], int]) -> None:
        """``lowest_version()`` is what the staleness bound still admits."""
        self.by_name: dict[str, Engine] = {}
        self._lowest_version = lowest_version
        self._open: dict[str, list[Candidate]] = {}
        """By hardware class, those that requests may be sent to."""
        self._queues: dict[Alike, dict[asyncio.Future[Seats], Demand]] = {}
        """Those that wait, in the order they came, apart by what they need: who needs the same waits behind another."""
        self._came = 0
        self._seating = False

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker they may use."""
        return sum(map(len, self._queues.values()))

    @property
    def open(self) -> dict[str, list[Candidate]]:
        """By hardware class, the workers that requests may be sent to."""
        return self._open

    # --- the workers ----------------------------------------------------------------------------------

    def add(self, engine: Engine) -> None:
        """A worker joined."""
        self.by_name[engine.link.name] = engine

    def remove(self, name: str) -> None:
        """A worker is gone."""
        engine = self.by_name.pop(name, None)
        if engine is not None:
            engine.open = False
        self.changed()

    def set_open(self, engine: Engine, *, open: bool) -> None:
        """Whether requests may be sent to the worker from now on."""
        engine.open = open
        self.changed()

    def change_phase(self, engine: Engine, phase: Phase) -> None:
        """The worker serves another phase from now on; what it has goes on."""
        engine.candidate.phase = phase
        self.changed()

    def changed(self) -> None:
        """Something that routing depends on changed: waiting requests look again."""
        self._open = {}
        for engine in self.by_name.values():
            if engine.open:
                self._open.setdefault(engine.candidate.hardware, []).append(engine.candidate)
        self._seat_waiting()

    # --- places ---------------------------------------------------------------------------------------

    async def seat(self, demand: Demand) -> Seats:
        """Places for the request, as soon as there are any; whoever gets them frees each."""
        while True:
            seats = None if self._queues else self._find(demand)
            if seats is None:
                seats = await self._wait(demand)
            if seats.valid:
                return seats
            self.free(seats)  # a worker was suspended since

    async def _wait(self, demand: Demand) -> Seats:
        future: asyncio.Future[Seats] = asyncio.get_running_loop().create_future()
        self._came += 1
        demand.number = self._came
        alike = demand.alike
        self._queues.setdefault(alike, {})[future] = demand
        self._seat_waiting()  # those before it may wait for what it does not need
        try:
            return await future
        except asyncio.CancelledError:
            if not self._leave_queue(alike, future) and not future.cancelled():
                self.free(future.result())
            raise

    def _leave_queue(self, alike: Alike, future: asyncio.Future[Seats]) -> bool:
        queue = self._queues.get(alike)
        if queue is None or queue.pop(future, None) is None:
            return False
        if not queue:
            del self._queues[alike]
        return True

    def free(self, seats: Seats) -> None:
        """Give back those that were never handed to a worker."""
        for seat in (seats.main, seats.prefill):
            if seat is not None and not seat.handed:
                self.leave(seat)

    def leave(self, seat: Seat) -> None:
        """Give the place back; to do so twice changes nothing."""
        if not seat.taken:
            return
        seat.taken = False
        candidate = seat.engine.candidate
        candidate.requests -= 1
        candidate.tokens -= seat.load
        if self._queues:
            self._seat_waiting()

    def _find(self, demand: Demand) -> Seats | None:
        wish, order = demand.wish, demand.order
        wish.lowest_version = max(demand.newest, self._lowest_version()) if demand.bounded else demand.newest
        if demand.split:
            found = pair(self._open, order.prefill, order.decode, wish)
            if found is not None:
                decoder, prefiller = self.by_name[found.decode.name], self.by_name[found.prefill.name]
                return Seats(Seat(decoder, wish.load), Seat(prefiller, wish.prompt_tokens))
        one = place(self._open, order.whole, wish)
        return None if one is None else Seats(Seat(self.by_name[one.name], wish.load))

    def _seat_waiting(self) -> None:
        """Give places to those that wait, the first that came first.

        Nobody overtakes one that waits for room, or the long would never get any; who waits for a version or a class
        that is not there holds up only those that need the same.
        """
        if self._seating:
            return
        self._seating = True
        try:
            blocked: set[Alike] = set()
            while (head := self._head(blocked)) is not None:
                alike, future, demand = head
                seats = None if future.cancelled() else self._find(demand)
                if seats is not None:
                    self._leave_queue(alike, future)
                    future.set_result(seats)
                elif future.cancelled():
                    self._leave_queue(alike, future)
                elif self._lacks_only_room(demand):
                    return
                else:
                    blocked.add(alike)
        finally:
            self._seating = False

    def _head(self, blocked: set[Alike]) -> tuple[Alike, asyncio.Future[Seats], Demand] | None:
        """Who came first of those that could get a place; ``None``: there is nobody, or no place."""
        if not self._queues or all(c.full for pool in self._open.values() for c in pool):
            return None
        heads = [(a, *next(iter(queue.items()))) for a, queue in self._queues.items() if a not in blocked]
        return min(heads, key=lambda head: head[2].number, default=None)

    def _lacks_only_room(self, demand: Demand) -> bool:
        """Whether a smaller request of the same kind would get a place now."""
        smaller = msgspec.structs.replace(demand.wish, load=0)
        return place(self._open, demand.order.whole, smaller) is not None
