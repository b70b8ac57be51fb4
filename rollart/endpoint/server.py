"""Endpoint: the HTTP server, in the controller's process and on its loop.

An API key names one attempt of one trajectory and is the only credential: it can't be guessed, is good for nothing
else, and is refused (401) or answered with 410 once the attempt has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollart.config import Config
from rollart.controller.llm_proxy import Answer
from rollart.controller.trajectory import Trajectory
from rollart.endpoint.calls import parse_call
from rollart.endpoint.errors import ApiError, ended
from rollart.endpoint.session import Session, why_ended
from rollart.endpoint.text import Text
from rollart.environments.chat_template import ChatTemplate
from rollart.errors import RunError

__all__ = ["Endpoint"]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
REMEMBERED_ENDS = 4096
"""Attempts whose end is told to those that still call; of older ones only that they have ended."""
SHUTDOWN_S = 1.0
KEY_PREFIX = "rollart"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """One for each run that has agents."""

    def __init__(
        self,
        config: Config,
        model_dir: Path,
        *,
        bug: Callable[[BaseException], None],
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """``bug`` hears of what no one expected."""
        self.config = config
        self.model = config.endpoint.model
        self.base_url = ""
        """What agents call; once it is started."""
        self.counts: Counter[str] = Counter()
        """Since the start: calls repeated, refused, branched, rendered anew, and conversations beyond the first."""
        self._model_dir = model_dir
        self._bug = bug
        self._unix_time = unix_time
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, Session] = {}
        self._ends: OrderedDict[str, str] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._text: Text
        self._template: ChatTemplate | None = None

    # --- life -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the tokenizer and listen; ``RunError`` when either can't be."""
        try:
            self._text = Text(self._model_dir)
            self._template = self._find_template()
        except (OSError, ValueError) as error:
            raise RunError(f"the endpoint needs the model's tokenizer: {error}") from None
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        settings = self.config.endpoint
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, settings.host, settings.port).start()
        except OSError as error:
            raise RunError(
                f"the endpoint can't listen on {settings.host}:{settings.port} (endpoint.host, endpoint.port): "
                f"{error.strerror or error}"
            ) from None
        port = self._runner.addresses[0][1]
        self.base_url = (settings.url or f"http://{_in_url(settings.host)}:{port}").rstrip("/") + "/v1"
        if not _is_loopback(settings.host):
            logger.warning("the endpoint listens on %s in plain HTTP: API keys can be read", settings.host)

    def _find_template(self) -> ChatTemplate | None:
        file = self.config.model.chat_template
        try:
            return ChatTemplate(self._model_dir, Path(file) if file is not None else None)
        except FileNotFoundError:
            if file is not None:
                raise
            return None  # said when a chat is asked for; completions need none

    async def stop(self) -> None:
        """Listen no more."""
        for session in list(self._sessions.values()):
            self.close(session, "the run is over")
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- trajectories ---------------------------------------------------------------------------------

    def open(
        self,
        trajectory: Trajectory,
        *,
        sample: Callable[[Trajectory], Awaitable[Answer]],
        sampled: Callable[[Trajectory, Answer], None],
    ) -> Session:
        """Take calls for the trajectory's current attempt; for ``sample`` and ``sampled`` see ``Session``."""
        session = Session(
            trajectory,
            self._text,
            self._template,
            sample=sample,
            sampled=sampled,
            counts=self.counts,
            bug=self._bug,
            unix_time=self._unix_time,
        )
        self._sessions[session.name] = session
        return session

    def key(self, session: Session) -> str:
        """The API key that names the session."""
        return f"{KEY_PREFIX}.{session.name}.{self._proof(session.name)}"

    def close(self, session: Session, why: str = "") -> None:
        """Take no more calls for the session; by default its trajectory's end says why."""
        session.close(why or why_ended(session.trajectory))
        if self._sessions.pop(session.name, None) is None:
            return
        self._ends[session.name] = session.closed
        while len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def _proof(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:40]

    # --- requests -------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        session = self._session(request)
        call = parse_call(
            await request.read(),
            self.config,
            session.trajectory.kind,
            chat=chat,
            most_tokens=session.limits.max_tokens,
            task=session.trajectory.task,
        )
        completion = await session.answer(call)
        if not call.stream:
            return _json(completion.body(call, session.text))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for event in completion.events(call, session.text):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._name(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rollart"}
        name = request.match_info.get("name")
        if name is None:
            return _json({"object": "list", "data": [model]})
        if name != self.model:
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return _json(model)

    def _session(self, request: web.Request) -> Session:
        name = self._name(request)
        session = self._sessions.get(name)
        if session is None:
            raise ended(self._ends.get(name, f"trajectory {name} has ended; it takes no more calls"))
        return session

    def _name(self, request: web.Request) -> str:
        """The session that the request's key names; ``ApiError`` (401) without a key of this run."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        name, _, proof = key.strip().removeprefix(f"{KEY_PREFIX}.").rpartition(".")
        known = scheme.lower() == "bearer" and hmac.compare_digest(proof.encode(), self._proof(name).encode())
        if not known:
            raise ApiError(
                401,
                "no API key of a trajectory of this run was given (Authorization: Bearer KEY)",
                code="invalid_api_key",
            )
        return name

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The boundary of a request: whatever goes wrong is told in OpenAI's format."""
        try:
            return await handler(request)
        except ApiError as error:
            self.counts["calls_after_the_end" if error.status == 410 else "calls_refused"] += 1
            return _json(error.body, error.status)
        except web.HTTPException as error:
            said = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
            return _json(said.body, error.status)
        except ConnectionError:  # the client is gone: nobody to tell
            raise
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            self._bug(error)
            said = ApiError(500, f"the endpoint failed: {type(error).__name__}", kind="server_error")
            return _json(said.body, 500)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    headers = {} if status < 400 else {"x-should-retry": "false"}  # it would be answered the same again
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
