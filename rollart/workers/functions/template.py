"""A function's template: a process that has imported it, and forks instances of itself.

``python -m rollart.workers.functions.template FD FUNCTION MEMORY_MIB CALLS PARENT``, started by the host with one end
of a socket pair.  The host says ``fork NUMBER`` with the instance's socket, or ``kill PID``; the template answers
``ready`` or ``broken WHY``, ``forked NUMBER PID`` and ``ended PID STATUS``.  It runs no user code after the import, has
one thread, and an instance that it forks leads a process group, so that whatever it started ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys

from rollart.errors import ConfigError
from rollart.rewards.loading import RewardFunction, load_function
from rollart.workers.functions.instance import serve

__all__ = ["THREAD_VARIABLES"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Set to 1 for templates: libraries make no threads at import, which would not survive a fork."""
MESSAGE = 4096


def end_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(0)


def main() -> int:
    """Import the function, then fork on demand until the host closes the connection."""
    descriptor, path, memory, calls, parent = sys.argv[1:]
    end_with(int(parent))
    host = socket.socket(fileno=int(descriptor))
    try:
        function = load_function(path)
    except ConfigError as error:
        host.send(f"broken {error}".encode()[:MESSAGE])
        return 1
    gc.collect()
    gc.freeze()  # instances share the memory of what is imported
    host.send(b"ready")
    _Template(host, function, int(memory), int(calls)).run()
    return 0


class _Template:
    """Forks, kills and buries instances."""

    def __init__(self, host: socket.socket, function: RewardFunction, memory_mib: int, calls: int) -> None:
        self._host = host
        self._function = function
        self._memory_mib = memory_mib
        self._calls = calls
        self._instances: set[int] = set()

    def run(self) -> None:
        """Until the host is gone."""
        wake_out, wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        try:
            while True:
                ready, _, _ = select.select([self._host.fileno(), wake_out], [], [])
                if wake_out in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_out, MESSAGE)
                    self._bury()
                if self._host.fileno() in ready and not self._obey():
                    return
        finally:
            for pid in self._instances:
                _kill(pid)

    def _obey(self) -> bool:
        """Do what the host says; whether it is still there."""
        message, descriptors, _, _ = socket.recv_fds(self._host, MESSAGE, 1)
        if not message:
            return False
        verb, _, argument = message.decode().partition(" ")
        if verb == "fork":
            self._fork(argument, descriptors[0])
        elif (
            verb == "kill" and int(argument) in self._instances
        ):  # not buried yet, so the number is still its own
            _kill(int(argument))
        return True

    def _fork(self, number: str, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # for what an instance starts
        template = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._instances.add(pid)
            with contextlib.suppress(OSError):  # the instance may have done it, or have ended
                os.setpgid(pid, pid)
            self._host.send(f"forked {number} {pid}".encode())
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            end_with(template)
            self._host.close()
            if self._memory_mib:
                limit = self._memory_mib << 20
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            serve(socket.socket(fileno=descriptor), self._function, self._calls)
            code = 0
        finally:
            os._exit(code)  # nothing of the template's own is to run here

    def _bury(self) -> None:
        while self._instances:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._instances:
                self._instances.remove(pid)
                _kill(pid)  # whatever it started and left behind
                self._host.send(f"ended {pid} {os.waitstatus_to_exitcode(status)}".encode())


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _nothing(signum: int, frame: object) -> None:
    """The wake-up descriptor is told."""


if __name__ == "__main__":
    sys.exit(main())
