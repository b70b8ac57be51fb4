"""Worker methods that a script could declare."""

from __future__ import annotations

from typing import Any

from rollart import Worker, hw_mapping, register


class ActorGen(Worker):
    role = "inference"

    @register(mode="execute_all")
    async def name_and(self, number: int) -> list[Any]:
        return [self.worker.name, number]

    @register(mode="execute_rank_zero")
    def first(self) -> str:
        return str(self.worker.name)

    @hw_mapping(hw_affinity={"Count": "H800", "default": "H20"})
    async def where(self) -> str:
        return str(self.worker.hardware_class)

    @register()
    def fails(self) -> None:
        raise KeyError("nothing here")

    def undeclared(self) -> None:
        pass
