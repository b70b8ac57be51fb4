"""One simulated inference engine: continuous batching with chunked prefill, a KV cache and a prefix cache.

A pure, event-driven model: it is told the time and never asks for it.  It follows vLLM's scheduler: running requests
come first (a token each for those that decode, then chunks of prompts up to the token budget), waiting ones are
admitted first come, first served, once their whole context fits; when the KV cache is full, the latest is preempted and
computed again later, what of it is still in the prefix cache excepted.

Between changes of the batch many steps are advanced at once, so that the cost is per event and not per token.  Inputs
take effect at the end of the step that is running.  Invariants:

- a submitted request finishes exactly once, with the tokens that it was to have, unless it was cancelled;
- nothing depends on how often ``advance`` is called, nor on whether ``next_event`` is;
- requests that run plus the prefix cache never hold more tokens than the KV cache has.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from rollart.simulation.engine_batch import DECODE, GONE, PREFILL, WAITING, Plan, PrefixCache, Request
from rollart.simulation.engine_costs import EngineCosts, StepCosts

__all__ = ["BatchingEngine", "EngineCosts", "Finished"]


class Finished(msgspec.Struct, frozen=True):
    """A request that has all its tokens."""

    id: int
    tokens: int
    """Sampled."""
    cached: int
    """Tokens of its prompt that the prefix cache had when it was first admitted."""
    time: float


class BatchingEngine:
    """Times are seconds of the caller's clock; no method may be called with an earlier one than the last."""

    def __init__(
        self,
        costs: StepCosts,
        *,
        token_budget: int = 8192,
        max_requests: int = 1024,
        max_steps: int = 256,
    ) -> None:
        """``token_budget`` tokens a step and ``max_requests`` at a time are vLLM's ``max_num_batched_tokens`` and
        ``max_num_seqs``, with its defaults for a server on GPUs of 70 to 160 GiB; ``max_steps`` bounds what is advanced
        at once."""
        if not 1 <= max_requests <= token_budget:
            raise ValueError(f"max_requests is {max_requests}: it must be 1 to token_budget, {token_budget}")
        self.costs = costs
        self.capacity = costs.kv_capacity
        """Tokens of KV cache."""
        self.busy_s = 0.0
        """Seconds of computing, as of the last event."""
        self.tokens_prefilled = 0
        self.tokens_decoded = 0
        """Sampled, the first of each request included."""
        self.preemptions = 0
        self._token_budget = token_budget
        self._max_requests = max_requests
        self._max_steps = max_steps
        self._requests: dict[int, Request] = {}
        self._arrivals = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """In the order of arrival: whoever waits came after all of them."""
        self._prefills: dict[int, Request] = {}
        """Those of the running that are in ``PREFILL``."""
        self._leaving: list[Request] = []
        """Cancelled in a step that is running."""
        self._finishing: list[tuple[int, int, Request]] = []
        """(step, order of arrival, request): a heap, with entries that no longer hold."""
        self._cache = PrefixCache()
        self._used = 0
        """Tokens in the KV cache, of running requests; in ``PREFILL`` their whole context is set aside."""
        self._decodes = self._decode_context = 0
        """Requests in ``DECODE``, and their tokens in the KV cache."""
        self._steps = 0
        self._now = self._clock = 0.0
        """The latest time told, and the time at which the next plan starts."""
        self._plan: Plan | None = None
        """What starts at ``_clock``, unless there is another input before time passes."""
        self._active: Plan | None = None
        self._suspended = self._drop = False
        self._slowdown = 1.0
        self._finished: list[Finished] = []

    @property
    def slowdown(self) -> float:
        """Factor on the time of a step; a change takes effect at the next event."""
        return self._slowdown

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        if not factor > 0:
            raise ValueError(f"an engine can't be {factor} times as slow")
        if self._active is None:
            self._planned()  # what starts at the latest time told keeps the old one, whether asked for already or not
        self._slowdown = factor

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens of running requests in the KV cache, as of the last event."""
        return self._used

    @property
    def cached_tokens(self) -> int:
        """Tokens in the prefix cache that no running request holds, as of the last event."""
        return self._cache.total

    # --- inputs ---------------------------------------------------------------------------------------

    def submit(self, now: float, id: int, key: str, prompt_tokens: int, new_tokens: int) -> None:
        """Begin a request; what the cache has under ``key`` is taken for the beginning of its prompt."""
        if prompt_tokens < 1 or new_tokens < 1:
            raise ValueError(f"request {id} has {prompt_tokens} tokens of prompt and {new_tokens} to sample")
        if prompt_tokens + new_tokens - 1 > self.capacity:
            raise ValueError(
                f"request {id} needs {prompt_tokens + new_tokens - 1} tokens of KV cache: there are {self.capacity}"
            )
        self._enter(now)
        if id in self._requests:
            raise ValueError(f"request {id} is already there")
        self._arrivals += 1
        request = self._requests[id] = Request(id, self._arrivals, key, prompt_tokens, new_tokens)
        # Behind another that waits, it changes nothing now.
        if not self._waiting and len(self._running) < self._max_requests:
            self._interrupt()
        self._waiting.append(request)

    def deposit(self, now: float, key: str, tokens: int) -> None:
        """Another engine's keys and values have come: the cache has ``tokens`` under ``key``."""
        self._enter(now)
        self._cache.put(key, tokens)
        self._cache.shrink(self.capacity - self._used)

    def cancel(self, now: float, id: int) -> bool:
        """Forget a request: it won't finish.  False: it isn't there, or has finished."""
        self._enter(now)
        request = self._requests.pop(id, None)
        if request is None:
            return False
        self._interrupt()
        if request.state == WAITING:
            self._waiting.remove(request)
            request.state = GONE
        elif self._active is None:
            self._leave(request)
        else:
            self._leaving.append(request)
        return True

    def suspend(self, now: float) -> float:
        """Compute nothing until ``resume``; returns when the step that is running will have ended."""
        self._enter(now)
        self._interrupt()
        self._suspended = True
        return now if self._active is None else self._active.end()

    def resume(self, now: float) -> None:
        """Go on."""
        self._enter(now)
        self._suspended = False

    def drop_caches(self, now: float) -> float:
        """The weights change: empty the prefix cache and have every context computed again; what was sampled is kept.

        Returns when it takes effect: at the end of the step that is running.
        """
        self._enter(now)
        self._interrupt()
        if self._active is None:
            self._drop_now()
            return now
        self._drop = True
        return self._active.end()

    # --- outputs --------------------------------------------------------------------------------------

    def next_event(self) -> float | None:
        """When something can finish or change; None: never, without an input."""
        if self._finished:
            return self._now
        plan = self._active or self._planned()
        return None if plan is None else plan.end()

    def advance(self, now: float) -> list[Finished]:
        """What has finished by ``now`` and wasn't told yet."""
        self._run(now)
        finished, self._finished = self._finished, []
        return finished

    def sampled(self, id: int) -> int:
        """Tokens that a request which hasn't finished has, at the latest time told."""
        request = self._requests[id]
        if request.state != DECODE:
            return request.sampled
        in_flight = 0 if self._active is None else self._active.done_by(self._now)
        return request.new - (request.finish - self._steps) + in_flight

    # --- time -----------------------------------------------------------------------------------------

    def _run(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        self._now = now
        while True:
            if self._active is not None:
                end = self._active.end()
                if end > now:
                    return
                self._commit(self._active, end)
            plan = self._planned()
            if plan is None or plan.start >= now:
                return
            self._begin(plan)

    def _enter(self, now: float) -> None:
        """Come to ``now``, ready for an input."""
        self._run(now)
        self._plan = None
        if self._active is None:
            self._clock = now

    def _interrupt(self) -> None:
        """Have what runs end with its present step, so that the batch can change."""
        if self._active is not None:
            done = self._active.done_by(self._now)
            if done and self._active.start + done * self._active.step_s == self._now:
                self._active.steps = done
                self._commit(self._active, self._now)
            else:
                self._active.steps = done + 1

    # --- the scheduler --------------------------------------------------------------------------------

    def _planned(self) -> Plan | None:
        if self._plan is None and not self._suspended and (self._running or self._waiting):
            self._plan = self._schedule()
        return self._plan

    def _held(self, request: Request) -> int:
        """Tokens of KV cache that a running request has; the token sampled last isn't there yet."""
        if request.state == PREFILL:
            return request.target
        return request.prompt + request.new - (request.finish - self._steps) - 1

    def _schedule(self) -> Plan:
        """The next batch.  Changes nothing: the plan may be dropped."""
        used, decodes, context = self._used, self._decodes, self._decode_context
        plan = Plan(self._clock, decodes)
        if used + decodes > self.capacity:
            for request in reversed(self._running.values()):
                held = self._held(request)
                used -= held
                if request.state == DECODE:
                    decodes -= 1
                    context -= held
                plan.victims.append(request)
                if used + decodes <= self.capacity:
                    break
            plan.decodes = decodes

        budget = self._token_budget - decodes
        tokens = cached = samples = 0
        pairs = 0.0
        for request in self._prefills.values():
            if not budget:
                break
            if plan.victims and request in plan.victims:
                continue
            known = request.computed
            chunk = min(budget, request.target - known)
            plan.chunks.append((request, chunk))
            budget -= chunk
            tokens += chunk
            cached += known
            pairs += chunk * (known + (chunk + 1) / 2)
            samples += known + chunk == request.target
        if not plan.victims and self._waiting:
            room = self.capacity - used - decodes
            seats = self._max_requests - len(self._running)
            taken: list[str] = []
            for request in self._waiting:
                target = request.prompt + request.sampled
                if not (budget and seats) or target > room:
                    break
                known = 0 if request.key in taken else min(self._cache.get(request.key), target - 1)
                taken.append(request.key)
                chunk = min(budget, target - known)
                plan.admitted.append((request, known))
                plan.chunks.append((request, chunk))
                room -= target
                seats -= 1
                budget -= chunk
                tokens += chunk
                cached += known
                pairs += chunk * (known + (chunk + 1) / 2)
                samples += known + chunk == target

        if not plan.chunks:
            finishing = self._finishing
            while finishing[0][2].state != DECODE or finishing[0][2].finish != finishing[0][0]:
                heapq.heappop(finishing)
            growth = (self.capacity - used) // decodes
            plan.steps = min(self._max_steps, finishing[0][0] - self._steps, growth)
            # The cost is linear in the context wherever the same bound holds: the mean step is the one in the middle.
            context += decodes * (plan.steps - 1) // 2
        plan.step_s = self._slowdown * self.costs.step_s(
            tokens, cached, decodes, context, prefill_pairs=pairs, samples=decodes + samples
        )
        return plan

    def _begin(self, plan: Plan) -> None:
        """Do what was planned, now that time passes."""
        for request in plan.victims:
            self.preemptions += 1
            self._stop(request)
            self._waiting.appendleft(request)
        for request, known in plan.admitted:
            self._waiting.popleft()
            self._cache.take(request.key)
            request.state = PREFILL
            request.target = request.prompt + request.sampled
            request.computed = known
            if request.cached < 0:
                request.cached = known
            self._used += request.target
            self._running[request.id] = self._prefills[request.id] = request
        self._cache.shrink(self.capacity - self._used)
        self._plan, self._active = None, plan

    def _commit(self, plan: Plan, end: float) -> None:
        """The steps have ended."""
        self._active, self._clock = None, end
        self.busy_s += end - plan.start
        self._steps += plan.steps
        grown = plan.decodes * plan.steps
        self._used += grown
        self._decode_context += grown
        self.tokens_decoded += grown
        while self._finishing and self._finishing[0][0] <= self._steps:
            step, _, request = heapq.heappop(self._finishing)
            if request.state == DECODE and request.finish == step:
                self._finish(request, end)
        for request, chunk in plan.chunks:
            self.tokens_prefilled += chunk
            request.computed += chunk
            if request.computed == request.target:
                self._prefilled(request, end)
        for request in self._leaving:
            if request.state != GONE:
                self._leave(request)
        self._leaving.clear()
        if self._drop:
            self._drop_now()
        self._cache.shrink(self.capacity - self._used)

    def _prefilled(self, request: Request, now: float) -> None:
        """Its context is computed, and with it one token sampled."""
        self.tokens_decoded += 1
        del self._prefills[request.id]
        request.state = DECODE
        request.finish = self._steps + request.new - request.sampled - 1
        self._decodes += 1
        self._decode_context += request.target
        if request.finish == self._steps:
            self._finish(request, now)
        else:
            heapq.heappush(self._finishing, (request.finish, request.order, request))

    def _finish(self, request: Request, now: float) -> None:
        self._leave(request)
        if self._requests.pop(request.id, None) is not None:
            self._finished.append(Finished(request.id, request.new, max(0, request.cached), now))

    def _leave(self, request: Request) -> None:
        self._stop(request)
        request.state = GONE

    def _stop(self, request: Request) -> None:
        """Out of the batch; its context stays in the prefix cache as long as there is room."""
        held = self._held(request)
        self._used -= held
        del self._running[request.id]
        if request.state == DECODE:
            self._decodes -= 1
            self._decode_context -= held
            request.sampled = request.new - (request.finish - self._steps)
        else:
            del self._prefills[request.id]
            held = request.computed
        request.state = WAITING
        self._cache.put(request.key, held)

    def _drop_now(self) -> None:
        self._drop = False
        self._cache.clear()
        for request in self._running.values():
            if request.state == DECODE:
                request.sampled = request.new - (request.finish - self._steps)
                request.state = PREFILL
            request.target = request.prompt + request.sampled
            request.computed = 0
        self._prefills = dict(self._running)
        self._used = sum(request.target for request in self._running.values())
        self._decodes = self._decode_context = 0
