"""ResourceManager: which workers a run wants, and where."""

from __future__ import annotations

from rollart.config import Config
from rollart.launch.local import Placement
from rollart.protocol import Role

__all__ = ["ResourceManager", "role_and_number"]

HARDWARE_CLASS = "CPU"


class ResourceManager:
    """The placement of a run on this machine."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def placements(self) -> list[Placement]:
        """Every worker, the slowest to start first."""
        config = self._config
        wanted = [
            (Role.INFERENCE, config.inference.workers, config.inference.threads),
            (Role.TRAINER, 1, config.trainer.threads),
            (Role.ENVIRONMENT, config.environments.workers, 1),
        ]
        return [
            Placement(f"{role}-{number}", role, HARDWARE_CLASS, {"OMP_NUM_THREADS": str(threads)})
            for role, count, threads in wanted
            for number in range(count)
        ]

    def explain(self) -> str:
        """The placement as a person reads it, a line a worker."""
        return "\n".join(
            f"{p.name:<16} a process of this machine, hardware class {p.hardware_class}, "
            f"{p.environment['OMP_NUM_THREADS']} thread(s)"
            for p in self.placements()
        )


def role_and_number(worker: str) -> tuple[Role, int]:
    """What a placement's name says: the role, and which of its workers from 0."""
    role, _, number = worker.rpartition("-")
    return Role(role), int(number)
