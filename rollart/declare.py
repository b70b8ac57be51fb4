"""The paper's programming model: what a script declares about its workers, and the proxy through which it calls them.

``Worker`` holds methods that run inside the worker processes of a role.  ``@register`` says how a call is spread over
them, ``@hw_mapping`` that it goes by the task's tag to one of a hardware class.  ``ResourceManager`` declares the
hardware, ``Cluster`` binds the methods to the worker group of a run::

    class ActorGen(Worker):
        role = "inference"

        @register(mode="execute_all")
        async def live(self) -> int:
            return self.worker.engine.live

        @hw_mapping(hw_affinity={"FrozenLake": "H800", "default": "H20"})
        async def where(self) -> str:
            return self.worker.hardware_class


    resources = ResourceManager({"H800": range(0, 8), "H20": range(8, 32)})
    actors = Cluster(ActorGen, resources)
    run = asyncio.ensure_future(rollart.run(config, clusters=[actors]))
    await actors.ready()
    print(await actors.live(), await actors.where(tag_name="FrozenLake"))

Arguments and results travel as MessagePack: numbers, texts, bytes, lists and dicts with text keys.  A worker imports
the class by its module, so that has to be importable there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from rollart.config.routing import Affinity, Pool
from rollart.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rollart.config import Config
    from rollart.controller.cluster_calls import ClusterCalls

__all__ = ["Cluster", "Declaration", "ResourceManager", "Worker", "declaration_of", "hw_mapping", "register"]

EXECUTE_ALL, EXECUTE_RANK_ZERO = "execute_all", "execute_rank_zero"
Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "__rollart_declaration__"


class Declaration(msgspec.Struct, frozen=True):
    """How calls of a worker's method are spread."""

    mode: str = ""
    """``execute_all``: every worker of the role, the results in the order of their names; ``execute_rank_zero``: the
    first; empty: one, by ``hw_affinity``."""
    hw_affinity: Mapping[str, Affinity] = {}


def register(*, mode: str = EXECUTE_ALL) -> Callable[[Method], Method]:
    """Declare a worker's method: a call of it through a ``Cluster`` is spread as ``mode`` says."""
    if mode not in (EXECUTE_ALL, EXECUTE_RANK_ZERO):
        raise ConfigError(f"@register: mode is {mode!r}; there are {EXECUTE_ALL} and {EXECUTE_RANK_ZERO}")
    return lambda method: _marked(method, Declaration(mode))


def hw_mapping(*, hw_affinity: Mapping[str, Affinity]) -> Callable[[Method], Method]:
    """Declare a worker's method that runs on one worker, of the class that suits the task ``tag_name`` names.

    A tag that is not listed takes ``default``; a class that is busy or gone is passed over for the next.  On a worker
    of role inference it is the run's ``inference.hw_affinity`` too.
    """
    if not hw_affinity:
        raise ConfigError("@hw_mapping: hw_affinity is empty: give a class for a task, or for default")
    try:
        checked = msgspec.convert(dict(hw_affinity), dict[str, Affinity])
    except msgspec.ValidationError as error:
        raise ConfigError(f"@hw_mapping: {error}") from None
    return lambda method: _marked(method, Declaration(hw_affinity=checked))


def _marked(method: Method, declared: Declaration) -> Method:
    setattr(method, _MARK, declared)
    return method


def declaration_of(worker_class: type, name: str) -> Declaration | None:
    """What was declared of the method ``name``; ``None``: nothing, or there is no such method."""
    found: Declaration | None = getattr(getattr(worker_class, name, None), _MARK, None)
    return found


class Worker:
    """Methods that run in the worker processes of ``role``; made once in each, when it is first called."""

    role: ClassVar[str] = "inference"
    """``inference``, ``trainer`` or ``environment``."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        """The process's own worker: of role inference it has ``engine``, ``version``, ``hardware_class``, …"""


class ResourceManager:
    """The hardware that inference workers run on: of each class the devices, one worker each."""

    def __init__(self, pools: Mapping[str, Iterable[int]]) -> None:
        """``pools``: ``{"H800": range(0, 8), "H20": range(8, 32)}``; no device may be in two classes."""
        self.pools = {name: list(devices) for name, devices in pools.items()}
        self._run: ClusterCalls | None = None
        owners: dict[int, str] = {}
        for name, devices in self.pools.items():
            if not devices:
                raise ConfigError(f"ResourceManager: class {name} has no device")
            for device in devices:
                if device in owners:
                    raise ConfigError(
                        f"ResourceManager: device {device} is of {owners[device]} and of {name}"
                    )
                owners[device] = name

    def apply(self, config: Config) -> Config:
        """``config`` with these pools; those that it has already keep their settings, and must have as many workers."""
        own = {pool.hardware: pool for pool in config.inference.pools}
        if set(own) - set(self.pools):
            raise ConfigError(
                f"inference.pools has {', '.join(sorted(set(own) - set(self.pools)))}, the ResourceManager has not"
            )
        pools = []
        for name, devices in self.pools.items():
            pool = own.get(name, Pool(hardware=name, workers=len(devices)))
            if pool.workers != len(devices):
                raise ConfigError(
                    f"inference.pools: {name} has {pool.workers} workers, the ResourceManager {len(devices)} devices"
                )
            pools.append(msgspec.structs.replace(pool, devices=devices))
        return _replaced(config, pools=pools, workers=1)

    def view(self) -> dict[str, list[str]]:
        """Of each class, the workers of the bound run that are ready, by name; empty without a run."""
        return {} if self._run is None else self._run.view()


class Cluster:
    """The worker group of a role as one object: the declared methods of ``worker_class`` are its coroutines."""

    def __init__(self, worker_class: type[Worker], resources: ResourceManager | None = None) -> None:
        if worker_class.__module__ == "__main__":
            raise ConfigError(
                f"{worker_class.__qualname__} is in the script itself, which workers can't import: put it into a module"
            )
        self.worker_class = worker_class
        self.resources = resources
        self.path = f"{worker_class.__module__}:{worker_class.__qualname__}"
        self._calls: ClusterCalls | None = None
        self._bound: Any = None

    @property
    def affinity(self) -> dict[str, Affinity]:
        """What its methods declare by ``@hw_mapping``; ``ConfigError`` when two differ."""
        found: dict[str, Affinity] = {}
        for name in dir(self.worker_class):
            declared = declaration_of(self.worker_class, name)
            if declared is not None and declared.hw_affinity:
                if found and found != declared.hw_affinity:
                    raise ConfigError(f"{self.path}: its methods declare different hw_affinity")
                found = dict(declared.hw_affinity)
        return found

    def apply(self, config: Config) -> Config:
        """``config`` with what this cluster declares; ``ConfigError`` where the two disagree."""
        if self.resources is not None:
            config = self.resources.apply(config)
        affinity, own = self.affinity, config.inference.hw_affinity
        if self.worker_class.role != "inference" or not affinity or own == affinity:
            return config
        if own:
            raise ConfigError(f"inference.hw_affinity differs from what {self.path} declares by @hw_mapping")
        return _replaced(config, hw_affinity=affinity)

    async def ready(self) -> None:
        """Wait until the run serves."""
        import asyncio

        if self._calls is None:
            if self._bound is None:
                self._bound = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._bound)

    def bind(self, calls: ClusterCalls | None) -> None:
        """Belong to a run (which does this when it is ready), or to none when it is over."""
        self._calls = calls
        if self.resources is not None:
            self.resources._run = calls
        if calls is not None and self._bound is not None and not self._bound.done():
            self._bound.set_result(None)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        declared = declaration_of(self.worker_class, name)
        if declared is None:
            raise AttributeError(
                f"{self.path} declares no method {name!r}: mark it with @register or @hw_mapping"
            )

        async def call(*args: Any, tag_name: str = "default", **kwargs: Any) -> Any:
            if self._calls is None:
                raise RunError(f"{self.path} belongs to no run: await Cluster.ready() first")
            return await self._calls.call(self, name, declared, tag_name, args, kwargs)

        return call


def _replaced(config: Config, **inference: Any) -> Config:
    """``config`` with other inference settings, checked anew; ``ConfigError`` says what does not fit."""
    raw = msgspec.to_builtins(config)
    raw["inference"].update(msgspec.to_builtins(inference))
    try:
        return msgspec.convert(raw, type(config))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
