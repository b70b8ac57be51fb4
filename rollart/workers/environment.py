"""The environment worker: many episodes in one process.

An episode is a session: one environment object, one call at a time.  Whatever goes wrong in a user's code, be
it an exception, a wrong return type, ``sys.exit`` or a call that never returns, costs its session and nothing
else: no failed, cancelled or finished session is held, and a thread that hangs is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.environments.environment import Turn, Unavailable
from rollart.environments.loading import Blueprint, cause, load_environment
from rollart.environments.rendering import PlainRenderer
from rollart.environments.threads import Threads
from rollart.protocol import (
    Close,
    Failure,
    FailureKind,
    Message,
    Observation,
    Ready,
    Reset,
    Role,
    Step,
    ToWorker,
)
from rollart.workers.dialer import Dialer
from rollart.workers.worker import Deterministic, Worker

__all__ = ["EnvironmentWorker"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""For one environment's ``close``."""
CLOSE_PATIENCE_S = 2.0
"""For all of them together when the worker ends."""


class _WrongAnswer(Exception):
    """An environment returned what it must not; the message is the whole story."""


class _Session:
    """An episode."""

    __slots__ = ("blueprint", "busy", "environment", "name", "task")

    def __init__(self, name: str, task: str, blueprint: Blueprint) -> None:
        self.name = name
        self.task = task
        self.blueprint = blueprint
        self.environment: Any = None
        """There once the reset has begun, until it is disposed of."""
        self.busy = False
        """A call of the environment has not ended, though its request may be cancelled."""


class EnvironmentWorker(Worker):
    """Serves ``Reset``, ``Step`` and ``Close``."""

    role = Role.ENVIRONMENT
    packages = ("tokenizers",)

    def __init__(self, dialer: Dialer, *, name: str | None = None, hardware_class: str = "CPU") -> None:
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self._sessions: dict[str, _Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._blueprints: dict[str, Blueprint] = {}
        self._scored: set[str] = set()
        """Tasks that the controller scores by their texts."""
        self._renderer: PlainRenderer
        self._threads: Threads | None = None

    async def setup(self) -> Ready:
        """Load the tokenizer and every task's environment class; ``ConfigError`` when one can't be."""
        self._renderer = PlainRenderer(Path(self.welcome.model_dir))
        self._blueprints = {
            task.name: load_environment(task.name, task.environment, task.options)
            for task in self.config.tasks
        }
        self._scored = {task.name for task in self.config.tasks if task.rewards}
        self._threads = Threads(self.config.environments.threads, "environment")
        facts = {name: blueprint.name for name, blueprint in self._blueprints.items()}
        return Ready(self.config.environments.max_sessions, facts)

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request of the environment protocol."""
        match message:
            case Step():
                return await self._step(message)
            case Reset():
                return await self._reset(message)
            case Close(session=name):
                session = self._sessions.get(name)
                if session is not None:
                    self._drop(session)
                return None
        raise Deterministic(
            f"an environment worker serves Reset, Step and Close, not {type(message).__name__}"
        )

    async def teardown(self) -> None:
        """Drop all sessions; their ``close`` has a moment to finish."""
        for session in list(self._sessions.values()):
            self._drop(session)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_PATIENCE_S)
        for task in self._closing:
            task.cancel()
        if self._threads is not None:
            self._threads.stop()
            self._threads = None

    # --- requests -------------------------------------------------------------------------------------

    async def _reset(self, request: Reset) -> Message:
        limit = self.config.environments.max_sessions
        if request.session in self._sessions:
            return self._unable(request.seq, f"session {request.session!r} is under way already")
        if len(self._sessions) >= limit:
            return self._unable(request.seq, f"it holds {limit} sessions already (environments.max_sessions)")
        blueprint = self._blueprints.get(request.task)
        if blueprint is None:
            raise Deterministic(f"the run's config has no task {request.task!r}")
        session = self._sessions[request.session] = _Session(request.session, request.task, blueprint)

        def call() -> Any:
            session.environment = blueprint.build()
            return session.environment.reset(request.seed, request.split)

        def render(answer: object) -> Observation:
            ids = self._renderer.first(_first_text(answer))
            if not ids:
                raise _WrongAnswer("returned an empty text; the policy needs a token to go on")
            return self._told(session, Observation(request.seq, ids, 0.0, False, {}), answer)

        return await self._act(session, request.seq, "reset", call, render)

    async def _step(self, request: Step) -> Message:
        session = self._sessions.get(request.session)
        if session is None:
            return self._unable(
                request.seq,
                f"it has no session {request.session!r}: the episode has ended, or the worker is a new one",
            )
        if session.busy:
            return self._unable(request.seq, f"session {request.session!r} is busy with another request")

        def call() -> Any:
            return session.environment.step(self._renderer.answer(request.action))

        def render(answer: object) -> Observation:
            text, reward, done, info = _turn(answer)
            seen = Observation(request.seq, self._renderer.next(text), reward, done, info)
            return self._told(session, seen, text, request.action)

        return await self._act(session, request.seq, "step", call, render)

    async def _act(
        self,
        session: _Session,
        seq: int,
        method: str,
        call: Callable[[], Any],
        render: Callable[[object], Observation],
    ) -> Message:
        """Have ``session``'s environment do something; what it returned, or why it failed.

        Unless the episode goes on, the session is dropped.
        """
        assert self._threads is not None
        blueprint = session.blueprint
        is_async = blueprint.reset_is_async if method == "reset" else blueprint.step_is_async
        session.busy = True
        answer: Message | None = None
        try:
            if is_async:
                answer = render(await call())
            else:
                answer = await self._threads.run(lambda: render(call()), lambda: self._release(session))
        except BaseException as error:  # the boundary of an environment's code, which may even call sys.exit
            if _cancelled(error):
                raise
            answer = self._failed(seq, f"{blueprint.name}.{method}", error)
        finally:
            if is_async:
                self._release(session)
            if not isinstance(answer, Observation) or answer.done:
                self._drop(session)
        return answer

    def _told(
        self, session: _Session, seen: Observation, text: object, action: bytes | None = None
    ) -> Observation:
        """``seen`` with its texts, where a reward function reads them."""
        if session.task not in self._scored:
            return seen
        reference = getattr(session.environment, "reference", "")
        if not isinstance(reference, str):
            raise _WrongAnswer(f"left a reference that is {_kind(reference)}; it must be a str")
        seen.text, seen.reference = str(text), reference
        seen.answer = "" if action is None else self._renderer.answer(action)
        return seen

    # --- failures -------------------------------------------------------------------------------------

    def _unable(self, seq: int, why: str) -> Failure:
        return Failure(seq, FailureKind.INFRASTRUCTURE, f"{self.name} can't: {why}")

    def _failed(self, seq: int, where: str, error: BaseException) -> Failure:
        if isinstance(error, _WrongAnswer):
            return Failure(seq, FailureKind.DETERMINISTIC, f"{where} {error}")
        logger.warning("%s raised", where, exc_info=error)
        kind = FailureKind.INFRASTRUCTURE if isinstance(error, Unavailable) else FailureKind.DETERMINISTIC
        return Failure(seq, kind, f"{where} raised {cause(error)}")

    # --- the end of a session -------------------------------------------------------------------------

    def _drop(self, session: _Session) -> None:
        """Forget ``session``, and close its environment as soon as no call of it is under way."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        if not session.busy:
            self._dispose(session)

    def _release(self, session: _Session) -> None:
        session.busy = False
        if self._sessions.get(session.name) is not session:
            self._dispose(session)

    def _dispose(self, session: _Session) -> None:
        environment, session.environment = session.environment, None
        # Without threads the worker has ended: a call that hung until now is not worth waiting for.
        if environment is not None and session.blueprint.closes and self._threads is not None:
            task = asyncio.get_running_loop().create_task(self._close_environment(session, environment))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_environment(self, session: _Session, environment: Any) -> None:
        assert self._threads is not None  # since _dispose
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if session.blueprint.close_is_async:
                    await environment.close()
                else:
                    await self._threads.run(environment.close, lambda: None)
        except BaseException as error:  # the boundary of an environment's code
            if _cancelled(error):
                raise
            logger.warning("%s.close failed: %s", session.blueprint.name, cause(error), exc_info=error)


def _cancelled(error: BaseException) -> bool:
    """The running task was cancelled or thrown away; not: an environment raised ``CancelledError`` by itself."""
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


def _first_text(answer: object) -> str:
    if not isinstance(answer, str):
        raise _WrongAnswer(f"returned {_kind(answer)}; it must return the first observation, a str")
    return answer


def _turn(answer: object) -> tuple[str, float, bool, dict[str, float]]:
    """The parts of a ``Turn``, as plain Python values."""
    if not isinstance(answer, Turn):
        raise _WrongAnswer(
            f"returned {_kind(answer)}; it must return rollart.environments.Turn(text, reward, done, info)"
        )
    if not isinstance(answer.text, str):
        raise _WrongAnswer(f"returned a Turn whose text is {_kind(answer.text)}; it must be a str")
    reward = _number(answer.reward, "reward")
    if not isinstance(answer.done, bool):
        raise _WrongAnswer(f"returned a Turn whose done is {_kind(answer.done)}; it must be a bool")
    if not answer.info:
        return answer.text, reward, answer.done, {}
    if not isinstance(answer.info, Mapping):
        raise _WrongAnswer(
            f"returned a Turn whose info is {_kind(answer.info)}; it must map names to numbers"
        )
    info = {str(name): _number(value, f"info[{name!r}]") for name, value in answer.info.items()}
    return answer.text, reward, answer.done, info


def _number(value: object, what: str) -> float:
    if not isinstance(value, float | int | numbers.Real) or not math.isfinite(value):
        raise _WrongAnswer(f"returned a Turn whose {what} is {_kind(value)}; it must be a finite number")
    return float(value)


def _kind(value: object) -> str:
    """``value`` for an error: its type, and what it is where that is short."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"
