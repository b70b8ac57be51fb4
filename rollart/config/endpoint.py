"""The OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollart.config.section import (
    Section,
)

__all__ = ["Endpoint"]


class Endpoint(Section, frozen=True, kw_only=True):
    """The OpenAI-compatible endpoint that tasks with an agent call; there is none without such a task.

    It speaks plain HTTP.  Every request wants the API key of a trajectory that is live, wherever it is bound.
    """

    host: str = "127.0.0.1"
    """The address it listens on; agents on other machines need another than loopback."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: one that is free."""
    url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    """Where agents reach it, if not at its own host and port: behind a proxy, or listening on 0.0.0.0."""
    model: str = "policy"
    """The model's name in requests."""

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::") and self.url is None:
            raise ValueError(
                f"endpoint.host {self.host} is every address of the machine and none that an agent could call: "
                "give endpoint.url as well"
            )
