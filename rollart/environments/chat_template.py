"""A model's chat template: messages to text, as ``transformers`` renders it, without importing it.

An environment's text is never control: where a message's content holds the text of a special token, such as
``<|im_end|>``, it becomes ordinary tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

from rollart.environments.environment import ChatMessage

__all__ = ["ChatTemplate", "TemplateFault"]

GUARD = "\ufdd0"
"""Stands in a special token's text while it is content; Unicode keeps this character for such inner use."""


class TemplateFault(Exception):
    """The template does not render these messages; the message says why, in a sentence."""


class ChatTemplate:
    """The template of a Hugging Face folder, or of a Jinja file of one's own; safe to use from several threads."""

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        """``FileNotFoundError`` when there is none, ``ValueError`` when it is broken."""
        settings = _settings(folder)
        source, self.origin = _source(folder, settings, file)
        self._template = _compiled(source, self.origin)
        self._variables = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        path = str(folder / "tokenizer.json")
        self._control, self._ordinary = Tokenizer.from_file(path), Tokenizer.from_file(path)
        self._ordinary.encode_special_tokens = True
        added = self._control.get_added_tokens_decoder()
        self._control_ids = frozenset(id for id, token in added.items() if token.special)
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        )
        guarded = "|".join(re.escape(_guard(text)) for text in special)
        self._guarded = re.compile(f"({guarded})" if guarded else r"((?!))")

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
    ) -> str:
        """The text up to where the policy's answer begins; ``TemplateFault`` when the template refuses.

        ``options`` are variables of the template's own; without ``asks`` the text ends with the last message.
        """
        safe = [_mapped(message, self._defuse) for message in messages]
        try:
            return str(
                self._template.render(
                    messages=safe, tools=_mapped(tools, self._defuse) or None, documents=None,
                    add_generation_prompt=asks, **{**self._variables, **(options or {})},
                )
            )  # fmt: skip
        except Exception as error:  # the boundary of a template, which is foreign code
            raise TemplateFault(f"the chat template of {self.origin} refuses the messages: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: the template's own special tokens are control, those in contents are not."""
        ids: list[int] = []
        for number, part in enumerate(self._guarded.split(text)):
            tokenizer = self._ordinary if number % 2 else self._control
            ids += tokenizer.encode(part.replace(GUARD, ""), add_special_tokens=False).ids if part else ()
        return ids

    def is_control(self, id: int) -> bool:
        """It is a special token's."""
        return id in self._control_ids

    def _defuse(self, text: str) -> str:
        return self._special.sub(lambda match: _guard(match[0]), text.replace(GUARD, ""))


def _guard(special: str) -> str:
    return f"{special[0]}{GUARD}{special[1:]}"


def _mapped(value: Any, change: Any) -> Any:
    """``value`` with every text in it changed, but for roles and the other names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k in ("role", "type") else _mapped(v, change) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(each, change) for each in value]
    return value


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _source(folder: Path, settings: Mapping[str, Any], file: Path | None) -> tuple[str, str]:
    """The template's text, and where it is from."""
    if file is not None:
        return file.read_text(encoding="utf-8"), str(file)
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8"), str(own)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    if not isinstance(found, str):
        raise FileNotFoundError(
            f"the model folder {folder} has no chat template, which messages need: "
            "name a Jinja file as model.chat_template, or use a model that was trained to chat"
        )
    return found, f"{folder}/tokenizer_config.json"


def _compiled(source: str, origin: str) -> Any:
    """With what ``transformers`` gives a template: its whitespace rules, filters and functions."""
    try:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("messages need the package jinja2, which is not installed here") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    # One time for the whole run: a prompt must not change under a conversation at midnight.
    environment.globals["strftime_now"] = datetime.now().strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {origin} is broken: {error}") from None


def _generation_tag() -> Any:
    """``{% generation %}`` marks what an assistant says, and renders as if it were not there."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
