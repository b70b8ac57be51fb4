"""The host in HTTP: ``POST /call`` runs a function, ``GET /stats`` tells what all took, ``GET /healthz`` that it lives.

Only the functions that the host was started with can be called.  A client that hangs up cancels its call.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from aiohttp import web

from rollart.rewards.payload import SCHEMA, Envelope, Meter, Reply, encode
from rollart.workers.functions.pool import Crashed, Function, Pool, TemplateBroken

__all__ = ["FunctionHost"]

logger = logging.getLogger(__name__)

LARGEST_BODY = 256 << 20
REMEMBERED = 4096
"""Replies that are kept, by the keys of their calls, for a client whose connection broke."""
REMEMBERED_BYTES = 64 << 10
"""Longer ones are not."""
_envelope = msgspec.json.Decoder(Envelope)


class FunctionHost:
    """Functions behind HTTP."""

    def __init__(self, functions: Sequence[Function], token: str) -> None:
        """Who calls must tell ``token``, unless it is empty."""
        self.pools = {function.function: Pool(function) for function in functions}
        self._token = token
        self._replies: OrderedDict[str, bytes] = OrderedDict()
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int) -> str:
        """Listen; the base URL."""
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_post("/call", self._call)
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port, backlog=4096)
        await site.start()
        for pool in self.pools.values():
            pool.begin()
        host, bound = self._runner.addresses[0][:2]
        return f"http://{host}:{bound}"

    async def close(self) -> None:
        """Stop listening, end all instances."""
        if self._runner is not None:
            await self._runner.cleanup()
        for pool in self.pools.values():
            await pool.close()

    # --- requests -------------------------------------------------------------------------------------

    async def _call(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _says(401, "the bearer token is missing or wrong")
        body = await request.read()
        try:
            envelope = _envelope.decode(body)
        except msgspec.DecodeError as error:
            return _says(400, f"this is no request: {error}")
        if envelope.schema != SCHEMA:
            return _says(400, f"the schema is {envelope.schema!r}, this host speaks {SCHEMA!r}")
        pool = self.pools.get(envelope.function)
        if pool is None:
            return _says(
                404, f"there is no function {envelope.function!r} here, only {', '.join(self.pools)}"
            )
        remembered = self._replies.get(envelope.key) if envelope.key else None
        if remembered is not None:
            return web.Response(body=remembered, content_type="application/json")
        try:
            outcome, queue_s, cold_s = await pool.call(body, envelope.deadline_s)
        except Crashed as error:
            return _says(502, str(error))
        except TemplateBroken as error:
            return _says(500, f"{envelope.function} can't be run: {error}")
        except TimeoutError:
            timeout = {"X-Rollart-Timeout": "1"}
            return _says(504, f"no answer within {envelope.deadline_s:g} s", headers=timeout)
        if outcome.malformed:
            return _says(400, f"this is no request: {outcome.malformed}")
        if outcome.unavailable:
            return _says(503, outcome.unavailable)
        meter = Meter(busy_s=outcome.busy_s, queue_s=queue_s, cold_start_s=cold_s)
        reply = encode(Reply(results=outcome.results, meter=meter))
        self._remember(envelope.key, reply)
        return web.Response(body=reply, content_type="application/json")

    def _remember(self, key: str, reply: bytes) -> None:
        if key and len(reply) <= REMEMBERED_BYTES:
            self._replies[key] = reply
            if len(self._replies) > REMEMBERED:
                self._replies.popitem(last=False)

    async def _stats(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _says(401, "the bearer token is missing or wrong")
        stats = {name: pool.stats for name, pool in self.pools.items()}
        return web.Response(body=msgspec.json.encode(stats), content_type="application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _allowed(self, request: web.Request) -> bool:
        if not self._token:
            return True
        told = request.headers.get("Authorization", "")
        return hmac.compare_digest(told.encode(), f"Bearer {self._token}".encode())


def _says(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode({"schema": SCHEMA, "error": text}),
        content_type="application/json",
        headers=headers,
    )
