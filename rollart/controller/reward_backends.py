"""How calls reach reward functions: inside this process, plain HTTP, AWS Lambda, Alibaba Function Compute.

Credentials come from the environment, are read when a backend is made, and appear in no message and no log.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from rollart.config.rewards import IN_PROCESS, LOCAL, Reward
from rollart.controller.reward_calls import CONCURRENCY, Backend, CallError, FailureKind
from rollart.controller.signatures import AlibabaKeys, AwsKeys, sign_alibaba, sign_aws
from rollart.environments.threads import Threads
from rollart.errors import ConfigError
from rollart.rewards.loading import load_function
from rollart.rewards.payload import Meter, Reply, Request, decode_reply, encode
from rollart.rewards.view import Unavailable

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpBackend", "InProcessBackend", "backends"]

AGAIN = frozenset({408, 409, 425, 429})
"""Statuses below 500 that say: another time."""
SAID = 300
"""Characters of an answer that are told to people."""
SECRET = re.compile(r"(?i)(authorization|token|secret|credential|signature)(\W+)\S+")
THREADS = 8
Sign = Callable[[str, bytes], Mapping[str, str]]
"""(url, body) → headers."""
Check = Callable[[Mapping[str, str], bytes], None]
"""(headers, body) of a success: ``CallError`` where it is none."""


def backends(*, local: Callable[[], str], local_token: str = "") -> Callable[[Reward], Backend]:
    """Makes the backend of a reward; ``local()`` is the function host's present address, with its token."""

    def make(reward: Reward) -> Backend:
        url = reward.where
        if url == IN_PROCESS:
            return InProcessBackend(reward)
        connections = reward.concurrency or CONCURRENCY
        if reward.hedge_after_s is not None:
            connections *= 2
        if url == LOCAL:
            return HttpBackend(lambda: f"{local()}/call", _bearer(local_token), connections=connections)
        if url.startswith("lambda://"):
            return lambda_backend(url, connections=connections)
        if url.startswith("fc+"):
            return function_compute_backend(url, connections=connections)
        token = _variable(reward.token_env) if reward.token_env else ""
        return HttpBackend(lambda: url, _bearer(token), connections=connections)

    return make


def _variable(name: str) -> str:
    """An environment variable; ``ConfigError`` when it is not set."""
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"reward: the environment variable {name} is not set")
    return value


def _bearer(token: str) -> Sign:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return lambda url, body: headers


class HttpBackend:
    """POSTs the request as JSON; a bounded number of connections, kept open."""

    def __init__(
        self,
        url: Callable[[], str],
        sign: Sign,
        *,
        connections: int,
        check: Check | None = None,
    ) -> None:
        """``sign`` gives the headers that say who calls; ``check(headers, body)`` raises ``CallError`` where a
        success is none."""
        self._url = url
        self._sign = sign
        self._connections = connections
        self._check = check
        self._open: aiohttp.ClientSession | None = None

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        """As of ``Backend``; the caller keeps the time."""
        import aiohttp
        from yarl import URL

        body = encode(request)
        url = self._url()
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": request.key,
            "X-Rollart-Deadline": f"{timeout_s:g}",
            **self._sign(url, body),
        }
        try:
            async with self._session().post(
                URL(url, encoded=True), data=body, headers=headers, allow_redirects=False, proxy=_proxy(url)
            ) as answer:
                said = await answer.read()
                status, got = answer.status, answer.headers
        except (aiohttp.ClientError, OSError) as error:
            raise CallError(FailureKind.INFRASTRUCTURE, f"{_host(url)}: {_safe(_describe(error))}") from None
        if status // 100 != 2:
            raise _refusal(url, status, got, said)
        if self._check is not None:
            self._check(got, said)
        try:
            return decode_reply(said)
        except msgspec.DecodeError as error:
            raise CallError(
                FailureKind.REFUSED, f"{_host(url)} gave an answer that is no reply: {error}"
            ) from None

    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            import aiohttp

            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=15.0)
            # Not trust_env: it reads ~/.netrc in a thread for every call, and would send what it finds there.
            self._open = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._open

    async def close(self) -> None:
        """Close the connections."""
        if self._open is not None:
            await self._open.close()
            self._open = None


@functools.lru_cache(maxsize=64)
def _proxy(url: str) -> str | None:
    """The proxy that the environment names for ``url`` (HTTPS_PROXY, NO_PROXY and the like)."""
    parts = urlsplit(url)
    found = getproxies().get(parts.scheme)
    return None if found is None or proxy_bypass(parts.hostname or "") else found


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _host(url: str) -> str:
    """Of a url what may be told: a query may hold a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _safe(text: str) -> str:
    return SECRET.sub(r"\1\2…", text)


def _refusal(url: str, status: int, headers: Mapping[str, str], said: bytes) -> CallError:
    text = " ".join(_safe(said[: 2 * SAID].decode(errors="replace")).split())[:SAID]
    kind = FailureKind.INFRASTRUCTURE if status >= 500 or status in AGAIN else FailureKind.ERROR
    if status == 504 and headers.get("X-Rollart-Timeout"):
        kind = FailureKind.TIMEOUT
    pause = headers.get("Retry-After", "")
    return CallError(
        kind,
        f"{_host(url)} answered {status}{f': {text}' if text else ''}",
        pause_s=min(float(pause), 60.0) if pause.isdecimal() else 0.0,
    )


# --- AWS Lambda ---------------------------------------------------------------------------------------------


def lambda_backend(url: str, *, connections: int) -> HttpBackend:
    """``lambda://REGION/FUNCTION``: the Invoke API, synchronously, signed with Signature Version 4.

    ``AWS_ENDPOINT_URL_LAMBDA`` replaces Amazon's endpoint, as it does in Amazon's own tools.
    """
    region, _, function = url.removeprefix("lambda://").partition("/")
    keys = AwsKeys.from_environment()
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_LAMBDA", "").rstrip("/") or f"https://lambda.{region}.amazonaws.com"
    )
    target = f"{endpoint}/2015-03-31/functions/{quote(function, safe='')}/invocations"

    def sign(url: str, body: bytes) -> Mapping[str, str]:
        headers = {"X-Amz-Invocation-Type": "RequestResponse", "Content-Type": "application/json"}
        return sign_aws(keys, "POST", url, headers, body, region=region, service="lambda")

    return HttpBackend(lambda: target, sign, connections=connections, check=_check_lambda)


def _check_lambda(headers: Mapping[str, str], body: bytes) -> None:
    """Lambda answers 200 where the function itself failed, and says so in a header."""
    failed = headers.get("X-Amz-Function-Error")
    if not failed:
        return
    try:
        told: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        told = {}
    message = str(told.get("errorMessage", "")) if isinstance(told, dict) else ""
    error_type = str(told.get("errorType", "")) if isinstance(told, dict) else ""
    if "timed out" in message.lower() or error_type == "Sandbox.Timedout":
        kind = FailureKind.TIMEOUT
    elif error_type.startswith("Runtime."):  # the runtime ended, or could not begin
        kind = FailureKind.INFRASTRUCTURE
    else:
        kind = FailureKind.ERROR
    raise CallError(kind, f"the Lambda function failed ({failed} {error_type}): {_safe(message[:SAID])}")


# --- Alibaba Function Compute -------------------------------------------------------------------------------


def function_compute_backend(url: str, *, connections: int) -> HttpBackend:
    """``fc+https://…``: an HTTP trigger whose authentication method is the signature (ACS3-HMAC-SHA256)."""
    keys = AlibabaKeys.from_environment()
    target = url.removeprefix("fc+")

    def sign(url: str, body: bytes) -> Mapping[str, str]:
        return sign_alibaba(keys, "POST", url, {}, body)

    return HttpBackend(lambda: target, sign, connections=connections, check=_check_function_compute)


def _check_function_compute(headers: Mapping[str, str], body: bytes) -> None:
    failed = headers.get("X-Fc-Error-Type")
    if failed:
        text = " ".join(_safe(body[: 2 * SAID].decode(errors="replace")).split())[:SAID]
        raise CallError(FailureKind.ERROR, f"the function failed ({failed}): {text}")


# --- inside this process ------------------------------------------------------------------------------------


class InProcessBackend:
    """Runs the function here: plain ones in threads, ``async def`` on the event loop, which they must not block."""

    def __init__(self, reward: Reward) -> None:
        """``ConfigError`` when the function can't be loaded."""
        assert reward.function is not None
        self._function = load_function(reward.function)
        self._threads: Threads | None = None

    async def call(self, request: Request, *, timeout_s: float) -> Reply:
        """As of ``Backend``."""
        function = self._function
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            if function.is_async:
                results = await function.results_async(request.scope, request.trajectories, request.options)
            else:
                if self._threads is None:
                    self._threads = Threads(THREADS, "reward")
                results = await self._threads.run(
                    lambda: function.results(request.scope, request.trajectories, request.options), _nothing
                )
        except Unavailable as error:
            raise CallError(FailureKind.INFRASTRUCTURE, f"{function.path} is unavailable: {error}") from None
        return Reply(results=results, meter=Meter(busy_s=loop.time() - started))

    async def close(self) -> None:
        """Let the threads end."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None


def _nothing() -> None:
    """Nobody needs to know that a call has ended."""
