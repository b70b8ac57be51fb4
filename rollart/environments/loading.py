"""From a task's import path and options to its environment class, with errors a person can act on."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rollart.config import Task
from rollart.environments.dataset import Rows, load_rows
from rollart.environments.environment import Environment
from rollart.errors import ConfigError

__all__ = ["Blueprint", "cause", "load_agent", "load_environment", "load_task"]

MAX_CAUSE = 500


class Blueprint:
    """How the episodes of one task are made and played."""

    def __init__(self, environment: type[Any], options: Mapping[str, Any]) -> None:
        self.environment = environment
        self.options = dict(options)
        self.name = environment.__name__
        self.reset_is_async = inspect.iscoroutinefunction(environment.reset)
        self.step_is_async = inspect.iscoroutinefunction(environment.step)
        close = getattr(environment, "close", None)
        self.close_is_async = inspect.iscoroutinefunction(close)
        self.closes = callable(close) and close is not Environment.close
        self.rows: Rows | None = None
        """Where the instances are rows of a dataset."""

    @property
    def takes_row(self) -> bool:
        """``reset`` has a parameter for the instance's row."""
        return "row" in inspect.signature(self.environment.reset).parameters

    @property
    def row_is_optional(self) -> bool:
        """That parameter has a default."""
        parameter = inspect.signature(self.environment.reset).parameters["row"]
        return parameter.default is not inspect.Parameter.empty

    def build(self) -> Any:
        """A new environment."""
        return self.environment(**self.options)


def load_task(task: Task, seed: int) -> Blueprint:
    """The environment of ``task``, with its dataset where it has one; ``seed`` is the run's.  Errors as of
    ``load_environment``."""
    assert task.environment is not None
    blueprint = load_environment(task.name, task.environment, task.options)
    where = f"task {task.name}"
    if task.dataset is not None:
        if not blueprint.takes_row:
            raise ConfigError(
                f"{where}: {blueprint.name}.reset has no parameter row, so its dataset would do nothing: "
                "reset(self, seed, split, row)"
            )
        blueprint.rows = load_rows(where, task.dataset, seed)
    elif blueprint.takes_row and not blueprint.row_is_optional:
        raise ConfigError(f"{where}: {blueprint.name}.reset wants a row, but the task names no dataset")
    return blueprint


def load_environment(task: str, path: str, options: Mapping[str, Any]) -> Blueprint:
    """The environment at import path ``path``, ``module:Class``; the working directory is importable, too.

    ``ConfigError``, in one line, that says what of ``path`` is not there and what is, which option the class
    does not have, or where the user's code raised.  The class is built once to check the options.
    """
    where = f"task {task}: environment {path!r}"
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    module_name, _, class_name = path.partition(":")
    environment = _class(_module(module_name, where), class_name, where)
    blueprint = Blueprint(environment, options)
    _check_options(blueprint, where)
    return blueprint


def load_agent(task: str, path: str) -> Callable[..., Any]:
    """The agent at import path ``path``, ``module:function``; errors as of ``load_environment``."""
    where = f"task {task}: agent {path!r}"
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    module_name, _, name = path.partition(":")
    module = _module(module_name, where)
    found = getattr(module, name, None)
    if found is None:
        there = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(name, there, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"{where}: {module.__name__} has no {name}{hint}")
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, it must be a function")
    try:
        inspect.signature(found).bind(object())
    except TypeError as error:
        raise ConfigError(f"{where}: {name} must take one argument, the episode: {error}") from None
    except ValueError:  # a function written in C may have no signature
        pass
    return cast("Callable[..., Any]", found)


def cause(error: BaseException) -> str:
    """What was raised and where, in one line."""
    lines = traceback.format_exception_only(error)
    text = " ".join(lines[-1].split()) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    if len(text) > MAX_CAUSE:
        text = f"{text[:MAX_CAUSE]}…"
    return f"{text}{place}"


def _module(name: str, where: str) -> ModuleType:
    missing = _missing_part(name, where)
    if missing:
        looked = f" (looked for in {Path.cwd()} and among what is installed)" if "." not in missing else ""
        raise ConfigError(
            f"{where}: there is no module {missing}{_near(missing, _siblings(missing))}{looked}"
        )
    try:
        return importlib.import_module(name)
    except BaseException as error:  # the boundary of a user's module, which may even call sys.exit
        raise ConfigError(f"{where}: importing {name} failed: {cause(error)}") from None


def _missing_part(name: str, where: str) -> str:
    """The shortest part of a dotted module name that is not there; empty when all of it is."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        try:
            found = importlib.util.find_spec(part)
        except (ValueError, ModuleNotFoundError):  # no module of that name, or its parent is no package
            found = None
        except BaseException as error:  # finding a.b imports a, which is the user's code
            raise ConfigError(f"{where}: importing a parent of {part} failed: {cause(error)}") from None
        if found is None:
            return part
    return ""


def _siblings(module: str) -> list[str]:
    """The modules beside ``module``; for one at the top, those of the working directory and the installed."""
    parent = module.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", []) if parent else None
    prefix = f"{parent}." if parent else ""
    return [f"{prefix}{found.name}" for found in pkgutil.iter_modules(path)]


def _class(module: ModuleType, name: str, where: str) -> type[Any]:
    found = getattr(module, name, None)
    if found is None:
        there = [n for n, value in vars(module).items() if _plays(value) and value is not Environment]
        raise ConfigError(f"{where}: {module.__name__} has no {name}{_near(name, there, show_all=True)}")
    if not inspect.isclass(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, it must be a class")
    if not _plays(found):
        lacks = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
        raise ConfigError(
            f"{where}: {name} has no method {' and no '.join(lacks)}; an environment has reset(seed, split) "
            "and step(action), see rollart.environments.Environment"
        )
    return found


def _plays(value: object) -> bool:
    return inspect.isclass(value) and all(callable(getattr(value, m, None)) for m in ("reset", "step"))


def _near(name: str, there: Iterable[str], *, show_all: bool = False) -> str:
    there = list(there)
    close = difflib.get_close_matches(name, there, n=2)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; its environments are {', '.join(there)}" if show_all and there else ""


def _check_options(blueprint: Blueprint, where: str) -> None:
    try:
        signature = inspect.signature(blueprint.environment)
    except (TypeError, ValueError):  # a class written in C may have none
        signature = None
    if signature is not None:
        known = [name for name in signature.parameters if name not in ("args", "kwargs")]
        for option in blueprint.options:
            if option not in signature.parameters and not _takes_any(signature):
                near = _near(option, known) or f"; it has {', '.join(known) or 'none'}"
                raise ConfigError(f"{where}: {blueprint.name} has no option {option!r}{near}")
    try:
        blueprint.build()
    except BaseException as error:  # the boundary of a user's constructor
        raise ConfigError(
            f"{where}: {blueprint.name}({_arguments(blueprint.options)}) raised {cause(error)}"
        ) from None


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
