"""Answers: from what the engine sampled to OpenAI's objects, whole or as a stream of events.  No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from rollart.endpoint.calls import Call, Message
from rollart.endpoint.text import Text
from rollart.endpoint.tool_calls import parse_tool_calls
from rollart.packing import ID_BYTES, unpack_floats, unpack_ids
from rollart.protocol import Generated, VersionRun

__all__ = ["Completion", "cut_at_stop", "read_answer"]

DONE = b"data: [DONE]\n\n"


def cut_at_stop(generated: Generated, stops: Sequence[str], text: Text) -> tuple[Generated, str, str]:
    """``generated`` up to the token that completes the first stop text; its whole text; the text before the stop.

    Cutting a sample where a rule that looks back only says so is the same as having stopped there: the tokens that
    are left have the distribution and the log-probabilities that they were sampled with.
    """
    ids = unpack_ids(generated.ids)
    whole = text.decode(ids)
    if not any(stop in whole for stop in stops):
        return generated, whole, whole
    low, high = 1, len(ids)  # the stop is in the first ``high`` tokens
    while low < high:
        middle = (low + high) // 2
        said = text.decode(ids[:middle])
        if any(stop in said for stop in stops):
            high = middle
        else:
            low = middle + 1
    whole = text.decode(ids[:high])
    begins = min(whole.find(stop) for stop in stops if stop in whole)
    size = high * ID_BYTES
    kept = msgspec.structs.replace(
        generated,
        ids=generated.ids[:size],
        logprobs=generated.logprobs[:size],
        versions=_first_runs(generated.versions, high),
        finish_reason="stop",
    )
    return kept, whole, whole[:begins]


def _first_runs(runs: Sequence[VersionRun], count: int) -> list[VersionRun]:
    """The runs over the first ``count`` tokens."""
    ends = accumulate((run.count for run in runs), initial=0)
    return [
        VersionRun(run.version, min(run.count, count - begins))
        for run, begins in zip(runs, ends, strict=False)
        if begins < count
    ]


class Completion(msgspec.Struct, frozen=True):
    """A call's answer, as it is stored: a retry is given the same."""

    id: str
    created: int
    model: str
    is_chat: bool
    content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int

    @property
    def message(self) -> Message:
        """The answer in the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": msgspec.json.decode(call["function"]["arguments"]),
                    },
                }
                for call in self.tool_calls
            ]
        return message

    def body(self, call: Call, text: Text) -> dict[str, Any]:
        """The JSON answer to a request that doesn't stream."""
        logprobs = self._logprobs(text) if call.logprobs else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": logprobs}
        if self.is_chat:
            choice["message"] = {
                "role": "assistant",
                "content": None if self.tool_calls and not self.content else self.content,
                "refusal": None,
                **({"tool_calls": self.tool_calls} if self.tool_calls else {}),
            }
        else:
            choice["text"] = self.content
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage}

    def events(self, call: Call, text: Text) -> Iterator[bytes]:
        """The server-sent events of a request that streams.

        The policy's answer is whole before the first of them: what it says is recorded already.
        """
        logprobs = self._logprobs(text) if call.logprobs else None
        if self.is_chat:
            delta: dict[str, Any] = {"role": "assistant", "content": self.content}
            if self.tool_calls:
                delta["tool_calls"] = [{"index": n, **each} for n, each in enumerate(self.tool_calls)]
            yield self._event(call, {"delta": delta, "logprobs": logprobs, "finish_reason": None})
            yield self._event(call, {"delta": {}, "logprobs": None, "finish_reason": self.finish_reason})
        else:
            yield self._event(
                call, {"text": self.content, "logprobs": logprobs, "finish_reason": self.finish_reason}
            )
        if call.include_usage:
            yield _sse({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage})
        yield DONE

    def _event(self, call: Call, choice: dict[str, Any]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if call.include_usage else {}
        return _sse({**self._head("chat.completion.chunk"), "choices": [{"index": 0, **choice}], **usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "total_tokens": self.prompt_tokens + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _logprobs(self, text: Text) -> dict[str, Any]:
        tokens = [text.token(id) for id in self.ids]
        # A greedy answer's distribution has all its mass on one token.
        logprobs = self.logprobs or [0.0] * len(tokens)
        if not self.is_chat:
            offsets = list(accumulate((len(token) for token in tokens), initial=0))[:-1]
            return {
                "tokens": tokens,
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": offsets,
            }
        return {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, logprobs, strict=True)
            ],
            "refusal": None,
        }


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def read_answer(
    call: Call, generated: Generated, content: str, *, turn: str, prompt_tokens: int, created: int
) -> Completion:
    """The completion of ``generated``, whose text up to a stop is ``content``; ``turn`` names it in the run."""
    tool_calls: list[dict[str, Any]] = []
    if call.parses_tools:
        content, tool_calls = parse_tool_calls(content, f"call_{turn}_")
    return Completion(
        id=f"{'chatcmpl' if call.is_chat else 'cmpl'}-{turn}",
        created=created,
        model=call.model,
        is_chat=call.is_chat,
        content=content,
        tool_calls=tool_calls,
        finish_reason="tool_calls" if tool_calls else generated.finish_reason,
        ids=unpack_ids(generated.ids),
        logprobs=unpack_floats(generated.logprobs),
        prompt_tokens=prompt_tokens,
        cached_tokens=generated.cached_tokens,
    )
