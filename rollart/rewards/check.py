"""``python -m rollart.rewards.check``: can these tasks' reward functions be loaded, and what do they declare?

A process of its own, since a function's module may import anything, and the controller imports none of it.  Reads
the tasks as JSON from stdin; answers with one JSON object on stdout, ``error`` or the ``declared`` of each function.
What the functions' own code prints goes to stderr.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import msgspec

from rollart.config import Task
from rollart.config.rewards import IN_PROCESS, LOCAL
from rollart.errors import ConfigError
from rollart.rewards.loading import load_function
from rollart.serverless import Declaration

__all__ = ["Checked"]


NEEDS = {
    "rollart.rewards.maths:maths_check": ("math_verify", "math-verify"),
    "rollart.rewards:schema_check": ("jsonschema", "jsonschema"),
    "rollart.rewards.kinds:schema_check": ("jsonschema", "jsonschema"),
}
"""Built-in functions that need a package beyond RollArt's own: its module, its name."""


class Checked(msgspec.Struct):
    """The answer."""

    error: str = ""
    declared: dict[str, Declaration] = {}
    """By import path; only of functions that run on this machine, or that could be loaded."""


def check(tasks: list[Task], *, names_only: bool = False) -> Checked:
    """Load each function, and try its options where not only the names are known (``--names``)."""
    found: dict[str, Declaration] = {}
    for task in tasks:
        for reward in task.rewards:
            if reward.function is None:
                continue
            where = f"task {task.name}: reward"
            try:
                function = load_function(reward.function, where)
                if not names_only:
                    function.check_options(reward.options, where)
                _check_packages(reward.function, where)
            except ConfigError as error:
                # An endpoint's function may be written in another language: only its name is known here.
                if reward.url is None or reward.url in (IN_PROCESS, LOCAL):
                    return Checked(error=str(error))
                continue
            found[reward.function] = function.declaration
    return Checked(declared=found)


def _check_packages(function: str, where: str) -> None:
    module, package = NEEDS.get(function, ("", ""))
    if module and find_spec(module) is None:
        raise ConfigError(
            f"{where}: {function} needs the package {package}, which is not installed: pip install rollart[rewards]"
        )


def main() -> None:
    """Check each task."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Task])
    answer.write(msgspec.json.encode(check(tasks, names_only="--names" in sys.argv[1:])))
    answer.flush()


if __name__ == "__main__":
    main()
