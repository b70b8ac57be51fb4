"""RollArt trains LLM agents by reinforcement learning on disaggregated hardware.

``load_config`` reads a run's config, ``run`` carries it out from a script of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.config import Config
    from rollart.controller.configuration import load_config
    from rollart.declare import Cluster, ResourceManager, Worker, hw_mapping, register
    from rollart.embedding import run
    from rollart.errors import ConfigError, RollArtError, RunError
    from rollart.serverless import register_serverless

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Config",
    "ConfigError",
    "ResourceManager",
    "RollArtError",
    "RunError",
    "Worker",
    "hw_mapping",
    "load_config",
    "register",
    "register_serverless",
    "run",
]

_HOMES = {
    "Cluster": "rollart.declare",
    "ResourceManager": "rollart.declare",
    "Worker": "rollart.declare",
    "hw_mapping": "rollart.declare",
    "register": "rollart.declare",
    "Config": "rollart.config",
    "ConfigError": "rollart.errors",
    "RollArtError": "rollart.errors",
    "RunError": "rollart.errors",
    "load_config": "rollart.controller.configuration",
    "register_serverless": "rollart.serverless",
    "run": "rollart.embedding",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import rollart`` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollart' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
