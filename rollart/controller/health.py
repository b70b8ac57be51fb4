"""Health: whether a step's numbers are inside their limits, step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from rollart.config import health as config

__all__ = ["Health", "Judgement"]


class Judgement(NamedTuple):
    """Of one step."""

    warnings: list[str]
    """New ones: a number that stays outside is not said again before it was inside."""
    stop: str
    """Why the run must stop; empty when it needn't."""


class Health:
    """Judges the rows of ``metrics.jsonl``, one after the other."""

    def __init__(self, limits: config.Health) -> None:
        self._limits = dict(limits.limits())
        self._outside: Counter[str] = Counter()
        """Steps in a row that a number was beyond a limit, by their names."""

    def judge(self, row: Mapping[str, object]) -> Judgement:
        """What the next step's numbers mean."""
        warnings: list[str] = []
        stops: list[str] = []
        for name, limits in self._limits.items():
            value = row.get(name)
            if not isinstance(value, int | float):
                continue
            for kind, said in (("warn", warnings), ("stop", stops)):
                for side, sign in (("below", -1), ("above", 1)):
                    limit = getattr(limits, f"{kind}_{side}")
                    if limit is not None:
                        self._count(
                            f"{name} {kind}_{side}",
                            value,
                            limit,
                            sign * (value - limit) > 0,
                            limits.steps,
                            said,
                        )
        return Judgement(warnings, "; ".join(stops))

    def _count(
        self, key: str, value: float, limit: float, outside: bool, steps: int, said: list[str]
    ) -> None:
        self._outside[key] = self._outside[key] + 1 if outside else 0
        if self._outside[key] == steps:
            name, _, side = key.partition(" ")
            times = f" in {steps} steps in a row" if steps > 1 else ""
            said.append(
                f"{name} is {value:.4g}, {side.rpartition('_')[2]} health.{name}.{side} ({limit:g}){times}"
            )
