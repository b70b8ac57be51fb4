"""Between text and token ids, with the tokenizer of a Hugging Face folder.

A caller's text is never control: what looks like a special token in it becomes ordinary tokens.  It is marked before
the chat template is rendered, so that the template's own special tokens stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollart.packing import unpack_ids

__all__ = ["Text"]

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Unicode's noncharacters, which no text has."""
_MARKED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")


class Text:
    """One tokenizer; for one thread."""

    def __init__(self, folder: Path) -> None:
        """``FileNotFoundError`` or ``ValueError`` when the folder has no usable tokenizer."""
        from rollart.environments.rendering import PlainRenderer

        self.begin = unpack_ids(PlainRenderer(folder).first(""))
        """Ids that precede a text which begins a sequence."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special: dict[int, str] = {id: token.content for id, token in added.items() if token.special}
        texts = sorted(filter(None, self._special.values()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None

    def protect(self, value: Any) -> Any:
        """``value``, a JSON value, with what looks like a special token in its texts marked as ordinary."""
        if isinstance(value, str):
            text = value.replace(OPEN, "").replace(CLOSE, "")
            return (
                self._control.sub(lambda found: f"{OPEN}{found[0]}{CLOSE}", text) if self._control else text
            )
        if isinstance(value, list):
            return [self.protect(each) for each in value]
        if isinstance(value, dict):
            return {name: self.protect(each) for name, each in value.items()}
        return value

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in ``text`` are what they are, but for those that are marked."""
        ids: list[int] = []
        for number, part in enumerate(_MARKED.split(text)):
            if part:
                self._tokenizer.encode_special_tokens = bool(number % 2)
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, id: int) -> str:
        """One token's text, special or not."""
        return str(self._tokenizer.decode([id], skip_special_tokens=False))

    def is_special(self, id: int) -> bool:
        """Whether it is control, and no text."""
        return id in self._special
