"""Environments: the interface and the built-in tasks."""

from __future__ import annotations

from rollart.environments.environment import Environment, Turn, Unavailable

__all__ = ["Environment", "Turn", "Unavailable"]
