"""From an environment's texts to token ids and back.

The seam where chat templates belong.  This renderer passes text through as it is.  An environment's text is
never control: markup such as ``<eos>`` in it becomes ordinary tokens.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollart.packing import pack_ids, unpack_ids

__all__ = ["PlainRenderer"]

logger = logging.getLogger(__name__)


class PlainRenderer:
    """Renders with the tokenizer of a Hugging Face folder; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """``FileNotFoundError`` or ``ValueError`` when the folder has no usable tokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}: the model must be a Hugging Face folder")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises bare Exception for a malformed file
            raise ValueError(f"can't read the tokenizer {path}: {error}") from None
        self._prefix = _begin(folder, self._tokenizer)
        self._tokenizer.encode_special_tokens = True
        self._unknown = self._unknown_id()

    def first(self, text: str) -> bytes:
        """int32 ids of an episode's first observation.

        A beginning-of-sequence token precedes it where the folder's tokenizer_config.json sets
        ``add_bos_token``, or, where that is not set, where the tokenizer itself would put one.
        """
        return self._prefix + self.next(text)

    def next(self, text: str) -> bytes:
        """int32 ids of an observation that follows an answer."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._unknown in ids:
            self._warn(text)
        return pack_ids(ids)

    def answer(self, ids: bytes) -> str:
        """The text of sampled int32 ``ids``, without special tokens; ``ValueError`` when they are no ids."""
        unpacked = unpack_ids(ids)
        if any(id < 0 for id in unpacked):
            raise ValueError("the answer holds a negative token id")
        return str(self._tokenizer.decode(unpacked, skip_special_tokens=True))

    def _unknown_id(self) -> int | None:
        token = getattr(self._tokenizer.model, "unk_token", None)
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else None

    def _warn(self, text: str) -> None:
        self._unknown = None  # once is enough
        unknown = sorted({c for c in text if self._tokenizer.token_to_id(c) is None})
        logger.warning(
            "an observation has text that the tokenizer has no token for: the policy sees an unknown token there "
            "(characters without a token: %s)",
            " ".join(map(repr, unknown)) or "none",
        )


def _begin(folder: Path, tokenizer: Any) -> bytes:
    """The packed ids that precede an episode's first text."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    token = settings.get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    bos = tokenizer.token_to_id(token) if token else None
    wanted = settings.get("add_bos_token")
    if wanted is None:
        wanted = bos is not None and bos in tokenizer.encode("", add_special_tokens=True).ids[:1]
    if not wanted:
        return b""
    if bos is None:
        raise ValueError(f"{path} sets add_bos_token, but its bos_token {token!r} is not in the vocabulary")
    return pack_ids([bos])
