"""ResourceManager: which workers a run wants, where, and which of them there are."""

from __future__ import annotations

from rollart.config import Config
from rollart.config.routing import AUTO, Phase, Pool
from rollart.controller.affinity import Orders
from rollart.launch.local import Placement
from rollart.protocol import Role

__all__ = ["ResourceManager", "role_and_number"]

HARDWARE_CLASS = "CPU"
"""Of what the config gives no other."""


class ResourceManager:
    """The placement of a run on this machine, and the live view of its pools."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._orders = Orders(config.inference)
        self._ready: dict[str, str] = {}

    def placements(self) -> list[Placement]:
        """Every worker, the slowest to start first."""
        config = self._config
        others = [
            (Role.TRAINER, 1, config.trainer.threads),
        ]
        placements = [
            Placement(f"{role}-{number}", role, HARDWARE_CLASS, {"OMP_NUM_THREADS": str(threads)})
            for role, count, threads in others
            for number in range(count)
        ]
        return [*self._inference(), *placements, *self._environments()]

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

    def _inference(self) -> list[Placement]:
        inference = self._config.inference
        found: list[Placement] = []
        for pool in inference.all_pools:
            for position in range(pool.workers):
                variables = {"OMP_NUM_THREADS": str(pool.threads or inference.threads)}
                if pool.devices:
                    variables["CUDA_VISIBLE_DEVICES"] = str(pool.devices[position])
                name = f"{Role.INFERENCE}-{len(found)}"
                found.append(Placement(name, Role.INFERENCE, pool.hardware, variables))
        return found

    def pool_of(self, worker: str, hardware: str) -> Pool:
        """The pool that an inference worker of that name and class belongs to."""
        _, _, number = worker.rpartition("-")
        return self._config.inference.pool_of(int(number) if number.isdecimal() else None, hardware)

    def changed(self, worker: str, hardware: str, *, ready: bool) -> None:
        """An inference worker became ready, or is gone."""
        if ready:
            self._ready[worker] = hardware
        else:
            self._ready.pop(worker, None)

    @property
    def ready(self) -> dict[str, list[str]]:
        """Of each hardware class, the inference workers that are ready now, by name."""
        found: dict[str, list[str]] = {name: [] for name in self._orders.classes}
        for worker, hardware in sorted(self._ready.items()):
            found.setdefault(hardware, []).append(worker)
        return found

    def explain(self) -> str:
        """The placement as a person reads it, a line a worker, and what goes where."""
        lines = [self._line(placement) for placement in self.placements()]
        return "\n".join([*lines, *self._affinities()])

    def _line(self, placement: Placement) -> str:
        processes = {
            str(Role.TRAINER): self._config.trainer.processes,
            str(Role.INFERENCE): self._config.inference.tensor_parallel,
        }.get(placement.role, 1)
        what = "a process" if processes == 1 else f"{processes} processes"
        text = (
            f"{placement.name:<16} {what} of this machine, hardware class {placement.hardware_class}, "
            f"{placement.environment['OMP_NUM_THREADS']} thread(s)"
        )
        if placement.interpreter:
            text += f", of {placement.interpreter}"
        if placement.tasks:
            text += f", for {','.join(placement.tasks)}"
        if placement.role != Role.INFERENCE:
            return text
        pool = self.pool_of(placement.name, placement.hardware_class)
        device = placement.environment.get("CUDA_VISIBLE_DEVICES")
        parts = [
            "" if device is None else f"GPU {device}",
            "" if pool.phase is Phase.BOTH else f"for {pool.phase}",
            "" if pool.slowdown == 1 else f"slowed down {pool.slowdown:g} times",
        ]
        return ", ".join([text, *filter(None, parts)])

    def _affinities(self) -> list[str]:
        if self._orders.trivial:
            return []
        lines = []
        for task in self._config.tasks:
            order = self._orders.of(task.name)
            if order.split:
                where = f"prefill on {_chain(order.prefill)}, decode on {_chain(order.decode)}"
            else:
                where = f"on {_chain(order.whole)}"
            lines.append(f"task {task.name:<11} {where}")
        if self._config.inference.hw_affinity == AUTO:
            lines.append("hw_affinity auto: the order of each task is proposed once its turns are known")
        return lines


def _chain(classes: tuple[str, ...]) -> str:
    first, *rest = classes
    return f"{first}, else {', then '.join(rest)}" if rest else first


def role_and_number(worker: str) -> tuple[Role, int]:
    """What a placement's name says: the role, and which of its workers from 0."""
    role, _, number = worker.rpartition("-")
    return Role(role), int(number)
