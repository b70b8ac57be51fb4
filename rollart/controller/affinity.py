"""Which hardware classes a task's requests go to, and in what order: what the config declares, made complete.

The classes that a task names come first; the others follow in the order of the pools, so that a class that is busy or
gone never stops anybody.
"""

from __future__ import annotations

import msgspec

from rollart.config import Inference
from rollart.config.routing import AUTO, DEFAULT, Affinity, Phase, PhaseAffinity, classes_of

__all__ = ["Order", "Orders"]


class Order(msgspec.Struct, frozen=True, gc=False):
    """Hardware classes, the preferred one first."""

    whole: tuple[str, ...]
    """For requests that one worker serves."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    """For those that two serve; empty where none is split."""

    @property
    def split(self) -> bool:
        """Whether prefill and decode are apart."""
        return bool(self.prefill)


class Orders:
    """Every task's ``Order``."""

    def __init__(self, inference: Inference) -> None:
        pools = inference.all_pools
        self.classes = list(dict.fromkeys(pool.hardware for pool in pools))
        self.auto = inference.hw_affinity == AUTO
        """The orders are proposed while the run goes on."""
        declared = inference.hw_affinity
        self._entries: dict[str, Affinity] = {} if isinstance(declared, str) else dict(declared)
        self._apart = any(pool.phase is not Phase.BOTH for pool in pools)
        self._orders: dict[str, Order] = {}

    @property
    def trivial(self) -> bool:
        """There is nothing to choose: one class, and every request is served whole."""
        return len(self.classes) == 1 and not self._apart and not self._entries

    def of(self, task: str) -> Order:
        """The order of ``task``; one that has no entry takes ``default``."""
        order = self._orders.get(task)
        if order is None:
            order = self._orders[task] = self._made(self._entries.get(task, self._entries.get(DEFAULT)))
        return order

    def prefer(self, task: str, classes: list[str]) -> bool:
        """Put ``classes`` first for ``task`` from now on; whether that changes anything."""
        before = self.of(task)
        whole = self._complete(classes)
        changed = whole != before.whole
        if changed:
            apart = (whole, whole) if self._apart else ((), ())
            self._orders[task] = Order(whole, *apart)
        return changed

    def _made(self, entry: Affinity | None) -> Order:
        if isinstance(entry, PhaseAffinity):
            decode = self._complete(classes_of(entry.decode))
            return Order(decode, self._complete(classes_of(entry.prefill)), decode)
        whole = self._complete([] if entry is None else classes_of(entry))
        if entry is None and self._apart:
            return Order(whole, whole, whole)
        return Order(whole)

    def _complete(self, classes: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*classes, *self.classes]))
