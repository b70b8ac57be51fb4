"""Tool calls in an answer's text: the format of Hermes and Qwen.

``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them.  The content is the text before the first.
An answer in which one of them is malformed is a plain text: the agent sees what the policy wrote.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["parse_tool_calls"]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def parse_tool_calls(text: str, prefix: str) -> tuple[str, list[dict[str, Any]]]:
    """The content and OpenAI's ``tool_calls``, whose ids begin with ``prefix``."""
    begins = text.find("<tool_call>")
    if begins < 0:
        return text, []
    calls = []
    for number, found in enumerate(_CALL.findall(text[begins:])):
        try:
            said = json.loads(found)
        except ValueError:
            return text, []
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return text, []
        arguments = said.get("arguments", {})
        if not isinstance(arguments, dict):
            return text, []
        function = {"name": said["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"{prefix}{number}", "type": "function", "function": function})
    return text[:begins].rstrip("\n"), calls
