"""What a simulated engine's scheduler works on: its requests, a plan of steps, and the prefix cache."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["DECODE", "GONE", "PREFILL", "WAITING", "Plan", "PrefixCache", "Request"]

WAITING, PREFILL, DECODE, GONE = range(4)


class Request:
    """``prompt`` and ``new`` are tokens; ``order`` counts arrivals."""

    __slots__ = (
        "cached",
        "computed",
        "finish",
        "id",
        "key",
        "new",
        "order",
        "prompt",
        "sampled",
        "state",
        "target",
    )

    def __init__(self, id: int, order: int, key: str, prompt: int, new: int) -> None:
        self.id = id
        self.order = order
        self.key = key
        self.prompt = prompt
        self.new = new
        self.state = WAITING
        self.sampled = 0
        """As of when it last left ``DECODE``; until then it is ``new - (finish - the engine's steps)``."""
        self.target = self.computed = 0
        """In ``PREFILL``: tokens of context to compute, and of those computed or found in the cache."""
        self.finish = 0
        """In ``DECODE``: the engine's step after which it has all its tokens."""
        self.cached = -1
        """Of its prompt, when it was first admitted; -1 before."""


class Plan:
    """Steps with the same batch, and what the scheduler did before the first of them."""

    __slots__ = ("admitted", "chunks", "decodes", "start", "step_s", "steps", "victims")

    def __init__(self, start: float, decodes: int) -> None:
        self.start = start
        self.decodes = decodes
        self.steps = 1
        self.step_s = 0.0
        self.victims: list[Request] = []
        self.admitted: list[tuple[Request, int]] = []
        """With the tokens it finds in the prefix cache."""
        self.chunks: list[tuple[Request, int]] = []
        """With the tokens of its context to compute."""

    def end(self) -> float:
        return self.start + self.steps * self.step_s

    def done_by(self, now: float) -> int:
        """Steps that have ended."""
        done = min(int((now - self.start) / self.step_s), self.steps)
        # The division may be off by one in the last bit: what decides is the expression in ``end``.
        while done < self.steps and self.start + (done + 1) * self.step_s <= now:
            done += 1
        while done and self.start + done * self.step_s > now:
            done -= 1
        return done


class PrefixCache:
    """key → tokens of context, the least recently used first.

    Eviction shortens an entry from its end, as vLLM frees its blocks.
    """

    __slots__ = ("_entries", "total")

    def __init__(self) -> None:
        self._entries: OrderedDict[str, int] = OrderedDict()
        self.total = 0

    def get(self, key: str) -> int:
        return self._entries.get(key, 0)

    def take(self, key: str) -> None:
        self.total -= self._entries.pop(key, 0)

    def put(self, key: str, tokens: int) -> None:
        if tokens:
            known = self._entries.pop(key, 0)
            self._entries[key] = max(known, tokens)
            self.total += max(known, tokens) - known

    def shrink(self, room: int) -> None:
        """Evict until no more than ``room`` tokens are left."""
        while self._entries and self.total > room:
            key, tokens = self._entries.popitem(last=False)
            kept = max(0, tokens - (self.total - room))
            self.total -= tokens - kept
            if kept:
                self._entries[key] = kept
                self._entries.move_to_end(key, last=False)

    def clear(self) -> None:
        self._entries.clear()
        self.total = 0
