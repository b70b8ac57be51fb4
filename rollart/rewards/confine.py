"""Runs a command confined: ``python confine.py LIMITS FOLDER COMMAND…``, started by ``code_tests``.

Limits of CPU time, memory, file size, open files and processes; and, where the kernel lets an ordinary user have them,
namespaces of its own for users, network (none but a loopback that is down), processes (all end with the first) and IPC.
Says ``i`` (isolated) or ``s`` (shared) on the descriptor that ROLLART_TELL names.  Imports nothing of RollArt, so that
it starts fast.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import NoReturn

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> int:
    """Confine, run, and end as the command does: with its code, or 128 + its signal."""
    limits, folder, *command = json.loads(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    isolated = libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC) == 0
    tell = int(os.environ["ROLLART_TELL"])
    os.write(tell, b"i" if isolated else b"s")
    os.close(tell)
    pid = os.fork()
    if not pid:
        run(libc, limits, folder, command)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def run(libc: ctypes.CDLL, limits: dict[str, int], folder: str, command: list[str]) -> NoReturn:
    """Become the command, in the child."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.chdir(folder)
    os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"})


if __name__ == "__main__":
    sys.exit(main())
