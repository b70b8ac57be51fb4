"""Calls of the methods that a script declared for a role's workers (see ``rollart.declare``)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import msgspec

from rollart.declare import Worker, declaration_of
from rollart.protocol import Execute, Executed
from rollart.workers.failures import Deterministic

__all__ = ["execute"]


async def execute(message: Execute, worker: Any, made: dict[str, Any]) -> Executed:
    """Call the method; ``made`` holds the objects of the declared classes.

    ``Deterministic`` for a method that is not declared or fails, and for a result that can't be sent.
    """
    try:
        if message.path not in made:
            made[message.path] = _class_at(message.path)(worker)
        target = made[message.path]
        if declaration_of(type(target), message.method) is None:
            raise TypeError(f"{message.path} declares no method {message.method}")
        args, kwargs = msgspec.msgpack.decode(message.arguments)
        result = getattr(target, message.method)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return Executed(message.seq, msgspec.msgpack.encode(result))
    except Exception as error:  # the boundary of a user's code
        raise Deterministic(f"{message.path}.{message.method}: {type(error).__name__}: {error}") from error


def _class_at(path: str) -> type[Worker]:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise TypeError(f"{path} is no rollart.Worker")
    return found
