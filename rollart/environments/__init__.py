"""Environments: the interface and the built-in tasks."""

from __future__ import annotations

from rollart.environments.action import Action, ToolCall
from rollart.environments.agent import Episode, Score
from rollart.environments.environment import ChatMessage, Environment, Turn, Unavailable
from rollart.environments.tools import ToolEnvironment, tool

__all__ = [
    "Action",
    "ChatMessage",
    "Environment",
    "Episode",
    "Score",
    "ToolCall",
    "ToolEnvironment",
    "Turn",
    "Unavailable",
    "tool",
]
