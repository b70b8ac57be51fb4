"""What the policy of one episode is shown, as token ids: plain text, or messages by the model's chat template.

Tokens in, tokens out.  An observation's ids extend what the policy has seen; nothing before them is tokenised
again.  With a chat template that means: the text that it renders for the conversation so far must be the beginning of
what it renders with another answer and observation; the rest of it (the end of the policy's turn included, where
the policy did not sample it) is what the observation adds.  A template that rewrites what came before is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.environments.chat_template import ChatTemplate, TemplateFault
from rollart.environments.environment import ChatMessage
from rollart.environments.rendering import PlainRenderer
from rollart.packing import ID_BYTES, pack_ids

__all__ = ["Conversation"]

STAND_IN = "An answer."
"""In the place of what the policy said, whose ids are known already."""
SHOWN = 40
"""Characters of a template's text in an error."""


class Conversation:
    """One episode's."""

    def __init__(self, renderer: PlainRenderer, template: ChatTemplate | None, *, chat: bool) -> None:
        """With ``chat`` a text is a user's message; ``template`` is ``None`` where the model has none."""
        self._renderer = renderer
        self._template = template
        self._in_messages = chat
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._messages: list[ChatMessage] = []
        self._shown = ""

    def begin(self, first: str | Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """int32 ids of the first observation; ``TemplateFault`` when it can't be rendered."""
        if isinstance(first, str) and not self._in_messages:
            return self._renderer.first(first)
        self._in_messages, self._tools = True, tools
        self._messages = _as_messages(first)
        self._shown = self._rendered(self._messages)
        assert self._template is not None  # since _rendered
        return pack_ids(self._template.encode(self._shown))

    def follow(self, answer: bytes, observation: str | Sequence[ChatMessage], *, done: bool = False) -> bytes:
        """int32 ids of an observation after the policy's ``answer`` (int32 ids); errors as of ``begin``.

        Nothing follows an observation that ends the episode, so no template need render it.
        """
        if not self._in_messages:
            if not isinstance(observation, str):
                raise TemplateFault("an episode that began with a text goes on with texts, not with messages")
            return self._renderer.next(observation)
        if done:
            return b""
        messages = [
            *self._messages,
            {"role": "assistant", "content": STAND_IN},
            *_as_messages(observation),
        ]
        shown = self._rendered(messages)
        before = self._shown + STAND_IN
        if not shown.startswith(before):
            raise TemplateFault(self._rewrites(before, shown))
        assert self._template is not None  # since _rendered
        ids = self._template.encode(shown[len(before) :])
        self._messages, self._shown = messages, shown
        if ids and self._template.is_control(ids[0]) and answer[-ID_BYTES:] == pack_ids(ids[:1]):
            del ids[0]  # the policy ended its turn itself
        return pack_ids(ids)

    def _rendered(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            raise TemplateFault(
                "it speaks in messages, but the model's folder has no chat template: name a Jinja file as "
                "model.chat_template, or use a model that was trained to chat"
            )
        return self._template.render(messages, self._tools)

    def _rewrites(self, before: str, shown: str) -> str:
        assert self._template is not None
        at = next((i for i, (a, b) in enumerate(zip(before, shown, strict=False)) if a != b), len(shown))
        return (
            f"the chat template of {self._template.origin} changes what the policy has seen already: where it had "
            f"{before[at : at + SHOWN]!r} it has {shown[at : at + SHOWN]!r} once the conversation goes on. Tokens that "
            "were sampled are never replaced, so name a template that only appends as model.chat_template"
        )


def _as_messages(observation: str | Sequence[ChatMessage]) -> list[ChatMessage]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)
