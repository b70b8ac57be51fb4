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
        ]
        placements = [
            Placement(f"{role}-{number}", role, HARDWARE_CLASS, {"OMP_NUM_THREADS": str(threads)})
            for role, count, threads in wanted
            for number in range(count)
        ]
        return placements + self._environments()

    def _environments(self) -> list[Placement]:
        """So many workers for each interpreter that tasks name, and for those that name none."""
        config = self._config
        tasks: dict[str, list[str]] = {}
        for task in config.tasks:
            tasks.setdefault(task.interpreter or "", []).append(task.name)
        pools = [(python, tuple(names) if len(tasks) > 1 else ()) for python, names in sorted(tasks.items())]
        return [
            Placement(
                f"{Role.ENVIRONMENT}-{pool * config.environments.workers + number}",
                Role.ENVIRONMENT,
                HARDWARE_CLASS,
                {"OMP_NUM_THREADS": "1"},
                python,
                names,
            )
            for pool, (python, names) in enumerate(pools)
            for number in range(config.environments.workers)
        ]

    def explain(self) -> str:
        """The placement as a person reads it, a line a worker."""
        return "\n".join(
            f"{p.name:<16} a process of this machine, hardware class {p.hardware_class}, "
            f"{p.environment['OMP_NUM_THREADS']} thread(s)"
            f"{f', of {p.interpreter}' if p.interpreter else ''}{f', for {chr(44).join(p.tasks)}' if p.tasks else ''}"
            for p in self.placements()
        )


def role_and_number(worker: str) -> tuple[Role, int]:
    """What a placement's name says: the role, and which of its workers from 0."""
    role, _, number = worker.rpartition("-")
    return Role(role), int(number)
