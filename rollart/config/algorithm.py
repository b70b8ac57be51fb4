"""The config's ``algorithm:`` section: which advantages, which loss, what is done about tokens of other weights.

A knob belongs to some choices and does nothing for the others; given with one of those it is an error.  So a knob
that wasn't given is ``None`` here, and the properties below say what it is then.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

from msgspec import Meta

from rollart.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share

__all__ = [
    "Advantage",
    "Algorithm",
    "Correction",
    "Denominator",
    "KLEstimator",
    "KLPlace",
    "Loss",
    "LossMean",
]


class Advantage(enum.StrEnum):
    """How much better than expected a token was; ``rollart.algorithms.advantages`` has formulas and papers."""

    GROUP = "group"
    """GRPO: the trajectory's reward against its group's mean, over its deviation (Dr. GRPO: not over it)."""
    RLOO = "rloo"
    """The reward against the mean of the group's others."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """The return from each turn on, normalised over the whole batch of its task; no group is needed for it."""
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    """The reward against its group's mean, normalised over the whole batch of its task."""
    RETURNS = "returns"
    """The return from each turn on against the group's mean at that turn, over its deviation."""
    GIGPO = "gigpo"
    """``group`` plus, for each turn, its return against those of the same observation in the group."""


class Loss(enum.StrEnum):
    """A token's loss; ``rollart.algorithms.losses`` has formulas and papers."""

    PPO = "ppo"
    """The clipped ratio of PPO, which GRPO and DAPO use."""
    GSPO = "gspo"
    """The ratio of a whole sequence, clipped."""
    CISPO = "cispo"
    """The clipped ratio is a weight, so that no token loses its gradient."""
    TOPR = "topr"
    """Trajectories that were good without a ratio, bad ones with a truncated one."""
    REINFORCE = "reinforce"
    """-A · log π."""


class LossMean(enum.StrEnum):
    """How tokens' losses become one number."""

    TOKEN = "token"
    """The mean over all tokens (DAPO)."""
    SEQUENCE = "sequence"
    """The mean over sequences of the mean over each one's tokens (GRPO, GSPO)."""
    CONSTANT = "constant"
    """The sum over sequences and tokens over sequences × ``loss_mean_tokens`` (Dr. GRPO)."""


class Denominator(enum.StrEnum):
    """Whose probability the loss's ratio is over."""

    BEHAVIOUR = "behaviour"
    """The engine's own, of the moment of sampling."""
    PROXIMAL = "proximal"
    """Decoupled: the trainer's weights at the start of the train_step.  ``correction`` says what then becomes of the
    ratio between those and the engine."""


class Correction(enum.StrEnum):
    """What a token is weighted with for having been sampled by the engine and not by the proximal policy."""

    NONE = "none"
    """Nothing: the difference is ignored."""
    IMPORTANCE = "importance"
    """The ratio itself: decoupled PPO."""
    TRUNCATE = "truncate"
    """The ratio, at most ``correction_high``: truncated importance sampling."""
    MASK = "mask"
    """The ratio, and nothing outside ``correction_low`` to ``correction_high``: masked sampling, IcePop."""


class KLEstimator(enum.StrEnum):
    """Of the divergence from the reference, with d = log π - log π_reference of a sampled token."""

    K1 = "k1"
    """d; only in the reward, since its gradient's expectation in the loss is 0."""
    K2 = "k2"
    """d² / 2."""
    K3 = "k3"
    """exp(-d) - 1 + d."""


class KLPlace(enum.StrEnum):
    """Where the divergence from the reference counts."""

    LOSS = "loss"
    REWARD = "reward"


_RETURNS = (Advantage.REINFORCE_PLUS_PLUS, Advantage.RETURNS, Advantage.GIGPO)
_NORMALIZED = (Advantage.GROUP, Advantage.RETURNS, Advantage.GIGPO)
_WHITENED = (Advantage.REINFORCE_PLUS_PLUS, Advantage.REINFORCE_PLUS_PLUS_BASELINE)
_CLIPPED = (Loss.PPO, Loss.GSPO, Loss.CISPO)
_DECOUPLED = (Loss.PPO, Loss.GSPO, Loss.CISPO, Loss.REINFORCE)
_DEFAULT_CLIP = {Loss.PPO: (0.2, 0.2), Loss.GSPO: (3e-4, 4e-4), Loss.CISPO: (1.0, 0.28)}


class Algorithm(Section, frozen=True, kw_only=True):
    """Advantages and loss: by default GRPO, arXiv 2402.03300, with the token-level mean of DAPO, arXiv 2503.14476."""

    advantage: Advantage = Advantage.GROUP
    normalize_std: bool | None = None
    """Divide by the group's standard deviation; by default true.  For group, returns and gigpo."""
    discount: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Of a reward for each turn it lies ahead; by default 1.  For reinforce_plus_plus, returns and gigpo."""
    turn_weight: PositiveFloat | None = None
    """Of the turn's advantage beside the trajectory's (ω); by default 1.  For gigpo."""
    loss: Loss = Loss.PPO
    clip_low: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The ratio counts from 1 - clip_low on; by default 0.2, gspo 3e-4, cispo 1 (no bound)."""
    clip_high: PositiveFloat | None = None
    """The ratio counts up to 1 + clip_high; by default 0.2, gspo 4e-4, cispo 0.28.  DAPO's clip-higher: 0.28."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """A ratio counts up to so much where the advantage is negative; by default without bound.  For ppo."""
    topr_high: PositiveFloat | None = None
    """The ratio of a bad trajectory counts up to so much; by default 1.  For topr."""
    loss_mean: LossMean = LossMean.TOKEN
    loss_mean_tokens: PositiveInt | None = None
    """The constant of ``loss_mean: constant``, for instance the most tokens a trajectory can sample."""
    denominator: Denominator = Denominator.BEHAVIOUR
    correction: Correction = Correction.NONE
    """For denominator proximal."""
    correction_low: Share | None = None
    """By default 0.5.  For mask."""
    correction_high: Annotated[float, Meta(ge=1)] | None = None
    """By default 2 for truncate and 5 for mask."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Of the divergence from the reference, the weights the run began with; 0: no reference."""
    kl_estimator: KLEstimator | None = None
    """By default k3 in the loss and k1 in the reward."""
    kl_place: KLPlace | None = None
    """By default the loss."""
    entropy_coefficient: NonNegativeFloat = 0.0
    mask_truncated: bool = False
    """Leave trajectories that were cut out of the loss (DAPO's overlong filtering); their rewards still count for
    the group's others."""
    overlong_tokens: PositiveInt | None = None
    """Sampled tokens of a trajectory from which on its reward is lower by ``overlong_penalty``."""
    overlong_buffer: PositiveInt | None = None
    """Over so many tokens before ``overlong_tokens`` the penalty rises linearly (DAPO's soft punishment); by default a
    quarter of them."""
    overlong_penalty: PositiveFloat | None = None
    """By default 1."""

    def __post_init__(self) -> None:
        where = {
            "normalize_std": ("advantage", _NORMALIZED),
            "discount": ("advantage", _RETURNS),
            "turn_weight": ("advantage", (Advantage.GIGPO,)),
            "clip_low": ("loss", _CLIPPED),
            "clip_high": ("loss", _CLIPPED),
            "dual_clip": ("loss", (Loss.PPO,)),
            "topr_high": ("loss", (Loss.TOPR,)),
            "loss_mean_tokens": ("loss_mean", (LossMean.CONSTANT,)),
            "correction_low": ("correction", (Correction.MASK,)),
            "correction_high": ("correction", (Correction.TRUNCATE, Correction.MASK)),
        }
        for name, (choice, fitting) in where.items():
            if getattr(self, name) is not None and getattr(self, choice) not in fitting:
                raise ValueError(
                    f"{name} does nothing with {choice}: {getattr(self, choice)}; it is for {', '.join(fitting)}"
                )
        self._check_ratios()
        self._check_rest()

    def _check_ratios(self) -> None:
        if self.correction is not Correction.NONE and self.denominator is Denominator.BEHAVIOUR:
            raise ValueError(
                f"correction: {self.correction} does nothing with denominator: behaviour, whose ratio corrects "
                "already; it is for denominator: proximal"
            )
        if self.denominator is Denominator.PROXIMAL and self.loss not in _DECOUPLED:
            raise ValueError(
                f"denominator: proximal does nothing with loss: {self.loss}, which is defined by the engine's "
                "probabilities"
            )
        decoupled = self.denominator is Denominator.PROXIMAL
        if self.loss is Loss.REINFORCE and decoupled and self.correction is Correction.NONE:
            raise ValueError(
                "denominator: proximal does nothing with loss: reinforce, which has no ratio, unless a correction is "
                "chosen (importance, truncate or mask)"
            )
        if self.loss in (Loss.PPO, Loss.GSPO) and self.clip_low == 1:
            raise ValueError("clip_low: 1 would bound nothing; leave it below 1")

    def _check_rest(self) -> None:
        if self.loss_mean is LossMean.CONSTANT and self.loss_mean_tokens is None:
            raise ValueError("loss_mean: constant needs loss_mean_tokens, the constant to divide by")
        for name in ("kl_estimator", "kl_place"):
            if getattr(self, name) is not None and not self.kl_coefficient:
                raise ValueError(f"{name} does nothing while kl_coefficient is 0")
        if self.kl_coefficient and self.kl_in_loss and self.kl is KLEstimator.K1:
            raise ValueError(
                "kl_estimator: k1 in the loss has a gradient whose expectation is 0, so it would do nothing but add "
                "noise; use k2 or k3, or kl_place: reward"
            )
        for name in ("overlong_buffer", "overlong_penalty"):
            if getattr(self, name) is not None and self.overlong_tokens is None:
                raise ValueError(f"{name} does nothing without overlong_tokens")
        if self.overlong_tokens is not None and (self.overlong_buffer or 0) >= self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer ({self.overlong_buffer}) must be below overlong_tokens ({self.overlong_tokens})"
            )

    # --- what holds where nothing was given -----------------------------------------------------------

    @property
    def divides_by_std(self) -> bool:
        """``normalize_std``."""
        return self.normalize_std is not False

    @property
    def gamma(self) -> float:
        """``discount``."""
        return 1.0 if self.discount is None else self.discount

    @property
    def omega(self) -> float:
        """``turn_weight``."""
        return self.turn_weight or 1.0

    @property
    def clip(self) -> tuple[float, float]:
        """``clip_low`` and ``clip_high``."""
        low, high = _DEFAULT_CLIP[self.loss]
        return self.clip_low or low, self.clip_high or high

    @property
    def bounds(self) -> tuple[float, float]:
        """``correction_low`` and ``correction_high``."""
        low = 0.5 if self.correction_low is None else self.correction_low
        return low, self.correction_high or (5.0 if self.correction is Correction.MASK else 2.0)

    @property
    def kl_in_loss(self) -> bool:
        """Whether ``kl_place`` is the loss."""
        return self.kl_place is not KLPlace.REWARD

    @property
    def kl(self) -> KLEstimator:
        """``kl_estimator``."""
        return self.kl_estimator or (KLEstimator.K3 if self.kl_in_loss else KLEstimator.K1)

    @property
    def overlong(self) -> tuple[int, int, float] | None:
        """``overlong_tokens``, ``overlong_buffer`` and ``overlong_penalty``, if there is a penalty."""
        if self.overlong_tokens is None:
            return None
        buffer = self.overlong_buffer or max(1, self.overlong_tokens // 4)
        return self.overlong_tokens, buffer, self.overlong_penalty or 1.0

    @property
    def needs_whole_batch(self) -> bool:
        """Its advantages are normalised over the batch, so that none is known before all groups are there."""
        return self.advantage in _WHITENED

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighted by a ``correction``."""
        return self.correction is not Correction.NONE

    @property
    def uses_turns(self) -> bool:
        """Its advantages differ between the turns of a trajectory."""
        return self.advantage in _RETURNS

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, for people."""
        plain = Algorithm()
        return {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) != getattr(plain, name)
        }
