"""Between text and token ids, with the tokenizer of a Hugging Face folder: what is raw, and has no chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rollart.packing import unpack_ids

__all__ = ["Text"]


class Text:
    """One tokenizer; for one thread."""

    def __init__(self, folder: Path) -> None:
        """``FileNotFoundError`` or ``ValueError`` when the folder has no usable tokenizer."""
        from rollart.environments.rendering import PlainRenderer

        self.begin = unpack_ids(PlainRenderer(folder).first(""))
        """Ids that precede a text which begins a sequence."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in ``text`` are what they are."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token(self, id: int) -> str:
        """One token's text, special or not."""
        return str(self._tokenizer.decode([id], skip_special_tokens=False))

    def is_special(self, id: int) -> bool:
        """Whether it is control, and no text."""
        return id in self._special
