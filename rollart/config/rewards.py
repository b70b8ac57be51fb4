"""The ``reward`` section of a task: what scores its trajectories, where that runs, and what becomes of failures."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = ["IN_PROCESS", "LOCAL", "OnFailure", "Reward", "Scope"]

IN_PROCESS, LOCAL = "in_process", "local"
PositiveInt = Annotated[int, Meta(ge=1, le=2**53)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Meta(gt=0)]
ENDPOINT = re.compile(r"^(https?|fc\+https?)://[^/\s]+(/\S*)?$|^lambda://[\w-]+/[\w:.$-]+$")
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class Scope(enum.StrEnum):
    """What a function is given."""

    TRAJECTORY = "trajectory"
    """One trajectory."""
    GROUP = "group"
    """All members of a group at once, for scores that are relative to one another.  They wait for each other."""


class OnFailure(enum.StrEnum):
    """What becomes of a trajectory whose reward can't be had."""

    DROP = "drop"
    """It ends as failed (``reward_error`` or ``reward_timeout``), and its group starts another in its place."""
    RETRY = "retry"
    """Infrastructure failures are tried again for ``retry_for_s``, with growing pauses, and dropped after that."""
    VALUE = "value"
    """It gets ``value``, and is counted as one that did."""


class Reward(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One reward function.  Settings left out are the function's own declaration, or else the default named here."""

    function: Annotated[str, Meta(pattern=r"^[\w.]+:\w+(\.\w+)?$")] | None = None
    """Import path, ``module:function`` or ``module:Class.method``; an endpoint is told it as a name.  Only an
    endpoint of its own can do without."""
    url: str | None = None
    """``in_process`` (inside the controller), ``local`` (the function host that the run starts; the default),
    ``http(s)://…`` (plain HTTP: Knative, OpenFaaS, your own), ``lambda://REGION/FUNCTION`` (AWS) or
    ``fc+https://…`` (an HTTP trigger of Alibaba Function Compute with signatures)."""
    options: dict[str, Any] = {}
    """Keyword arguments of every call."""
    weight: float = 1.0
    """Of several rewards of one task, whose weighted scores are summed."""
    scope: Scope | None = None
    """By default ``trajectory``."""
    send_ids: bool = False
    """Token ids and mask are part of the view."""
    timeout_s: PositiveFloat | None = None
    """For one attempt of a call, from its place among the ``concurrency``; by default 30."""
    retries: NonNegativeInt | None = None
    """Further attempts after infrastructure failures; by default 5, which bear a restart of the host.  What the
    function itself raised is not tried again."""
    hedge_after_s: PositiveFloat | None = None
    """An attempt that takes longer is joined by a second one, and the first answer counts; by default never."""
    concurrency: PositiveInt | None = None
    """Calls of the controller at the same time; the others wait.  By default 512."""
    batch: PositiveInt | None = None
    """Trajectories that one call may carry; they wait for each other for a hundredth of a second.  By default 1."""
    on_failure: OnFailure = OnFailure.DROP
    value: float | None = None
    """Only with ``on_failure: value``."""
    retry_for_s: PositiveFloat | None = None
    """Only with ``on_failure: retry``; by default 600."""
    max_failures: PositiveInt = 256
    """So many calls in a row that failed for good stop the run: its rewards are broken."""
    token_env: Annotated[str, Meta(pattern=VARIABLE)] | None = None
    """Environment variable with the bearer token of an ``http(s)://`` endpoint."""
    memory_mib: PositiveInt | None = None
    """Memory of an instance of the local host; by default not bounded."""
    calls_per_instance: PositiveInt | None = None
    """Calls that one local instance serves at the same time; by default 1."""
    min_instances: NonNegativeInt | None = None
    """Local instances that stay without calls; by default 0."""
    max_instances: PositiveInt | None = None
    """By default 32."""
    idle_s: PositiveFloat | None = None
    """A local instance without calls ends after so long; by default after as long as starting it takes, or
    at once where calls come less often."""

    def __post_init__(self) -> None:
        url = self.where
        if url not in (IN_PROCESS, LOCAL) and not ENDPOINT.match(url):
            raise ValueError(
                f"url is {url!r}; it must be in_process, local, http(s)://HOST/PATH, lambda://REGION/FUNCTION or "
                "fc+https://HOST/PATH"
            )
        if self.function is None and url in (IN_PROCESS, LOCAL):
            raise ValueError(f"function is required where url is {url}")
        self._refuse_idle(url)

    def _refuse_idle(self, url: str) -> None:
        """A setting that would do nothing is an error."""
        only = {
            f"url is {LOCAL}": (
                url == LOCAL,
                ("memory_mib", "calls_per_instance", "min_instances", "max_instances", "idle_s"),
            ),
            "url is http(s)://…": (url.startswith("http"), ("token_env",)),
            f"url is not {IN_PROCESS}": (url != IN_PROCESS, ("hedge_after_s",)),
            "on_failure is value": (self.on_failure is OnFailure.VALUE, ("value",)),
            "on_failure is retry": (self.on_failure is OnFailure.RETRY, ("retry_for_s",)),
            "scope is trajectory": (self.scope is not Scope.GROUP, ("batch",)),
        }
        for when, (holds, names) in only.items():
            idle = [name for name in names if getattr(self, name) is not None and not holds]
            if idle:
                raise ValueError(f"{idle[0]} does nothing unless {when}")
        if self.on_failure is OnFailure.VALUE and self.value is None:
            raise ValueError("on_failure: value needs value, the score that a failed reward counts as")
        if None not in (self.hedge_after_s, self.timeout_s) and self.hedge_after_s >= self.timeout_s:  # type: ignore[operator]
            raise ValueError(
                f"hedge_after_s ({self.hedge_after_s:g}) does nothing: an attempt ends after timeout_s "
                f"({self.timeout_s:g})"
            )
        if (self.min_instances or 0) > (self.max_instances or 32):
            raise ValueError(
                f"min_instances ({self.min_instances}) must be at most max_instances ({self.max_instances or 32})"
            )

    @property
    def where(self) -> str:
        """``url``, or its default."""
        return self.url or LOCAL

    @property
    def name(self) -> str:
        """What metrics and errors call it."""
        return self.function.rpartition(":")[2] if self.function else self.where
