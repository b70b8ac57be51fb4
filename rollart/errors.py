"""The errors a person using RollArt sees: what happened, where, and what to do."""

from __future__ import annotations

__all__ = ["ConfigError", "InvariantError", "RollArtError", "RunError"]


class RollArtError(Exception):
    """Base of the errors that are shown as a sentence, without a traceback."""

    exit_code = 1


class ConfigError(RollArtError):
    """The configuration or the command line is wrong; nothing was started."""

    exit_code = 2


class RunError(RollArtError):
    """The run can't go on; the message is the first cause."""


class InvariantError(RollArtError):
    """A rule of the system itself was broken: a bug, which stops the run."""
