"""What a policy answered, as an environment gets it: a text that knows the tool calls in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Action", "ToolCall"]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    """What makes it no call, for the policy to read; empty when it is one."""


class Action(str):
    """The text of an answer, without special tokens."""

    __slots__ = ()

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in it, in order: JSON with ``name`` and ``arguments`` in ``<tool_call>`` tags, as Qwen's and
        Hermes' chat templates ask for it."""
        return [_call(match[1].strip()) for match in _CALL.finditer(self)]


def _call(text: str) -> ToolCall:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"a tool call must be JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return ToolCall("", {}, 'a tool call must be {"name": …, "arguments": {…}}')
    arguments = said.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(said["name"], {}, "a tool call's arguments must be a JSON object")
    return ToolCall(said["name"], arguments)
