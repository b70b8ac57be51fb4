"""The weight store that a worker's run has."""

from __future__ import annotations

from pathlib import Path

from rollart.config import Config, StoreKind
from rollart.protocol import Welcome
from rollart.weights.local import LocalStore
from rollart.weights.store import WeightStore

__all__ = ["open_store"]


def open_store(config: Config, welcome: Welcome, worker: str) -> WeightStore:
    """The store for ``worker``; ``StoreError`` when it can't be reached.  May wait for the network."""
    weights, folder = config.weights, Path(welcome.store_dir)
    if weights.store is StoreKind.LOCAL:
        return LocalStore(folder, bucket_bytes=weights.bucket_bytes)
    from rollart.weights.mooncake import MooncakeStore

    return MooncakeStore(
        welcome.store_master,
        folder / worker,
        run=welcome.store_run,
        replicas=weights.replicas or 1,
        bucket_bytes=weights.bucket_bytes,
        delta=bool(weights.delta),
    )
