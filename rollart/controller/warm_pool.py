"""Episodes that are reset before anybody needs them.

What comes next is known before the staleness bound admits it (``TaskSource.peek``).  So its environments can be reset
meanwhile, where there is room, and whoever is admitted finds them ready.  A reset that fails here is a reset that
failed: whoever takes it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from rollart.controller.switchboard import Link
from rollart.protocol import Observation

__all__ = ["Instance", "WarmEpisode", "WarmPool"]

Instance = tuple[str, int]
"""A task's name, and the seed of its instance."""


class WarmEpisode:
    """An episode that is reset, or is being reset."""

    __slots__ = ("link", "observation", "session")

    def __init__(self, link: Link, session: str, observation: asyncio.Task[Observation]) -> None:
        self.link = link
        self.session = session
        self.observation = observation


class WarmPool:
    """The episodes that wait for their trajectories, by instance."""

    def __init__(
        self,
        *,
        room: Callable[[str], Link | None],
        reset: Callable[[Link, str, Instance], Coroutine[None, None, Observation]],
        close: Callable[[Link, str], None],
    ) -> None:
        """``room(task)`` is a worker with a free place, ``reset(link, session, instance)`` resets there, and
        ``close(link, session)`` gives a place back."""
        self._room = room
        self._reset = reset
        self._close = close
        self._waiting: dict[Instance, list[WarmEpisode]] = {}
        self._known: set[Instance] = set()
        """Of what comes next, what was begun already."""
        self._count = 0

    def prepare(self, coming: Iterable[Instance], members: int) -> None:
        """Begin to reset ``members`` episodes of each instance that was not seen before."""
        coming = list(coming)
        for instance in coming:
            if instance in self._known:
                continue
            for _ in range(members):
                link = self._room(instance[0])
                if link is None:
                    break
                self._begin(link, instance)
        self._known = set(coming)

    def _begin(self, link: Link, instance: Instance) -> None:
        session = f"warm.{self._count}"
        self._count += 1
        link.sessions += 1
        task = asyncio.get_running_loop().create_task(self._reset(link, session, instance))
        task.add_done_callback(_heard)
        self._waiting.setdefault(instance, []).append(WarmEpisode(link, session, task))

    def take(self, instance: Instance) -> WarmEpisode | None:
        """One of the episodes of ``instance``, which is the caller's from now on."""
        waiting = self._waiting.get(instance)
        if not waiting:
            return None
        episode = waiting.pop(0)
        if not waiting:
            del self._waiting[instance]
        return episode

    def drop(self, task: str | None = None) -> None:
        """Give up the episodes of ``task``, or all."""
        for instance in [each for each in self._waiting if task in (None, each[0])]:
            for episode in self._waiting.pop(instance):
                episode.observation.cancel()
                self._close(episode.link, episode.session)


def _heard(task: asyncio.Task[Observation]) -> None:
    """Whoever takes the episode is told; where nobody does, nothing was lost."""
    if not task.cancelled():
        task.exception()
