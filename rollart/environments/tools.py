"""Tools as methods: an environment whose policy calls functions.

A method marked with ``tool`` is one; its signature and docstring make the JSON schema that the chat template shows
to the policy.  An environment of one's own::

    class Clock(ToolEnvironment):
        def reset(self, seed, split):
            self.hour = seed % 24
            return [{"role": "user", "content": "What time is it? Answer with the hour."}]

        @tool
        def look(self) -> str:
            "What the clock shows."
            return f"{self.hour}:00"

        def answer(self, action):
            return Turn(reward=float(str(self.hour) in action), done=True)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollart.environments.action import Action, ToolCall
from rollart.environments.environment import ChatMessage, Environment, Turn

__all__ = ["ToolEnvironment", "tool"]

F = TypeVar("F", bound=Callable[..., object])
JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
"""Of Python's names; what is not here is a string."""


def tool(method: F) -> F:
    """Mark a method of a ``ToolEnvironment`` as one that the policy may call; it returns what the policy sees."""
    method.is_tool = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(Environment):
    """Carries out tool calls; an answer without any goes to ``answer``."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """The schemas of the marked methods."""
        return [_schema(name, method) for name, method in sorted(self._tools().items())]

    def _tools(self) -> dict[str, Callable[..., object]]:
        marked = (n for n in dir(type(self)) if getattr(getattr(type(self), n, None), "is_tool", False))
        return {name: getattr(self, name) for name in marked}

    def step(self, action: str) -> Turn:
        """Carry out the calls in ``action`` and show their results, each in a message of role ``tool``."""
        calls = Action(action).tool_calls
        if not calls:
            return self.answer(action)
        return Turn(messages=[self._carry_out(call) for call in calls])

    def answer(self, action: str) -> Turn:
        """The policy answered without calling a tool."""
        raise NotImplementedError

    def _carry_out(self, call: ToolCall) -> ChatMessage:
        return {"role": "tool", "name": call.name, "content": self._result(call)}

    def _result(self, call: ToolCall) -> str:
        """What the policy sees of a call; its own mistakes are told to it and cost nothing else."""
        if call.error:
            return f"error: {call.error}"
        tools = self._tools()
        if call.name not in tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(sorted(tools))}"
        method = tools[call.name]
        try:
            inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}"
        return str(method(**call.arguments))


def _schema(name: str, method: Callable[..., object]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    properties = {parameter.name: {"type": _json_type(parameter.annotation)} for parameter in parameters}
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.getdoc(method) or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _json_type(annotation: object) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return JSON_TYPES.get(name.partition("[")[0], "string")
