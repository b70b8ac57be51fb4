"""Which split an instance of a task belongs to: a stable hash of what the policy sees, never of a seed.

Seeds of training and evaluation may collide and different seeds may draw equal instances; an instance's own
text can be in one split only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

__all__ = ["EVAL_SHARE", "SPLITS", "draw", "share_of", "split_of"]

SPLITS = ("train", "eval")
EVAL_SHARE = 0.2
"""Of all instances, the share that is held out for evaluation."""
MAX_DRAWS = 10_000


def split_of(instance: str) -> str:
    """The split of the instance that ``instance`` describes; the same on every machine."""
    return "eval" if share_of(instance) < EVAL_SHARE else "train"


def share_of(instance: str) -> float:
    """Where ``instance`` stands between 0 and 1, by its hash."""
    digest = hashlib.blake2b(instance.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def draw(candidate: Callable[[random.Random], str | None], rng: random.Random, split: str) -> str:
    """The first instance of ``split`` that ``candidate`` draws with ``rng``; ``None`` is drawn again.

    ``ValueError`` for a split that is none, and when there seems to be no such instance.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; it must be {' or '.join(SPLITS)}")
    for _ in range(MAX_DRAWS):
        instance = candidate(rng)
        if instance is not None and split_of(instance) == split:
            return instance
    raise ValueError(
        f"{MAX_DRAWS} draws gave no instance of the {split} split: these options leave too few to choose from"
    )
