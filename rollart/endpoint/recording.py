"""Recording: which sequence a call continues, and the token ids that its prompt adds there.  No I/O.

The ids of an answer are those that the engine sampled, for ever: text is never tokenised again to find them.  A
conversation that extends a recorded one continues from its ids; only what is new becomes ids.  Invariants:

* an answered call is a ``_Mark`` at the end of its sequence, and no sequence is changed before its last mark;
* a call that continues from an earlier mark is a new sequence: what it shares with the other is context there, so each
  sampled token is trained once;
* where the chat template renders earlier messages differently once others follow (it drops the reasoning of earlier
  turns, say), ids can't continue: the call is a new sequence with the template's own rendering, and counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from rollart.endpoint.calls import Call, Message, canonical
from rollart.endpoint.errors import bad_request
from rollart.endpoint.text import Text
from rollart.environments.chat_template import ChatTemplate, TemplateFault
from rollart.packing import ID_BYTES, pack_ids, unpack_ids

__all__ = ["Prompt", "Recording"]

SENTINEL = "\ufdd2answer\ufdd2"
"""Stands for an answer, to find what a template puts after one."""


class _Beginning(msgspec.Struct, frozen=True):
    """A text that others may begin with; the texts of all turns of a long conversation would be too large to keep."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> _Beginning:
        """``text``, to be recognised."""
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        """Whether ``text`` begins with it."""
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Mark(msgspec.Struct, frozen=True):
    """The end of an answer."""

    sequence: int
    tokens: int
    """Of the sequence, up to here."""
    said: _Beginning
    """What was rendered for the call; of a completion, its answer included."""


class Prompt(msgspec.Struct, frozen=True):
    """What a call puts before its answer."""

    sequence: int
    ids: bytes
    """int32, to append to the sequence; all of it where the sequence is new."""
    tokens: int
    """Of the whole prompt."""
    text: str


class Recording:
    """The conversations of one trajectory."""

    def __init__(
        self,
        text: Text,
        template: ChatTemplate | None,
        ids_of: Callable[[int], bytes | bytearray],
        counts: Counter[str],
    ) -> None:
        """``ids_of(sequence)`` are the int32 ids recorded so far; in ``counts`` is told what went another way."""
        self._text = text
        self._template = template
        self._ids_of = ids_of
        self._counts = counts
        self._marks: dict[bytes, _Mark] = {}
        """By the conversation that ends with the answer."""
        self._completions: list[_Mark] = []
        self._tips: list[int] = []
        """For each sequence, the tokens up to its last mark."""

    # --- a call ---------------------------------------------------------------------------------------

    def prompt(self, call: Call) -> Prompt:
        """What ``call`` puts before its answer; ``ApiError`` (400) when it can't be rendered.  Changes nothing
        but ``counts``."""
        if call.prompt is None:
            return self._chat(call)
        if isinstance(call.prompt, str):
            return self._completion(call.prompt)
        return self._given_ids(call.prompt)

    def answered(self, call: Call, prompt: Prompt, message: Message, tokens: int, raw: str) -> None:
        """``call``'s answer is recorded: its sequence has ``tokens`` tokens now.

        ``message`` is what the agent was given, ``raw`` the whole sampled text.
        """
        if prompt.sequence == len(self._tips):
            self._tips.append(0)
        self._tips[prompt.sequence] = tokens
        if call.is_chat:
            key = _keys(call, [*call.messages, message])[-1]
            self._marks[key] = _Mark(prompt.sequence, tokens, _Beginning.of(prompt.text))
        else:
            self._completions.append(_Mark(prompt.sequence, tokens, _Beginning.of(prompt.text + raw)))

    # --- chats ----------------------------------------------------------------------------------------

    def _chat(self, call: Call) -> Prompt:
        if self._template is None:
            raise bad_request(
                "messages", "the model's folder has no chat template; /v1/completions needs none"
            )
        text = self._render(call, call.messages, asks=True)
        keys = _keys(call, call.messages)
        for count in range(len(keys) - 1, 0, -1):
            mark = self._marks.get(keys[count - 1])
            if mark is not None:
                ids = self._added(call, count, mark, text)
                if ids is not None:
                    return self._after(mark, ids, text)
                self._counts["calls_rendered_anew"] += 1
                break
        return self._anew(self._template.encode(text), text)

    def _added(self, call: Call, count: int, mark: _Mark, text: str) -> list[int] | None:
        """Ids that follow the answer at ``mark``, which ends the first ``count`` messages; ``None`` where the
        template doesn't render those as a prefix of ``text``."""
        assert self._template is not None
        earlier = self._render(call, call.messages[:count], asks=False)
        if not mark.said.begins(earlier) or not text.startswith(earlier):
            return None
        answer: Message = {"role": "assistant", "content": SENTINEL}
        end = self._render(call, [*call.messages[: count - 1], answer], asks=False).rpartition(SENTINEL)[2]
        if not earlier.endswith(end) or len(end) >= len(earlier):
            return None
        # Together: a tokenizer may treat a text's first characters differently.
        ids = self._template.encode(end + text[len(earlier) :])
        return ids[1:] if ids and ids[0] == self._last(mark) else ids

    def _render(self, call: Call, messages: Sequence[Message], *, asks: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(messages, call.tools, call.template_options, asks=asks)
        except TemplateFault as error:
            raise bad_request("messages", str(error)) from None

    def _last(self, mark: _Mark) -> int:
        """The id at ``mark`` where it is control, such as the token that ends an answer; else -1."""
        at = mark.tokens * ID_BYTES
        (id,) = unpack_ids(self._ids_of(mark.sequence)[at - ID_BYTES : at])
        return id if self._text.is_special(id) else -1

    # --- completions ----------------------------------------------------------------------------------

    def _completion(self, text: str) -> Prompt:
        """A completion's text is the whole prompt: special tokens in it are what they are."""
        for mark in sorted(self._completions, key=lambda mark: mark.said.length, reverse=True):
            if not mark.said.begins(text):
                continue
            ids = self._text.encode(text[mark.said.length :])
            last = self._last(mark)
            if last < 0:
                return self._after(mark, ids, text)
            if ids[:1] == [last]:  # the answer ended with control, and the agent says so too
                return self._after(mark, ids[1:], text)
        ids = self._text.encode(text)
        begin = self._text.begin
        return self._anew(ids if ids[: len(begin)] == begin else [*begin, *ids], text)

    def _given_ids(self, ids: list[int]) -> Prompt:
        try:
            packed = pack_ids(ids)
        except OverflowError:
            raise bad_request("prompt", f"prompt holds {max(ids)}, which is no token id") from None
        text = self._text.decode(ids)
        for sequence, tokens in enumerate(self._tips):
            recorded = bytes(self._ids_of(sequence)[: tokens * ID_BYTES])
            if len(recorded) < len(packed) and packed.startswith(recorded):
                return self._after(_Mark(sequence, tokens, _Beginning.of(text)), ids[tokens:], text)
        return self._anew(ids, text)

    # --- sequences ------------------------------------------------------------------------------------

    def _after(self, mark: _Mark, ids: list[int], text: str) -> Prompt:
        added = pack_ids(ids)
        if mark.tokens == self._tips[mark.sequence]:
            return Prompt(mark.sequence, added, mark.tokens + len(ids), text)
        self._counts["calls_branched"] += 1
        shared = bytes(self._ids_of(mark.sequence)[: mark.tokens * ID_BYTES])
        return Prompt(len(self._tips), shared + added, mark.tokens + len(ids), text)

    def _anew(self, ids: list[int], text: str) -> Prompt:
        if not ids:
            raise bad_request(None, "the prompt has no token; the policy needs one to go on")
        if self._tips:
            self._counts["conversations_begun"] += 1
        return Prompt(len(self._tips), pack_ids(ids), len(ids), text)


def _keys(call: Call, messages: Sequence[Message]) -> list[bytes]:
    """A digest of each beginning of the conversation; equal ones mean the same to a template."""
    state = hashlib.blake2b(canonical([call.tools, call.template_options]), digest_size=16)
    keys = []
    for message in messages:
        state.update(canonical(_meaning(message)))
        keys.append(state.digest())
    return keys


def _meaning(message: Message) -> Message:
    """``message`` without what agents don't always give back: space around an answer, the ids of its tool calls."""
    if message["role"] != "assistant":
        return message
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"].strip(), "tool_calls": calls}
