"""A call: the body of a request, checked and in one normal form.  No I/O."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from rollart.config import Config
from rollart.controller.trajectory import Kind
from rollart.endpoint.errors import ApiError, bad_request
from rollart.endpoint.parameters import refuse_unknown

__all__ = ["Call", "Message", "canonical", "parse_call"]

Message = dict[str, Any]
"""What a chat template reads: ``role``, ``content`` (a str), and where they are not empty ``tool_calls`` (arguments as
an object), ``tool_call_id``, ``name``, ``reasoning_content``."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_STOPS = 16
_MESSAGE_KEYS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "refusal"}
)
_TRANSPORT = ("stream", "stream_options")
"""They say how the answer travels: a retry may ask for it another way."""


class Call(msgspec.Struct, frozen=True):
    """One turn that is asked for; ``messages`` for a chat, else ``prompt``, a text or token ids."""

    identity: bytes
    """Equal for equal requests."""
    model: str
    messages: list[Message]
    prompt: str | list[int] | None
    tools: list[dict[str, Any]]
    parses_tools: bool
    template_options: dict[str, Any]
    max_tokens: int | None
    stop: list[str]
    logprobs: bool
    stream: bool
    include_usage: bool

    @property
    def is_chat(self) -> bool:
        """It came to /v1/chat/completions."""
        return self.prompt is None


def parse_call(
    raw: bytes, config: Config, kind: Kind, *, chat: bool, most_tokens: int, task: str | None = None
) -> Call:
    """The call in a request's body; ``ApiError`` (400, 404) that names what of it is wrong.

    ``most_tokens`` is what the trajectory's answers may have; ``task`` is its task, for settings of its own.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(None, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(None, "the body must be a JSON object")
    refuse_unknown(body)
    _check_model(body.get("model"), config.endpoint.model)
    sampling = config.sampling if task is None else config.sampling_of(config.task(task))
    _check_temperature(body.get("temperature"), sampling.temperature, kind)
    wanted = {"messages": chat, "prompt": not chat, "tools": chat, "tool_choice": chat}
    for name, belongs in wanted.items():
        if not belongs and body.get(name) is not None:
            raise bad_request(name, f"{name} belongs to {'the other endpoint'}")
    stream = _flag(body, "stream")
    tools = _tools(body.get("tools"))
    return Call(
        identity=_identity(body, chat=chat),
        model=config.endpoint.model,
        messages=_messages(body.get("messages")) if chat else [],
        prompt=None if chat else _prompt(body.get("prompt")),
        tools=tools,
        parses_tools=bool(tools) and _tool_choice(body.get("tool_choice")) != "none",
        template_options=_template_options(body.get("chat_template_kwargs"), chat=chat),
        max_tokens=_max_tokens(body, most_tokens),
        stop=_stop(body.get("stop")),
        logprobs=_logprobs(body.get("logprobs"), chat=chat),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream=stream),
    )


def canonical(value: object) -> bytes:
    """One text for equal JSON values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def _identity(body: Mapping[str, Any], *, chat: bool) -> bytes:
    said = {name: value for name, value in body.items() if name not in _TRANSPORT and value is not None}
    return hashlib.blake2b(canonical([chat, said]), digest_size=16).digest()


def _check_model(model: object, served: str) -> None:
    if model != served:
        raise ApiError(
            404,
            f"the model {model!r} does not exist; this run serves {served!r} (endpoint.model)",
            code="model_not_found",
            param="model",
        )


def _check_temperature(wanted: object, temperature: float, kind: Kind) -> None:
    if wanted is None:
        return
    if not isinstance(wanted, int | float) or isinstance(wanted, bool):
        raise bad_request("temperature", "temperature must be a number")
    if abs(wanted - temperature) < 1e-9 or (wanted == 0 and kind is Kind.EVAL):
        return
    raise bad_request(
        "temperature",
        f"temperature {wanted:g} is not supported: the trainer applies the run's sampling.temperature, "
        f"{temperature:g}, to every token. Leave it out, or set the run's to what the agent asks for",
        code="unsupported_value",
    )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(name, f"{name} must be true or false")
    return bool(value)


def _max_tokens(body: Mapping[str, Any], most: int) -> int | None:
    found: int | None = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(name, f"{name} must be a whole number of at least 1")
        if value > most:
            raise bad_request(
                name,
                f"{name} {value} is above the run's sampling.max_tokens, {most}: ask for less, or raise that",
                code="unsupported_value",
            )
        if found not in (None, value):
            raise bad_request(name, "max_tokens and max_completion_tokens contradict one another")
        found = value
    return found


def _stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise bad_request("stop", "stop must be a text or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise bad_request("stop", f"stop has {len(stops)} texts; {MAX_STOPS} are the most")
    return stops


def _logprobs(value: object, *, chat: bool) -> bool:
    if value is None or value is False:
        return False
    if value is True and chat:
        return True
    if not chat and isinstance(value, int) and not isinstance(value, bool):
        if value == 0:
            return True
        raise bad_request(
            "logprobs",
            f"logprobs {value} is not supported: the engine reports the log-probability of the sampled token only, "
            "which logprobs: 0 asks for",
            code="unsupported_value",
        )
    raise bad_request("logprobs", f"logprobs must be {'true or false' if chat else '0'}")


def _include_usage(options: object, *, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options", "stream_options is for stream: true")
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise bad_request("stream_options", "stream_options may hold include_usage only")
    return bool(options.get("include_usage"))


def _template_options(options: object, *, chat: bool) -> dict[str, Any]:
    if options is None:
        return {}
    if not chat or not isinstance(options, dict):
        raise bad_request("chat_template_kwargs", "chat_template_kwargs must be an object, and of a chat")
    taken = {"messages", "tools", "documents", "add_generation_prompt"} & set(options)
    if taken:
        raise bad_request("chat_template_kwargs", f"chat_template_kwargs can't set {min(taken)}")
    return options


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt):
        return prompt
    raise bad_request(
        "prompt", "prompt must be one text or one list of token ids: a call is one turn of the trajectory"
    )


def _tool_choice(choice: object) -> str:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    raise bad_request(
        "tool_choice",
        f"tool_choice {json.dumps(choice)} is not supported: the trainer does not know the grammar's state at each "
        "token; auto and none are",
        code="unsupported_value",
    )


def _tools(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad_request("tools", "tools must be a list")
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise bad_request(where, f'{where} must be {{"type": "function", "function": {{…}}}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(where, f"{where}.function needs a name")
        if function.get("strict"):
            raise bad_request(
                f"{where}.function.strict",
                "strict is not supported: the trainer does not know the grammar's state at each token",
                code="unsupported_value",
            )
    return tools


def _messages(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "messages must be a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise bad_request(where, f"{where} must be an object whose role is one of {', '.join(ROLES)}")
    for name, value in message.items():
        if name not in _MESSAGE_KEYS and value not in (None, [], {}, ""):
            raise bad_request(
                f"{where}.{name}", f"{where}.{name} is not supported: chat templates don't render it"
            )
    normal: Message = {"role": ROLES[message["role"]], "content": _content(message.get("content"), where)}
    calls = [
        _tool_call(call, f"{where}.tool_calls[{number}]")
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    if calls:
        normal["tool_calls"] = calls
    for name in ("tool_call_id", "name", "reasoning_content"):
        if message.get(name):
            normal[name] = message[name]
    return normal


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else (content,):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.content", f"{where}.content must be a text, or parts of type text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise bad_request(where, f"{where} must be an object with a function, which has a name and arguments")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a template renders a text as it is
            arguments = json.loads(arguments)
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
