"""The weight store."""

from __future__ import annotations

import enum

from rollart.config.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)

__all__ = ["StoreKind", "Weights"]


class StoreKind(enum.StrEnum):
    """Where weights travel."""

    LOCAL = "local"
    """Shared memory: all workers are on one machine."""
    MOONCAKE = "mooncake"
    """The memory of Mooncake's storage nodes."""


class Weights(Section, frozen=True, kw_only=True):
    """The weight store between the trainer and the inference workers."""

    store: StoreKind = StoreKind.LOCAL
    bucket_mib: PositiveFloat = 64.0
    """Tensors travel in pieces of this size; a larger tensor has one of its own."""
    pulls_at_once: PositiveInt = 8
    """Inference workers that pull at the same time; the others wait for their turn."""
    pull_jitter_s: NonNegativeFloat = 0.0
    """Each pull begins up to so much later, by chance, so that many workers don't ask the store at the same moment."""
    master: str | None = None
    """HOST:PORT of a Mooncake master that runs already; by default the run starts one, and its storage nodes."""
    nodes: PositiveInt | None = None
    """Storage nodes that the run starts; by default 1."""
    node_gib: PositiveFloat | None = None
    """Memory of each node; about four versions must fit into all. By default 1."""
    replicas: PositiveInt | None = None
    """Nodes that hold each bucket; by default 1."""
    delta: bool | None = None
    """Store what changed beside what is, and pull only that where the version before is at hand; by default false.
    It pays where the network is slower than the comparison, about 1 GB/s; the trainer's host keeps one version more."""

    def __post_init__(self) -> None:
        own = {"nodes": self.nodes, "node_gib": self.node_gib}
        mooncake = {"master": self.master, "replicas": self.replicas, "delta": self.delta, **own}
        idle = [name for name, value in mooncake.items() if value is not None]
        if self.store is StoreKind.LOCAL and idle:
            raise ValueError(
                f"{idle[0]} does nothing while store is local: it is a setting of store mooncake"
            )
        idle = [name for name, value in own.items() if value is not None]
        if self.master is not None and idle:
            raise ValueError(f"{idle[0]} does nothing where master names a Mooncake that runs already")
        if self.master is not None and not _is_address(self.master):
            raise ValueError(f"master is {self.master!r}, not HOST:PORT")
        if self.master is None and (self.replicas or 1) > (self.nodes or 1):
            raise ValueError(f"replicas ({self.replicas}) needs as many nodes, there are {self.nodes or 1}")

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mib`` in bytes."""
        return int(self.bucket_mib * 2**20)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
