"""Agents: episodes that code which was not written for RollArt plays by itself, in an environment worker.

An agent that hangs costs its episode and nothing else: a function's thread is left to itself, and its calls are
refused from then on; a program's process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollart.config import Task
from rollart.environments.agent import Episode, Score
from rollart.environments.loading import load_agent
from rollart.environments.threads import Threads
from rollart.protocol import Play, Played

__all__ = ["AgentError", "Agents"]

KEPT_BYTES = 1 << 16
"""Of a program's output, its end."""


class AgentError(Exception):
    """An agent's answer is no score, or its program failed; the message is the whole story."""


class Agents:
    """The agents of a run's tasks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        """``ConfigError`` when an agent can't be loaded."""
        self._functions: dict[str, Callable[..., Any]] = {
            task.name: load_agent(task.name, task.agent) for task in tasks if task.agent is not None
        }
        self._commands = {task.name: task.agent_command for task in tasks if task.agent_command is not None}
        self._options = {task.name: task.options for task in tasks}

    @property
    def facts(self) -> dict[str, str]:
        """What plays each task, for people."""
        named = {name: getattr(found, "__name__", "agent") for name, found in self._functions.items()}
        return named | {name: command[0] for name, command in self._commands.items()}

    async def play(self, request: Play) -> Played:
        """Let the task's agent play to its end; whatever it raises passes.  Cancelling ends it."""
        episode = Episode(
            base_url=request.base_url,
            api_key=request.api_key,
            model=request.model,
            task=request.task,
            seed=request.seed,
            split=request.split,
            options=self._options[request.task],
        )
        command = self._commands.get(request.task)
        if command is not None:
            answer = _said(await _run(command, episode))
        else:
            answer = await _call(self._functions[request.task], episode)
        score = answer if isinstance(answer, Score) else Score(answer)
        info = {str(name): _number(value, f"info[{name!r}]") for name, value in score.info.items()}
        return Played(request.seq, _number(score.reward, "score"), info)


def _number(value: object, what: str) -> float:
    if not isinstance(value, float | int | numbers.Real) or not math.isfinite(value):
        raise AgentError(f"the agent's {what} is {value!r:.80}; it must be a finite number")
    return float(value)


# --- functions ----------------------------------------------------------------------------------------------


async def _call(function: Callable[..., Any], episode: Episode) -> Any:
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        return await function(episode)
    threads = Threads(1, "agent")
    try:
        return await threads.run(lambda: function(episode), lambda: None)
    finally:
        threads.stop()


# --- programs -----------------------------------------------------------------------------------------------


async def _run(command: Sequence[str], episode: Episode) -> bytes:
    """What the program wrote to its standard output, the end of it; ``AgentError`` when it failed."""
    own = {
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ROLLART_EPISODE": json.dumps({**asdict(episode), "options": dict(episode.options)}),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.launch.tethered", str(os.getpid()), "/usr/bin/env", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **own},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        said, complained = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # itself, or what it left behind
    if code:
        last = complained.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentError(f"{command[0]} ended with exit code {code}{': ' + last[0] if last else ''}")
    return said


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await stream.read(KEPT_BYTES):
        kept = (kept + chunk)[-KEPT_BYTES:]
    return kept


def _said(output: bytes) -> Any:
    """The score in a program's last line: a number, or an object with ``reward`` and perhaps ``info``."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        value = lines[-1]
    if isinstance(value, dict) and isinstance(value.get("info", {}), Mapping):
        return Score(value.get("reward"), value.get("info", {}))  # type: ignore[arg-type]  # checked with the rest
    return value
