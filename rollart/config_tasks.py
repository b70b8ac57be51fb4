"""Parts of a task's configuration: where its instances come from, and how its answers are sampled."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollart.config_section import PositiveInt, Section

__all__ = ["Dataset", "TaskSampling", "weight_at"]


class Dataset(Section, frozen=True, kw_only=True):
    """Rows that a task's instances are made of, each epoch in a new order, again and again.

    A path is a ``.jsonl`` or ``.parquet`` file, or a folder that Hugging Face's ``datasets`` saved; the last two need
    the package pyarrow.  A row reaches the environment as ``reset``'s third parameter, ``row``.
    """

    path: str
    eval_path: str | None = None
    """The rows of evaluations, which training never sees."""
    eval_share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Of the rows of ``path``, chosen by their content, where there is no ``eval_path``; by default 0.2."""
    shuffle: bool = True
    """Each epoch has an order of its own, by the run's seed; otherwise the file's."""

    def __post_init__(self) -> None:
        if self.eval_path is not None and self.eval_share is not None:
            raise ValueError("eval_share does nothing beside eval_path")


class TaskSampling(Section, frozen=True, kw_only=True):
    """What one task has otherwise than the run's ``sampling``; what is not set here is as there."""

    temperature: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    allowed_token_ids: list[int | str] | None = None
    max_tokens: PositiveInt | None = None
    stop_token_ids: list[int | str] | None = None
    ignore_eos: bool | None = None


def weight_at(curriculum: dict[int, float], step: int) -> float:
    """The weight at train_step ``step``: linear between the curriculum's steps, and constant outside them."""
    points = sorted(curriculum.items())
    before = points[0]
    for point in points:
        if step < point[0]:
            share = (step - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return before[1] + max(share, 0.0) * (point[1] - before[1])
        before = point
    return before[1]
