"""Environments of the ``verifiers`` library: ``environment: rollart.environments.adapters.verifiers:Verifiers``.

verifiers drives its rollouts itself: here it asks a client that is this episode's policy.  So its own stop
conditions, tools, rubrics and cleanups hold as they are; the prompts that it builds are shown to the policy
turn by turn, and must extend one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from rollart.environments.action import Action
from rollart.environments.environment import ChatMessage, Environment, Turn

__all__ = ["Verifiers"]


class Verifiers(Environment):
    """``id`` and ``arguments`` as ``verifiers.load_environment`` takes them; training rows are its dataset's,
    evaluations its evaluation dataset's."""

    def __init__(self, id: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._env = _loaded(id, tuple(sorted((arguments or {}).items())), id)
        self._policy: _Policy
        self._rollout: asyncio.Task[Any] | None = None
        self._seen: list[ChatMessage] = []

    async def reset(self, seed: int, split: str) -> Sequence[ChatMessage]:
        """Begin a rollout of the row that ``seed`` names."""
        rows = self._env.get_eval_dataset() if split == "eval" else self._env.get_dataset()
        self._policy = _Policy()
        row = rows[seed % len(rows)]
        columns = ["reward", "metrics", "error"]
        run = self._env.run_rollout(row, self._policy, "policy", {}, state_columns=columns)
        self._rollout = asyncio.get_running_loop().create_task(run)
        seen = await self._asked()
        if seen is None:
            raise RuntimeError("the rollout ended before it asked for an answer")
        self._seen = seen
        return seen

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """As the rollout names them."""
        return self._policy.tools

    async def step(self, action: str) -> Turn:
        """Answer, and go on to the next prompt or the rollout's score."""
        before = [*self._seen, {"role": "assistant"}]
        self._policy.answers.put_nowait(_response(action))
        seen = await self._asked()
        if seen is None:
            return self._scored()
        if len(seen) <= len(before) or seen[: len(self._seen)] != self._seen:
            raise RuntimeError(
                "the environment rewrote the conversation, and what was sampled can't be taken back"
            )
        self._seen = seen
        return Turn(messages=seen[len(before) :])

    async def close(self) -> None:
        """Stop the rollout; its cleanups run."""
        if self._rollout is not None:
            self._rollout.cancel()
            with contextlib.suppress(BaseException):
                await self._rollout

    async def _asked(self) -> list[ChatMessage] | None:
        """The next prompt; ``None`` when the rollout has ended."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._policy.prompts.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    def _scored(self) -> Turn:
        assert self._rollout is not None
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"the rollout failed: {output['error']}")
        metrics = output.get("metrics") or {}
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        reward = float(output["reward"] or 0.0)
        return Turn(reward=reward, done=True, info={**numbers, "success": float(reward >= 1)})


class _Policy(Client):  # type: ignore[misc]
    """What verifiers takes for a model's client."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[list[ChatMessage]] = asyncio.Queue()
        self.answers: asyncio.Queue[Response] = asyncio.Queue()
        self.tools: list[Mapping[str, Any]] = []

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Response:
        self.tools = [{"type": "function", "function": _plain(tool)} for tool in tools or ()]
        self.prompts.put_nowait([_plain(message) for message in prompt])
        return await self.answers.get()

    def setup_client(self, config: Any) -> None: ...
    async def to_native_tool(self, tool: Any) -> Any: ...
    async def to_native_prompt(self, messages: Any) -> Any: ...
    async def get_native_response(self, *_: Any, **__: Any) -> Any: ...
    async def raise_from_native_response(self, response: Any) -> None: ...
    async def from_native_response(self, response: Any) -> Any: ...
    async def close(self) -> None: ...


_environments: dict[tuple[Any, ...], Any] = {}


def _loaded(id: str, arguments: tuple[tuple[str, Any], ...], name: str) -> Any:
    """One environment of each kind a process: it holds the dataset, its rollouts hold their own state."""
    key = (id, repr(arguments))
    if key not in _environments:
        _environments[key] = verifiers.load_environment(id, **dict(arguments))
    return _environments[key]


def _plain(message: Any) -> dict[str, Any]:
    fields = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    return dict(fields)


def _response(text: str) -> Response:
    calls = [call for call in Action(text).tool_calls if not call.error]
    said = [
        ToolCall(id=f"call_{number}", name=call.name, arguments=_json(call.arguments))
        for number, call in enumerate(calls)
    ]
    message = ResponseMessage(
        content=str(text),
        tool_calls=said or None,
        finish_reason="tool_calls" if said else "stop",
        is_truncated=False,
    )
    return Response(id="0", created=int(time.time()), model="policy", message=message)


def _json(arguments: Mapping[str, Any]) -> str:
    import json

    return json.dumps(arguments)
