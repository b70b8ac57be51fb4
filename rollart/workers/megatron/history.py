"""The weights of the last few versions, in host memory.

They recompute the log-probability of a token under the weights that sampled it, undo a step that went wrong
and are what is published; a remembered version never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rollart.workers.megatron.model import LanguageModel

__all__ = ["WeightHistory"]


class WeightHistory:
    """Keeps ``keep`` versions of ``model``'s weights, under Megatron's names."""

    def __init__(self, model: LanguageModel, *, keep: int) -> None:
        self._model = model
        self._keep = keep
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._reference: dict[str, Tensor] | None = None
        self.first = 0
        """The oldest version there ever was: where the trainer started."""

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def restart(self, first: int) -> None:
        """Forget everything: the model has been given other weights, of version ``first``."""
        self._versions.clear()
        self.first = first

    def keep_reference(self) -> None:
        """The model's weights now are what the policy is held against."""
        self._reference = self._copy()

    def _copy(self) -> dict[str, Tensor]:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self._model.parameters()}

    def remember(self, version: int) -> Mapping[str, Tensor]:
        """The model's weights now, which are ``version``; drops what is too old."""
        if version not in self._versions:
            self._versions[version] = self._copy()
            for old in [each for each in self._versions if each <= version - self._keep]:
                del self._versions[old]
        return self._versions[version]

    def load(self, version: int) -> None:
        """Give the model the weights of ``version``; ``KeyError`` when it is not kept."""
        self._give(self._versions[version])

    @torch.no_grad()
    def _give(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._model.parameters():
            parameter.copy_(weights[name])

    @contextmanager
    def reference_loaded(self, *, current: int) -> Iterator[None]:
        """The model with the reference's weights for a while; now it has ``current``, remembered."""
        assert self._reference is not None, "keep_reference comes first"
        try:
            self._give(self._reference)
            yield
        finally:
            self.load(current)

    @contextmanager
    def loaded(self, version: int, *, current: int) -> Iterator[None]:
        """The model with the weights of ``version`` for a while; now it has ``current``, remembered."""
        if version == current:
            yield
            return
        try:
            self.load(version)
            yield
        finally:
            self.load(current)
