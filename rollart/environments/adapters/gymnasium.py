"""Gymnasium environments in text: ``environment: rollart.environments.adapters.gymnasium:Gymnasium``.

What is observed is written out by its space, or shown as ``render_mode="ansi"`` draws it.  What the policy says is
read by the action space: a name or number of a ``Discrete``, numbers of a ``Box``, a ``Text`` as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy
from gymnasium import spaces

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import SPLITS

__all__ = ["Gymnasium"]

MOST_NUMBERS = 512
"""An observation with more is an image, and no text."""


class Gymnasium(Environment):
    """``id`` as ``gymnasium.make`` takes it, with ``make`` as its keyword arguments.

    ``actions`` names the actions of a ``Discrete`` space, in its order; ``render`` shows ``env.render()`` instead of
    the observation; ``introduction`` stands before the first one; ``module`` is imported first, where it registers
    ``id``.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        render: bool = False,
        introduction: str = "",
        module: str | None = None,
    ) -> None:
        if module is not None:
            importlib.import_module(module)
        options: dict[str, Any] = {"render_mode": "ansi"} if render else {}
        self._env = gymnasium.make(id, **options, **(make or {}))
        self._render = render
        self._introduction = introduction
        self._space = self._env.action_space
        self._actions = [str(name) for name in actions]
        if self._actions and not (
            isinstance(self._space, spaces.Discrete) and self._space.n == len(self._actions)
        ):
            raise ValueError(f"actions names {len(self._actions)} actions, the action space is {self._space}")
        if not render:
            _written(self._env.observation_space.sample(), self._env.observation_space)

    def reset(self, seed: int, split: str) -> str:
        """``split`` decides whether Gymnasium's seed is even or odd; where the seed changes nothing, nor does that."""
        seen, _ = self._env.reset(seed=len(SPLITS) * seed + SPLITS.index(split))
        return f"{self._introduction}{self._shown(seen)}"

    def step(self, action: str) -> Turn:
        """An answer that is no action is told so, and the environment stays as it is."""
        try:
            read = self._read(action.strip())
        except ValueError as error:
            return Turn(f"{error}\n")
        seen, reward, terminated, truncated, info = self._env.step(read)
        numbers = {name: float(value) for name, value in info.items() if isinstance(value, int | float)}
        return Turn(self._shown(seen), float(reward), bool(terminated or truncated), numbers)

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def _shown(self, seen: Any) -> str:
        if self._render:
            return f"{self._env.render()}\n"
        return f"{_written(seen, self._env.observation_space)}\n"

    def _read(self, text: str) -> Any:
        """The action that ``text`` says; ``ValueError`` with what it may say."""
        if isinstance(self._space, spaces.Text):
            return text
        if isinstance(self._space, spaces.Discrete):
            return self._read_choice(text, self._space)
        if isinstance(self._space, spaces.Box):
            try:
                numbers = [float(word) for word in text.replace(",", " ").split()]
            except ValueError:
                numbers = []
            count = int(numpy.prod(self._space.shape))
            if len(numbers) != count:
                raise ValueError(f"An action is {count} numbers.")
            found = numpy.array(numbers, self._space.dtype).reshape(self._space.shape)
            return numpy.clip(found, self._space.low, self._space.high)
        raise ValueError(f"Actions of {self._space} can't be written as text: wrap the environment.")

    def _read_choice(self, text: str, space: spaces.Discrete) -> int:
        if self._actions:
            if text in self._actions:
                return int(space.start) + self._actions.index(text)
            raise ValueError(f"An action is one of {', '.join(self._actions)}.")
        low, high = int(space.start), int(space.start + space.n) - 1
        if text.lstrip("-").isdecimal() and low <= int(text) <= high:
            return int(text)
        raise ValueError(f"An action is a number from {low} to {high}.")


def _written(seen: Any, space: Any) -> str:
    """An observation as text; ``ValueError`` for an image."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {_written(seen[name], part)}" for name, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return "\n".join(_written(each, part) for each, part in zip(seen, space.spaces, strict=True))
    if isinstance(seen, str):
        return seen
    numbers = numpy.asarray(seen).ravel().tolist()
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(
            f"an observation is {len(numbers)} numbers, which is no text: render: true may show one"
        )
    return " ".join(f"{number:.4g}" for number in numbers)
