"""The config's ``health:`` section: limits on a train_step's numbers that warn a person or stop the run."""

from __future__ import annotations

from collections.abc import Iterator

from rollart.config.section import PositiveInt, Section

__all__ = ["Health", "Limits"]


class Limits(Section, frozen=True, kw_only=True):
    """Of one number."""

    warn_below: float | None = None
    warn_above: float | None = None
    stop_below: float | None = None
    stop_above: float | None = None
    steps: PositiveInt = 1
    """The number must be outside in so many steps in a row."""

    def __post_init__(self) -> None:
        if all(
            limit is None for limit in (self.warn_below, self.warn_above, self.stop_below, self.stop_above)
        ):
            raise ValueError("give at least one of warn_below, warn_above, stop_below, stop_above")
        for side, sign in (("below", 1), ("above", -1)):
            warn, stop = getattr(self, f"warn_{side}"), getattr(self, f"stop_{side}")
            if warn is not None and stop is not None and sign * warn < sign * stop:
                raise ValueError(
                    f"warn_{side} ({warn:g}) would do nothing: stop_{side} ({stop:g}) is reached first"
                )
        for kind in ("warn", "stop"):
            below, above = getattr(self, f"{kind}_below"), getattr(self, f"{kind}_above")
            if below is not None and above is not None and below > above:
                raise ValueError(
                    f"{kind}_below ({below:g}) is over {kind}_above ({above:g}): every number is outside"
                )


class Health(Section, frozen=True, kw_only=True):
    """Limits by the name that a number has in ``metrics.jsonl``.  A step without the number is passed over."""

    loss: Limits | None = None
    grad_norm: Limits | None = None
    entropy: Limits | None = None
    ess: Limits | None = None
    """Effective sample size of the importance ratios, as a share of the tokens."""
    ratio_mean: Limits | None = None
    ratio_max: Limits | None = None
    clip_share: Limits | None = None
    approx_kl: Limits | None = None
    """Between the policy and the one that sampled."""
    kl_reference: Limits | None = None
    """Between the policy and the reference."""
    correction_mean: Limits | None = None
    correction_zero_share: Limits | None = None
    logprob_gap_mean: Limits | None = None
    """Between engine and trainer under the same weights."""
    logprob_gap_max: Limits | None = None
    staleness_mean: Limits | None = None
    train_lag_mean: Limits | None = None
    zero_signal_groups: Limits | None = None
    success_rate: Limits | None = None
    reward_mean: Limits | None = None

    def limits(self) -> Iterator[tuple[str, Limits]]:
        """Those that are set, by name."""
        for name in self.__struct_fields__:
            found = getattr(self, name)
            if found is not None:
                yield name, found
