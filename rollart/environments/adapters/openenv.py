"""Environments behind an OpenEnv server: ``environment: rollart.environments.adapters.openenv:OpenEnv``.

Through the package's ``GenericEnvClient``, which needs nothing of the environment's own package.  A server that can't
be reached, or that breaks off, is an infrastructure failure: the episode begins again.
"""

from __future__ import annotations

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from rollart.environments.environment import Environment, Turn, Unavailable
from rollart.environments.splits import SPLITS

__all__ = ["OpenEnv"]


class OpenEnv(Environment):
    """``url`` is the server's; what the policy says is the field ``action`` of an action, or with ``action`` empty a
    JSON object by itself; ``observation`` is the field of an observation that it sees, all of them as JSON by default.
    """

    def __init__(
        self, url: str, action: str = "message", observation: str = "", timeout_s: float = 60.0
    ) -> None:
        self._url = url
        self._action = action
        self._observation = observation
        self._timeout_s = timeout_s
        self._client: Any = None

    async def reset(self, seed: int, split: str) -> str:
        """Connect, and begin the episode of that seed; ``split`` decides whether it is even or odd."""
        try:
            self._client = GenericEnvClient(base_url=self._url, message_timeout_s=self._timeout_s)
            await self._client.connect()
            result = await self._client.reset(seed=len(SPLITS) * seed + SPLITS.index(split))
        except (OSError, ConnectionError, TimeoutError) as error:
            raise Unavailable(f"the OpenEnv server {self._url} can't be used: {error}") from None
        return self._shown(result.observation)

    async def step(self, action: str) -> Turn:
        """Send the action."""
        if self._action:
            fields: Any = {self._action: str(action)}
        else:
            try:
                fields = json.loads(action)
            except ValueError as error:
                return Turn(f"An action is a JSON object: {error}\n")
        try:
            result = await self._client.step(fields)
        except (OSError, ConnectionError, TimeoutError) as error:
            raise Unavailable(f"the OpenEnv server {self._url} broke off: {error}") from None
        return Turn(self._shown(result.observation), float(result.reward or 0.0), bool(result.done))

    async def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            await self._client.disconnect()

    def _shown(self, observation: Any) -> str:
        if self._observation:
            return f"{observation[self._observation]}\n"
        return f"{json.dumps(observation, ensure_ascii=False)}\n"
