"""``python -m rollart.environments.check``: can these tasks' environments be loaded, with these options?

A process of its own, since an environment's module may import anything, and the controller imports none of it.
Reads the tasks as JSON from stdin; says what is wrong as one line on stdout, and exits 0 either way.  What the
environments' own code prints goes to stderr.
"""

from __future__ import annotations

import os
import sys

import msgspec

from rollart.config import Task
from rollart.environments.loading import load_task
from rollart.errors import ConfigError


def main() -> None:
    """Check each task."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Task])
    for task in tasks:
        try:
            load_task(task, 0)
        except ConfigError as error:
            answer.write(f"{error}\n")
            answer.flush()
            return


if __name__ == "__main__":
    main()
