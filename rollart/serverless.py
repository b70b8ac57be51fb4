"""``@register_serverless``: declares that a reward function, or a method of a Reward worker, is stateless.

What is declared travels with the function; where it runs is the config's decision, or else the declaration's::

    from rollart import register_serverless

    @register_serverless(serverless_url="https://gateway.example/function/grade", timeout_s=20, retries=3)
    def grade(trajectory): ...

    class Reward:                                # as in the paper (arXiv 2512.22560)
        @register_serverless(attribute="grade", serverless_url="local")
        def grade(self, trajectory): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["Declaration", "declared", "register_serverless"]

F = TypeVar("F", bound=Callable[..., Any])
_DECLARED = "__rollart_serverless__"


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What the decorator says; ``None`` is left to the config, which may replace every other value as well."""

    attribute: str = ""
    """The name that an endpoint knows the function by; by default the import path of the config."""
    serverless_url: str | None = None
    """Where it runs: ``in_process``, ``local`` or an endpoint (docs/rewards.md)."""
    scope: str | None = None
    """``trajectory`` or ``group``."""
    timeout_s: float | None = None
    memory_mib: int | None = None
    calls_per_instance: int | None = None
    min_instances: int | None = None
    max_instances: int | None = None
    retries: int | None = None
    batch: int | None = None


def register_serverless(
    attribute: str = "",
    serverless_url: str | None = None,
    *,
    scope: str | None = None,
    timeout_s: float | None = None,
    memory_mib: int | None = None,
    concurrency: int | None = None,
    min_instances: int | None = None,
    max_instances: int | None = None,
    retries: int | None = None,
    batch: int | None = None,
) -> Callable[[F], F]:
    """Declare a stateless function: it is called with its own arguments only, wherever ``serverless_url`` says.

    ``concurrency`` is how many calls one instance serves at the same time, ``memory_mib`` what an instance may
    hold, ``batch`` how many trajectories one call may carry.  The function itself is returned unchanged.
    """
    declaration = Declaration(
        attribute=attribute,
        serverless_url=serverless_url,
        scope=scope,
        timeout_s=timeout_s,
        memory_mib=memory_mib,
        calls_per_instance=concurrency,
        min_instances=min_instances,
        max_instances=max_instances,
        retries=retries,
        batch=batch,
    )

    def mark(function: F) -> F:
        setattr(function, _DECLARED, declaration)
        return function

    return mark


def declared(function: object) -> Declaration:
    """What was declared of ``function``; nothing when it was not decorated."""
    found = getattr(function, _DECLARED, None)
    return found if isinstance(found, Declaration) else Declaration()
