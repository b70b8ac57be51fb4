"""TextWorld games: ``environment: rollart.environments.adapters.textworld:TextWorld``.

A game is made from the episode's seed, by TextWorld's own generator, which takes some seconds
(``environments.warm_groups`` hides them), or is one of the files that ``games`` names.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import textworld

from rollart.environments.environment import Environment, Turn
from rollart.environments.splits import SPLITS, split_of

__all__ = ["TextWorld"]

BANNER = frozenset(r" \$|_/<>")


class TextWorld(Environment):
    """``options`` are fields of ``textworld.GameOptions``, such as ``nb_rooms``; or ``games`` are files.

    The episode ends when the game is won or lost; its reward is the share of the game's points.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, games: Sequence[str] = ()) -> None:
        if options and games:
            raise ValueError("options does nothing beside games")
        unknown = [name for name in options or () if not hasattr(textworld.GameOptions(), name)]
        if unknown:
            raise ValueError(f"textworld.GameOptions has no {unknown[0]!r}")
        missing = [game for game in games if not Path(game).is_file()]
        if missing:
            raise ValueError(f"there is no game {missing[0]}")
        self._options = dict(options or {})
        self._games = {
            split: [game for game in games if split_of(Path(game).name) == split] for split in SPLITS
        }
        self._all = list(games)
        self._folder: Path | None = None
        self._env: Any = None
        self._most = 1.0
        self._before = 0.0
        self.walkthrough: list[str] = []
        """Commands that win the game, where TextWorld knows them."""

    def reset(self, seed: int, split: str) -> str:
        """Make or open the game that ``seed`` and ``split`` name."""
        infos = textworld.EnvInfos(feedback=True, max_score=True, score=True, policy_commands=True, won=True)
        self._env = textworld.start(self._game(seed, split), infos)
        state = self._env.reset()
        self._most = float(state.max_score or 1)
        self.walkthrough = list(state.policy_commands or [])
        return f"{_readable(state.feedback)}\n> "

    def step(self, action: str) -> Turn:
        """Carry out a command: the answer's first line."""
        lines = action.strip().splitlines()
        state, _, done = self._env.step(lines[0] if lines else "look")
        score, self._before = float(state.score or 0) - self._before, float(state.score or 0)
        info = {"success": float(bool(state.won))} if done else {}
        return Turn(f"{_readable(state.feedback)}\n> ", score / self._most, bool(done), info)

    def close(self) -> None:
        """Close the game, and remove it where it was made here."""
        if self._env is not None:
            self._env.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _game(self, seed: int, split: str) -> str:
        if self._all:
            games = self._games[split]
            if not games:
                raise ValueError(
                    f"none of the {len(self._all)} games is of the {split} split: name more of them"
                )
            return random.Random(seed).choice(games)
        self._folder = Path(tempfile.mkdtemp(prefix="rollart-textworld-"))
        options = textworld.GameOptions()
        for name, value in self._options.items():
            setattr(options, name, value)
        options.seeds = 2 * (seed % 2**30) + SPLITS.index(split)
        options.path = str(self._folder / "game.z8")
        path, _ = textworld.make(options)
        return str(path)


def _readable(text: str) -> str:
    """Without the banner that every game opens with."""
    lines = text.splitlines()
    banner = [i for i, line in enumerate(lines) if line.strip() and set(line) <= BANNER]
    return "\n".join(lines[banner[-1] + 1 if banner else 0 :]).strip()
