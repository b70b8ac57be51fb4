"""LLMProxy: puts each generation request, trajectory by trajectory, on an inference worker.

A request goes only to a worker that is open and has acknowledged a version inside the staleness bound, and
never to one below its trajectory's newest token (I7).  A worker is closed from the moment it is told to
suspend until its new weights are verified.

Where prefill and decode are apart, a request goes to one worker, which computes the prompt, and then to another of the
same version, which fetches the keys and values and decodes.  What is interrupted goes on elsewhere from the tokens it
has, with what is left of its budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from rollart.config import Config
from rollart.controller.affinity import Orders
from rollart.controller.answers import Answer, Kept, flaw
from rollart.controller.bindings import Bindings
from rollart.controller.engines import Demand, Engine, Engines, Seat, Seats
from rollart.controller.proposal import Suggestions
from rollart.controller.resource_manager import ResourceManager
from rollart.controller.roles import Roles
from rollart.controller.routing import NO_BOUND, Candidate, Prefix, Wish
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.controller.task_profile import TaskProfiles
from rollart.controller.trajectory import Kind, Trajectory
from rollart.packing import ID_BYTES, pack_ids
from rollart.protocol import FailureKind, Generate, Generated, Progress, Release

__all__ = ["Answer", "Engine", "LLMProxy"]

_NOTHING = Generated(0, b"", b"", [], "length", 0)


class LLMProxy:
    """The inference workers of a run, as one."""

    def __init__(
        self,
        switchboard: Switchboard,
        config: Config,
        *,
        lowest_version: Callable[[], int],
        resources: ResourceManager,
        run: RunContext,
    ) -> None:
        """``lowest_version()`` is what the staleness bound still admits."""
        self.pools = Engines(lowest_version=lowest_version)
        self.refused_answers = 0
        """Answers that could not be true."""
        self.orders = Orders(config.inference)
        self.profiles = TaskProfiles()
        self._bindings = Bindings(self.orders, self.pools, run)
        self._run = run
        self._tasks = [task.name for task in config.tasks]
        self._switchboard = switchboard
        self.resources = resources
        self._inference = config.inference
        self._apart = config.inference.disaggregation
        self._profiling = self.orders.auto or (self._apart is not None and self._apart.min_answer_tokens > 0)
        self._retries = config.rollout.retries
        self._samplings = {task.name: config.sampling_of(task) for task in config.tasks}
        self._allowed = {name: _packed(each.allowed_token_ids) for name, each in self._samplings.items()}
        self._stops = {name: _packed(each.stop_token_ids) for name, each in self._samplings.items()}
        self._lowest_version = lowest_version
        self._prefixes: dict[int, Prefix] = {}

    async def adapt(self) -> None:
        """While the run goes on: follow what the tasks and the queues turn out to be like, where the config says so."""
        keepers = []
        if self._apart is not None and self._apart.adapt:
            keepers.append(Roles(self.pools, self._run, sequences=self._inference.max_num_seqs).keep())
        if self.orders.auto:
            pools = self._inference.all_pools
            keepers.append(Suggestions(self.orders, self.profiles, pools, self._tasks, self._run).keep())
        await asyncio.gather(*keepers)

    # --- the workers ----------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[str, Engine]:
        """Every inference worker by name."""
        return self.pools.by_name

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker they may use."""
        return self.pools.waiting

    def add(self, link: Link) -> Engine:
        """A worker joined; it stays closed until it has weights."""
        engine = Engine(
            link,
            Candidate(
                link.name,
                -1,
                0,
                hardware=link.hello.hardware_class,
                phase=self.resources.pool_of(link.name, link.hello.hardware_class).phase,
                most_requests=self._inference.most_requests,
                most_tokens=self._inference.max_tokens_in_flight or NO_BOUND,
            ),
        )
        self.pools.add(engine)
        return engine

    def remove(self, name: str) -> None:
        """A worker is lost or taken out."""
        self.pools.remove(name)

    def open(self, engine: Engine, version: int) -> None:
        """The worker serves ``version``, verified."""
        engine.candidate.version = version
        self.pools.set_open(engine, open=True)

    def close(self, engine: Engine) -> None:
        """No request may be sent to the worker from now on."""
        self.pools.set_open(engine, open=False)

    def close_worker(self, name: str) -> None:
        """As ``close``, by the worker's name, where it is an engine's."""
        engine = self.engines.get(name)
        if engine is not None:
            self.close(engine)

    def changed(self) -> None:
        """Something that routing depends on changed: waiting requests look again."""
        self.pools.changed()

    # --- requests -------------------------------------------------------------------------------------

    async def generate(self, trajectory: Trajectory) -> Answer:
        """The answer to the trajectory's next turn.

        Infrastructure failures are tried again, elsewhere if there is an elsewhere, from the tokens that the answer
        has by then; ``CallError`` when that is of no use.
        """
        kept, avoid, split = Kept(), "", self._splits(trajectory)
        most = min(trajectory.limits.max_tokens, trajectory.room)
        tries_left = self._retries
        while True:
            if kept.versions and kept.versions[0].version < self._lowest(trajectory):
                kept.clear()  # with them the whole answer would be too old
            if kept.count == most:  # it was whole when its worker was lost
                return Answer(kept.whole(_NOTHING), kept.worker, kept.routed_version, kept_tokens=most)
            seats = await self.pools.seat(self._demand(trajectory, kept, most, avoid, split=split))
            self._bindings.bound(trajectory, seats)
            try:
                return await self._ask(trajectory, kept, most, seats)
            except CallError as error:
                avoid = seats.failed_at.link.name
                if seats.prefill is not None and error.kind is FailureKind.LOST:
                    # Its keys and values are void.  Served whole, it can't meet that again.
                    avoid, split = "", False
                    continue
                if not error.retry or not tries_left:
                    raise
                tries_left -= 1
            finally:
                self.pools.free(seats)

    async def _ask(self, trajectory: Trajectory, kept: Kept, most: int, seats: Seats) -> Answer:
        """The answer, by the workers that ``seats`` name; when they fail, ``kept`` has what there is of it."""
        before, seat = kept.count, seats.main
        request = self._request(trajectory, kept, most - before)
        prefiller = ""
        if seats.prefill is not None:
            prefiller = seats.prefill.engine.link.name
            await self._prefill(request, seats, seats.prefill)
        greedy, link = request.temperature == 0.0, seat.engine.link

        def progressed(progress: Progress) -> None:
            if not flaw(progress, most - kept.count, max(seat.version, kept.newest), greedy=greedy):
                kept.add(progress, link.name, seat.version)

        seat.handed = True
        generated = await self._switchboard.call(
            link,
            request,
            Generated,
            timeout_s=self._inference.generate_timeout_s,
            on_progress=progressed,
            on_left=partial(self.pools.leave, seat),
        )
        kept.cut(before)  # what was reported on the way is in the answer
        self._check(generated, link, most - before, seat.version, greedy=greedy)
        count = before + len(generated.ids) // ID_BYTES
        version = generated.versions[-1].version
        self._prefixes[trajectory.id] = Prefix(link.name, version, trajectory.tokens + count)
        if self._profiling:
            self.profiles.answered(trajectory, generated, count)
        if not before:
            return Answer(generated, link.name, seat.version, prefiller)
        kept.add(generated, link.name, seat.version)
        return Answer(kept.whole(generated), link.name, kept.routed_version, prefiller, before)

    async def _prefill(self, request: Generate, seats: Seats, seat: Seat) -> None:
        """Have the prompt computed, and make ``request`` one that fetches what came of it.

        ``CallError`` of kind LOST when the decoding worker has changed its version meanwhile.
        """
        first = msgspec.structs.replace(
            request,
            seq=self._switchboard.next_seq(),
            request_id=f"{request.request_id}p",
            max_tokens=1,
            prefill=True,
        )
        link, decoder = seat.engine.link, seats.main.engine.link
        seats.failed_at, seat.handed = seat.engine, True
        generated = await self._switchboard.call(
            link,
            first,
            Generated,
            timeout_s=self._inference.generate_timeout_s,
            on_left=partial(self.pools.leave, seat),
        )
        self._check(generated, link, 1, seat.version, greedy=request.temperature == 0.0)
        seats.failed_at = seats.main.engine
        request.kv, request.kv_version = generated.kv, generated.versions[0].version
        if not seats.main.valid or request.kv_version != seats.main.version or not generated.kv:
            if generated.kv:
                self._switchboard.tell(decoder, Release(generated.kv))
            raise CallError(
                FailureKind.LOST,
                f"{decoder.name} does not serve version {request.kv_version}, which {link.name} prefilled with",
            )

    def _demand(self, trajectory: Trajectory, kept: Kept, most: int, avoid: str, *, split: bool) -> Demand:
        tokens = trajectory.tokens + kept.count
        wish = Wish(0, tokens, trajectory.tokens + most, self._prefixes.get(trajectory.id), avoid)
        return Demand(
            self.orders.of(trajectory.task),
            wish,
            newest=max(trajectory.newest, kept.newest, 0),
            bounded=trajectory.kind is not Kind.EVAL,
            split=split,
        )

    def _splits(self, trajectory: Trajectory) -> bool:
        """Whether the next turn is to be prefilled and decoded apart."""
        if not self.orders.of(trajectory.task).split:
            return False
        apart = self._apart
        if apart is None:
            return True
        expected = self.profiles.answer_tokens(trajectory.task)
        if expected is None:
            expected = trajectory.limits.max_tokens
        return trajectory.tokens >= apart.min_prompt_tokens and expected >= apart.min_answer_tokens

    def _request(self, trajectory: Trajectory, kept: Kept, max_tokens: int) -> Generate:
        seq = self._switchboard.next_seq()
        greedy = trajectory.kind is Kind.EVAL
        sampling = self._samplings[trajectory.task]
        return Generate(
            seq=seq,
            request_id=f"{trajectory.session}.{trajectory.turns}.{seq}",
            prompt=bytes(trajectory.ids) + kept.ids if kept.ids else bytes(trajectory.ids),
            max_tokens=max_tokens,
            temperature=0.0 if greedy else sampling.temperature,
            allowed_token_ids=self._allowed[trajectory.task],
            stop_token_ids=self._stops[trajectory.task],
            ignore_eos=sampling.ignore_eos,
            seed=None,
        )

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory needs no more answers."""
        self._prefixes.pop(trajectory.id, None)
        self._bindings.forget(trajectory)

    def _lowest(self, trajectory: Trajectory) -> int:
        """An evaluation is never trained on, so it is not bound by staleness."""
        return 0 if trajectory.kind is Kind.EVAL else self._lowest_version()

    def _check(self, generated: Generated, link: Link, max_tokens: int, routed: int, *, greedy: bool) -> None:
        """``CallError`` for an answer that can't be true."""
        wrong = flaw(generated, max_tokens, routed, greedy=greedy)
        if wrong:
            self.refused_answers += 1
            raise CallError(FailureKind.INFRASTRUCTURE, f"{link.name} answered with {wrong}")


def _packed(ids: list[int | str]) -> bytes:
    return pack_ids(each for each in ids if isinstance(each, int))
