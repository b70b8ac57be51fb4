"""The environment worker: many episodes in one process.

An episode is a session: one environment object, one call at a time.  Whatever goes wrong in a user's code, be
it an exception, a wrong return type, ``sys.exit`` or a call that never returns, costs its session and nothing
else: no failed, cancelled or finished session is held, and a thread that hangs is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollart.config import Task
from rollart.environments.action import Action
from rollart.environments.answers import WrongAnswer, check_first, check_turn, text_of
from rollart.environments.chat_template import ChatTemplate, TemplateFault
from rollart.environments.conversation import Conversation
from rollart.environments.environment import ChatMessage, Unavailable
from rollart.environments.loading import Blueprint, cause, load_task
from rollart.environments.rendering import PlainRenderer
from rollart.environments.sandbox import best_isolation
from rollart.environments.threads import Threads
from rollart.errors import ConfigError
from rollart.processes import children_of_this_thread, end_trees
from rollart.protocol import (
    Close,
    Failure,
    FailureKind,
    Message,
    Observation,
    Play,
    Ready,
    Reset,
    Role,
    Step,
    ToWorker,
)
from rollart.workers.agents import Agents
from rollart.workers.dialer import Dialer
from rollart.workers.output import Tally, TooMuchOutput, counting, metered
from rollart.workers.worker import Deterministic, Worker

__all__ = ["EnvironmentWorker"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""For one environment's ``close``."""
CLOSE_PATIENCE_S = 2.0
"""For all of them together when the worker ends."""


class _Session:
    """An episode."""

    __slots__ = ("blueprint", "busy", "children", "conversation", "environment", "name", "output", "task")

    def __init__(
        self, name: str, task: str, blueprint: Blueprint, conversation: Conversation, output: Tally
    ) -> None:
        self.name = name
        self.task = task
        self.blueprint = blueprint
        self.conversation = conversation
        self.output = output
        self.children: set[int] = set()
        """Processes that its calls have started."""
        self.environment: Any = None
        """There once the reset has begun, until it is disposed of."""
        self.busy = False
        """A call of the environment has not ended, though its request may be cancelled."""


class EnvironmentWorker(Worker):
    """Serves ``Reset``, ``Step`` and ``Close``, and ``Play`` for tasks with an agent."""

    role = Role.ENVIRONMENT
    packages = ("tokenizers",)

    def __init__(
        self,
        dialer: Dialer,
        *,
        name: str | None = None,
        hardware_class: str = "CPU",
        tasks: Sequence[str] = (),
    ) -> None:
        """``tasks`` are the tasks it holds episodes of; by default all of the run's."""
        super().__init__(dialer, name=name, hardware_class=hardware_class)
        self._sessions: dict[str, _Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._blueprints: dict[str, Blueprint] = {}
        self._only = frozenset(tasks)
        self._tasks_of: dict[str, Task] = {}
        self._renderer: PlainRenderer
        self._template: ChatTemplate | None = None
        self._threads: Threads | None = None
        self._end_metering: Callable[[], None] = lambda: None

    async def setup(self) -> Ready:
        """Load the tokenizer and the tasks' environment classes; ``ConfigError`` when one can't be."""
        folder = Path(self.welcome.model_dir)
        self._renderer = PlainRenderer(folder)
        self._tasks_of = {
            task.name: task for task in self.config.tasks if not self._only or task.name in self._only
        }
        self._blueprints = {
            name: load_task(task, self.config.seed)
            for name, task in self._tasks_of.items()
            if not task.is_agent
        }
        self._agents = Agents(list(self._tasks_of.values()))
        self._template = self._chat_template(folder)
        self._threads = Threads(self.config.environments.threads, "environment")
        self._end_metering = metered()
        facts = {name: blueprint.name for name, blueprint in self._blueprints.items()} | self._agents.facts
        if any(getattr(blueprint.environment, "sandboxed", False) for blueprint in self._blueprints.values()):
            facts["sandbox"] = best_isolation().describe()
        return Ready(self.config.environments.max_sessions, facts, sorted(self._only))

    def _chat_template(self, folder: Path) -> ChatTemplate | None:
        """The model's; ``ConfigError`` when a task or the config wants one and there is none to use."""
        file = self.config.model.chat_template
        wanted = [f"task {task.name}: chat" for task in self._tasks_of.values() if task.chat]
        if file is not None:
            wanted.insert(0, "model.chat_template")
        try:
            return ChatTemplate(folder, Path(file) if file is not None else None)
        except (OSError, ValueError) as error:
            if wanted:
                raise ConfigError(f"{wanted[0]}: {error}") from None
            return None  # said when an environment speaks in messages

    async def serve(self, message: ToWorker, payload: Sequence[bytes]) -> Message | None:
        """Carry out a request of the environment protocol."""
        match message:
            case Step():
                return await self._step(message)
            case Reset():
                return await self._reset(message)
            case Play():
                return await self._play(message)
            case Close(session=name):
                session = self._sessions.get(name)
                if session is not None:
                    self._drop(session)
                return None
        raise Deterministic(
            f"an environment worker serves Reset, Step, Close and Play, not {type(message).__name__}"
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
        self._end_metering()

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
        task = self._tasks_of[request.task]
        session = self._sessions[request.session] = _Session(
            request.session,
            request.task,
            blueprint,
            Conversation(self._renderer, self._template, chat=task.chat),
            Tally(int(self.config.environments.max_output_mib * 2**20)),
        )

        def call() -> Any:
            environment = session.environment = blueprint.build()
            if blueprint.rows is None:
                return environment.reset(request.seed, request.split)
            row = blueprint.rows.row(request.split, request.seed)
            return environment.reset(request.seed, request.split, row=row)

        def render(answer: object) -> Observation:
            first = check_first(answer, self._context_tokens)
            ids = session.conversation.begin(first, getattr(session.environment, "tools", ()))
            if not ids:
                raise WrongAnswer("returned an empty text; the policy needs a token to go on")
            return self._told(session, Observation(request.seq, ids, 0.0, False, {}), first)

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
            return session.environment.step(Action(self._renderer.answer(request.action)))

        def render(answer: object) -> Observation:
            turn = check_turn(answer, self._context_tokens)
            ids = session.conversation.follow(request.action, turn.seen, done=turn.done)
            seen = Observation(request.seq, ids, turn.reward, turn.done, turn.info)
            return self._told(session, seen, turn.seen, request.action)

        return await self._act(session, request.seq, "step", call, render)

    async def _play(self, request: Play) -> Message:
        """Let an agent play; cancelling the task ends it."""
        try:
            return await self._agents.play(request)
        except BaseException as error:  # the boundary of an agent's code, which may even call sys.exit
            if _cancelled(error):
                raise
            return self._failed(request.seq, f"task {request.task}: the agent", error)

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
                with counting(session.output):
                    answer = render(await call())
                session.output.check()
            else:
                answer = await self._threads.run(
                    lambda: self._watched(session, lambda: render(call())), lambda: self._release(session)
                )
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
        self,
        session: _Session,
        seen: Observation,
        shown: str | list[ChatMessage],
        action: bytes | None = None,
    ) -> Observation:
        """``seen`` with its texts, where a reward function reads them."""
        if not self._tasks_of[session.task].rewards:
            return seen
        reference = getattr(session.environment, "reference", "")
        if not isinstance(reference, str):
            raise WrongAnswer(f"left a reference that is a {type(reference).__name__}; it must be a str")
        seen.text, seen.reference = text_of(shown), reference
        seen.answer = "" if action is None else self._renderer.answer(action)
        return seen

    def _watched(self, session: _Session, call: Callable[[], Observation]) -> Observation:
        """``call()``, in a thread; what it prints and which processes it starts are the session's."""
        try:
            with counting(session.output):
                answer = call()
        finally:
            started = children_of_this_thread()
            if started:
                session.children |= started
        session.output.check()
        return answer

    @property
    def _context_tokens(self) -> int:
        return self.config.inference.max_model_len

    # --- failures -------------------------------------------------------------------------------------

    def _unable(self, seq: int, why: str) -> Failure:
        return Failure(seq, FailureKind.INFRASTRUCTURE, f"{self.name} can't: {why}")

    def _failed(self, seq: int, where: str, error: BaseException) -> Failure:
        if isinstance(error, WrongAnswer | TemplateFault | TooMuchOutput):
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
        if environment is None or self._threads is None:
            return
        if session.blueprint.closes or session.children:
            task = asyncio.get_running_loop().create_task(self._close_environment(session, environment))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_environment(self, session: _Session, environment: Any) -> None:
        assert self._threads is not None  # since _dispose
        try:
            if session.blueprint.closes:
                await self._call_close(session, environment)
        except BaseException as error:  # the boundary of an environment's code
            if _cancelled(error):
                raise
            logger.warning("%s.close failed: %s", session.blueprint.name, cause(error), exc_info=error)
        finally:
            if session.children and self._threads is not None:
                await self._threads.run(lambda: end_trees(session.children), lambda: None)

    async def _call_close(self, session: _Session, environment: Any) -> None:
        assert self._threads is not None  # since _dispose
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            with counting(session.output):
                if session.blueprint.close_is_async:
                    await environment.close()
                    return
            await self._threads.run(environment.close, lambda: None)


def _cancelled(error: BaseException) -> bool:
    """The running task was cancelled or thrown away; not: an environment raised ``CancelledError`` by itself."""
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0
