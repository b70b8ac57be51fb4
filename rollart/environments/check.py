"""``python -m rollart.environments.check``: can these tasks' environments and agents be loaded, with these options?

A process of its own, since an environment's module may import anything, and the controller imports none of it.
Reads the tasks as JSON from stdin; says on stdout ``good``, or what is wrong as one line, and exits 0 either way.
What the environments' own code prints goes to stderr.
"""

from __future__ import annotations

import os
import shutil
import sys

import msgspec

from rollart.config import Task
from rollart.environments.loading import load_agent, load_task
from rollart.errors import ConfigError

GOOD = "good"
"""The answer when all can be loaded."""


def main() -> None:
    """Check each task."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Task])
    for task in tasks:
        try:
            _check(task)
        except ConfigError as error:
            answer.write(f"{error}\n")
            answer.flush()
            return
    answer.write(f"{GOOD}\n")
    answer.flush()


def _check(task: Task) -> None:
    if task.environment is not None:
        load_task(task, 0)
    if task.agent is not None:
        load_agent(task.name, task.agent)
    if task.agent_command is not None and shutil.which(task.agent_command[0]) is None:
        raise ConfigError(
            f"task {task.name}: agent_command: there is no program {task.agent_command[0]!r} to run"
        )


if __name__ == "__main__":
    main()
