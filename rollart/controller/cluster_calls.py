"""What a script's ``Cluster`` calls of a run: methods in its worker processes, spread as they were declared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from rollart.config.routing import DEFAULT, Phase, PhaseAffinity, classes_of
from rollart.controller import events
from rollart.controller.llm_proxy import LLMProxy
from rollart.controller.routing import Wish, place
from rollart.controller.run_context import RunContext
from rollart.controller.switchboard import CallError, Link, Switchboard
from rollart.declare import EXECUTE_ALL, Cluster, Declaration
from rollart.errors import ConfigError, RunError
from rollart.protocol import Execute, Executed, Role

__all__ = ["ClusterCalls"]


class ClusterCalls:
    """Of one run."""

    def __init__(
        self, switchboard: Switchboard, proxy: LLMProxy, run: RunContext, *, timeout_s: float
    ) -> None:
        self._switchboard = switchboard
        self._proxy = proxy
        self._run = run
        self._timeout_s = timeout_s
        self._calls: dict[str, int] = {}
        """In progress, by worker."""

    def view(self) -> dict[str, list[str]]:
        """Of each hardware class, the ready inference workers."""
        return self._proxy.resources.ready

    async def call(
        self,
        cluster: Cluster,
        method: str,
        declared: Declaration,
        tag: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The results of all workers, or the one of the worker that was chosen; ``RunError`` when one fails."""
        role = Role(cluster.worker_class.role)
        links = sorted(self._switchboard.of(role), key=lambda link: link.name)
        if not links:
            raise RunError(f"{cluster.path}.{method}: no {role} worker is there")
        try:
            arguments = msgspec.msgpack.encode([args, kwargs])
        except TypeError as error:
            raise ConfigError(f"{cluster.path}.{method}: an argument can't be sent: {error}") from None
        if declared.mode == EXECUTE_ALL:
            return await asyncio.gather(*(self._ask(link, cluster, method, arguments) for link in links))
        link = links[0] if declared.mode else self._by_class(links, declared, tag)
        return await self._ask(link, cluster, method, arguments)

    def _by_class(self, links: list[Link], declared: Declaration, tag: str) -> Link:
        """The worker for ``tag``: of its class, or of the next that has one."""
        entry = declared.hw_affinity.get(tag, declared.hw_affinity.get(DEFAULT, []))
        named = classes_of(entry.decode if isinstance(entry, PhaseAffinity) else entry)
        there = dict.fromkeys(link.hello.hardware_class for link in links)
        order = list(dict.fromkeys([*named, *self._proxy.orders.classes, *there]))
        chosen = None
        if links[0].role is Role.INFERENCE:
            found = place(self._proxy.pools.open, order, Wish(0, 0, 0))
            chosen = None if found is None else self._proxy.engines[found.name].link
        if chosen is None:
            chosen = min(
                links, key=lambda w: (order.index(w.hello.hardware_class), self._calls.get(w.name, 0))
            )
        hardware, wanted = chosen.hello.hardware_class, order[0]
        reason = "" if hardware == wanted else f"no {wanted} worker takes a request"
        self._run.write(events.Bound(self._run.clock(), -1, tag, Phase.BOTH, wanted, hardware, reason))
        return chosen

    async def _ask(self, link: Link, cluster: Cluster, method: str, arguments: bytes) -> Any:
        request = Execute(self._switchboard.next_seq(), cluster.path, method, arguments)
        self._calls[link.name] = self._calls.get(link.name, 0) + 1
        try:
            done = await self._switchboard.call(link, request, Executed, timeout_s=self._timeout_s)
        except CallError as error:
            raise RunError(f"{cluster.path}.{method}: {error}") from error
        finally:
            self._calls[link.name] -= 1
        return msgspec.msgpack.decode(done.result)
