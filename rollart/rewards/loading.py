"""From a reward's import path to something that can be called, with errors a person can act on."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollart.environments.loading import cause
from rollart.errors import ConfigError
from rollart.rewards.payload import Result, WrongScore, result_of, results_of
from rollart.rewards.view import TrajectoryView, Unavailable
from rollart.serverless import Declaration, declared

__all__ = ["RewardFunction", "load_function"]


class RewardFunction:
    """A reward function that is loaded.  Whatever it raises but ``Unavailable`` becomes a result's ``error``."""

    def __init__(self, path: str, call: Callable[..., Any]) -> None:
        self.path = path
        self.declaration: Declaration = declared(call)
        self.is_async = inspect.iscoroutinefunction(call)
        self._call = call

    def check_options(self, options: Mapping[str, Any], where: str) -> None:
        """``ConfigError`` when the function does not take ``options``."""
        try:
            signature = inspect.signature(self._call)
        except (TypeError, ValueError):  # one written in C may have none
            return
        known = [name for name in list(signature.parameters)[1:] if name not in ("args", "kwargs")]
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        for option in options:
            if option not in known and not anything:
                close = difflib.get_close_matches(option, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known) or 'none'}"
                raise ConfigError(f"{where}: {self.path} has no option {option!r}{hint}")
        try:
            signature.bind(None, **options)
        except TypeError as error:
            raise ConfigError(f"{where}: {self.path} can't be called with these options: {error}") from None

    def results(
        self, scope: str, trajectories: Sequence[TrajectoryView], options: Mapping[str, Any]
    ) -> list[Result]:
        """The results of a plain function; ``Unavailable`` when the machinery failed."""
        if scope == "group":
            return self._group(trajectories, lambda: self._call(list(trajectories), **options))
        return [self._one(each, partial(self._call, each, **options)) for each in trajectories]

    async def results_async(
        self, scope: str, trajectories: Sequence[TrajectoryView], options: Mapping[str, Any]
    ) -> list[Result]:
        """The results of an ``async def``; ``Unavailable`` when the machinery failed."""
        if scope == "group":
            returned = await _outcome(self._call(list(trajectories), **options))
            return self._group(trajectories, lambda: _value(returned))
        results = []
        for each in trajectories:
            outcome = await _outcome(self._call(each, **options))
            results.append(self._one(each, partial(_value, outcome)))
        return results

    def _one(self, trajectory: TrajectoryView, call: Callable[[], Any]) -> Result:
        try:
            return result_of(call(), trajectory)
        except Unavailable:
            raise
        except WrongScore as error:
            return Result(error=f"{self.path} {error}")
        except BaseException as error:  # the boundary of foreign code, which may even call sys.exit
            return Result(error=f"{self.path} raised {cause(error)}")

    def _group(self, trajectories: Sequence[TrajectoryView], call: Callable[[], Any]) -> list[Result]:
        try:
            return results_of(call(), trajectories)
        except Unavailable:
            raise
        except WrongScore as error:
            return [Result(error=f"{self.path} {error}")] * len(trajectories)
        except BaseException as error:  # as above
            return [Result(error=f"{self.path} raised {cause(error)}")] * len(trajectories)


class _Outcome(msgspec.Struct):
    value: Any = None
    error: BaseException | None = None


async def _outcome(call: Awaitable[Any]) -> _Outcome:
    try:
        return _Outcome(await call)
    except Exception as error:  # told by _value, where it is classified; a cancellation passes
        return _Outcome(error=error)


def _value(outcome: _Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def load_function(path: str, where: str = "reward") -> RewardFunction:
    """The function at ``module:function``, or the method at ``module:Class.method`` of a new ``Class()``.

    The working directory is importable, too.  ``ConfigError``, in one line, that says what of ``path`` is not
    there, or where the user's code raised.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    module_name, _, name = path.partition(":")
    where = f"{where}: function {path!r}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            looked = f" (looked for in {here} and among what is installed)" if "." not in error.name else ""
            raise ConfigError(f"{where}: there is no module {error.name}{looked}") from None
        raise ConfigError(f"{where}: importing {module_name} failed: {cause(error)}") from None
    except BaseException as error:  # the boundary of a user's module, which may even call sys.exit
        raise ConfigError(f"{where}: importing {module_name} failed: {cause(error)}") from None
    found: Any = module
    *classes, last = name.split(".")
    for part in classes:
        found = _attribute(found, part, where)
        try:
            found = found() if inspect.isclass(found) else found
        except BaseException as error:  # the boundary of a user's constructor
            raise ConfigError(f"{where}: {part}() raised {cause(error)}") from None
    found = _attribute(found, last, where)
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(f"{where}: {last} is a {type(found).__name__}, it must be a function")
    return RewardFunction(path, found)


def _attribute(owner: Any, name: str, where: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        there = [each for each in dir(owner) if not each.startswith("_")]
        close = difflib.get_close_matches(name, there, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        kind = getattr(owner, "__name__", type(owner).__name__)
        raise ConfigError(f"{where}: {kind} has no {name}{hint}")
    return found
