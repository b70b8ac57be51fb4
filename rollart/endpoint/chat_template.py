"""A model's chat template, rendered as ``transformers`` renders it, without that package.

Templates come with the model and are code of others: they run in jinja2's sandbox, which has no way out to Python.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollart.endpoint.errors import bad_request

__all__ = ["ChatTemplate"]

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """``{% generation %}``, which marks answers for those who train on rendered text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The templates of a Hugging Face folder: ``default``, and ``tool_use`` where it has one of its own."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        """``special`` are the special tokens' texts, which templates know by name."""
        self._special = dict(special)
        # One day for the whole run: a prompt must not change under a conversation at midnight.
        self._now = datetime.datetime.now()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._now.strftime
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}

    @classmethod
    def of_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """The folder's, from ``chat_template.jinja`` or ``tokenizer_config.json``; ``None`` where it has none.

        ``file`` takes its place.  ``ValueError`` when a template is none of jinja2's.
        """
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        special = {name: text for name in SPECIAL if (text := _token(settings.get(name))) is not None}
        sources: dict[str, str] = {}
        found = settings.get("chat_template")
        if isinstance(found, str):
            sources["default"] = found
        elif isinstance(found, list):
            sources = {each["name"]: each["template"] for each in found}
        own = file or folder / "chat_template.jinja"
        if file is not None or own.is_file():
            sources["default"] = own.read_text(encoding="utf-8")
        if not sources:
            return None
        try:
            return cls(sources, special)
        except TemplateError as error:
            raise ValueError(f"the chat template of {folder} can't be read: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        asks: bool,
    ) -> str:
        """The conversation as text; ``asks`` adds what precedes the next answer.

        ``ApiError`` (400) when the template refuses the conversation.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        values = {**self._special, **options}
        try:
            return template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=asks,
                **values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise bad_request(
                "messages", f"the model's chat template refuses the conversation: {error}"
            ) from None


def _token(value: Any) -> str | None:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise TemplateError(message)
