"""A script's own view of a run: what it declares, and the workers that its clusters call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollart import Cluster, ConfigError, ResourceManager, RunError, hw_mapping, register
from rollart.controller import events
from rollart.controller.controller import Outcome
from rollart.declare import Worker
from tests.declared import ActorGen
from tests.scripted import Script, ScriptedRun, config_of


async def test_a_cluster_calls_the_methods_in_the_workers_of_its_run(tmp_path: Path) -> None:
    resources = ResourceManager({"H800": range(1), "H20": range(1, 3)})
    actors = Cluster(ActorGen, resources)
    config = actors.apply(config_of(steps=500))
    assert [(pool.hardware, pool.devices) for pool in config.inference.pools] == [
        ("H800", [0]),
        ("H20", [1, 2]),
    ]
    assert config.inference.hw_affinity == {"Count": "H800", "default": "H20"}
    with pytest.raises(RunError, match="belongs to no run"):
        await actors.first()

    run = ScriptedRun(config, Script(), tmp_path / "run", clusters=[actors])
    running = asyncio.create_task(run.controller.run())
    async with asyncio.timeout(20):
        await actors.ready()
    names = [f"inference-{number}" for number in range(3)]
    assert await actors.name_and(7) == [[name, 7] for name in names]
    assert await actors.first() == "inference-0"
    assert await actors.where(tag_name="Count") == "H800"
    assert await actors.where(tag_name="another") == "H20"
    assert resources.view() == {"H800": names[:1], "H20": names[1:]}
    with pytest.raises(RunError, match=r"ActorGen\.fails.*KeyError: 'nothing here'"):
        await actors.fails()
    with pytest.raises(AttributeError, match="declares no method 'undeclared'"):
        await actors.undeclared()
    with pytest.raises(ConfigError, match="can't be sent"):
        await actors.name_and(object())

    run.controller.switchboard.lose(run.controller.switchboard.links["inference-0"], "the test says so")
    assert await actors.where(tag_name="Count") == "H20"
    run.controller.interrupt()
    assert await running is Outcome.INTERRUPTED
    assert resources.view() == {}
    bound = [e for e in run.events if isinstance(e, events.Bound) and e.trajectory < 0]
    assert [(e.task, e.wanted, e.hardware_class, bool(e.reason)) for e in bound] == [
        ("Count", "H800", "H800", False),
        ("another", "H20", "H20", False),
        ("Count", "H800", "H20", True),
    ]


def test_what_can_not_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode is 'all'"):
        register(mode="all")
    with pytest.raises(ConfigError, match="hw_affinity is empty"):
        hw_mapping(hw_affinity={})
    with pytest.raises(ConfigError, match="@hw_mapping: Expected"):
        hw_mapping(hw_affinity={"Count": 5})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="device 1 is of H800 and of H20"):
        ResourceManager({"H800": range(2), "H20": range(1, 3)})
    with pytest.raises(ConfigError, match="class H800 has no device"):
        ResourceManager({"H800": []})

    class InAFunction(Worker):
        __module__ = "__main__"

    with pytest.raises(ConfigError, match="put it into a module"):
        Cluster(InAFunction)
    config = config_of(
        inference={"pools": [{"hardware": "H800"}, {"hardware": "H20"}], "hw_affinity": {"Count": "H20"}}
    )
    with pytest.raises(ConfigError, match="differs from what"):
        Cluster(ActorGen).apply(config)
    with pytest.raises(ConfigError, match="has 1 workers, the ResourceManager 4"):
        ResourceManager({"H800": range(4), "H20": range(4, 6)}).apply(config)
