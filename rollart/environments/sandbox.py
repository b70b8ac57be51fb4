"""A place for code that a policy wrote: a private folder, no network, limits, and nothing left behind.

The strongest isolation that the machine offers is used, and said at start:

* ``bubblewrap``: the program ``bwrap`` makes the namespaces;
* ``namespaces``: the same by util-linux's ``unshare``: own processes, mounts, network and users.  The code sees the
  system's programs and this Python read-only, an own ``/tmp``, its folder as ``/workspace``, and nothing else;
* ``limits``: an own process group and resource limits only.  The network and the user's files stay within reach: for
  code that is trusted.

In all of them a command has a deadline, limits of CPU time, memory, processes, file size and output, a clean
environment, and all that it started is killed when it ends.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import selectors
import shutil
import site
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollart.environments.environment import Unavailable
from rollart.processes import MARK, end_marked, tree_usage

__all__ = ["Finished", "Isolation", "Limits", "Sandbox", "best_isolation"]

WORKSPACE = "/workspace"
LOOK_EVERY_S = 0.25
"""At what all processes of a command use together."""
DEVICES = ("null", "zero", "full", "random", "urandom")
ETC = ("alternatives", "ld.so.cache", "passwd", "group", "localtime", "mime.types")
LIMIT = 'ulimit -c 0; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; ulimit -n 256; shift 3; exec "$@"'


class Isolation(enum.StrEnum):
    """How much a sandbox keeps apart."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LIMITS = "limits"

    def describe(self) -> str:
        """For people."""
        if self is Isolation.LIMITS:
            return "limits only: the network and this user's files are within reach of the code"
        return f"{self.value}: no network, own processes, own files"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one command."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process."""
    memory_mib: int = 1024
    """Address space of each process, and resident memory of all together."""
    processes: int = 64
    file_mib: int = 64
    """Of each file."""
    output_characters: int = 20_000
    """Of more, the beginning and the end are kept."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What came of a command."""

    code: int
    """Its exit code; negative is a signal."""
    output: str
    """stdout and stderr, as they came."""
    stopped: str = ""
    """Why it was stopped, for people and policies; empty when it ended by itself."""


class Sandbox:
    """A private folder and commands in it; for use in one thread at a time."""

    def __init__(self, limits: Limits | None = None, *, isolation: Isolation | None = None) -> None:
        """By default with the best isolation that this machine offers."""
        self.limits = limits or Limits()
        self.isolation = isolation or best_isolation()
        self._name = uuid.uuid4().hex
        self._base = Path(tempfile.mkdtemp(prefix="rollart-sandbox-"))
        self.folder = self._base / "workspace"
        """Where the code's files are; ``/workspace`` inside, but with ``limits``."""
        self.folder.mkdir()
        if self.isolation is Isolation.NAMESPACES:
            (self._base / "root").mkdir()
            (self._base / "fstab").write_text(_fstab(self._base))

    def run(self, command: str | Sequence[str], *, stdin: str = "", wall_s: float | None = None) -> Finished:
        """Carry out a program, or a line for the shell; ``Unavailable`` when the machine can't.

        However it ends, no process that it started is alive afterwards.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        limits = self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self._wrapped(words, limits),
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=self._environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"the sandbox can't start a process: {error}") from None
        try:
            return _follow(process, limits)
        finally:
            self._end(process)

    def close(self) -> None:
        """Remove the folder and whatever runs still."""
        end_marked(self._mark)
        shutil.rmtree(self._base, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how ------------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        return f"ROLLART_SANDBOX={self._name}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, 9)
        process.wait()
        if self.isolation is Isolation.LIMITS:  # what left the process group
            end_marked(self._mark)
        if process.stdout is not None:
            process.stdout.close()

    def _environment(self) -> dict[str, str]:
        inside = self.isolation is not Isolation.LIMITS
        home = WORKSPACE if inside else str(self.folder)
        kept = {name: value for name, value in os.environ.items() if name == MARK}
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": "/tmp" if inside else home,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "ROLLART_SANDBOX": self._name,
            **kept,
        }

    def _wrapped(self, words: list[str], limits: Limits) -> list[str]:
        amounts = (limits.cpu_s, limits.memory_mib * 1024, limits.file_mib * 2048)  # s, KiB, blocks of 512
        limited = ["/bin/sh", "-c", LIMIT, "limits", *map(str, amounts), *words]
        if self.isolation is Isolation.BUBBLEWRAP:
            return [*_bubblewrap(self.folder), *limited]
        if self.isolation is Isolation.NAMESPACES:
            return [*_unshare(self._base), *limited]
        return limited


def _follow(process: subprocess.Popen[bytes], limits: Limits) -> Finished:
    """Read what the process writes until it ends, or has to be stopped."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    kept = _Kept(limits.output_characters)
    deadline = time.monotonic() + limits.wall_s
    look_at = time.monotonic() + LOOK_EVERY_S
    stopped, open_ = "", True
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while process.poll() is None and not stopped:
            if not open_:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(min(deadline, look_at) - time.monotonic(), 0))
            elif selector.select(max(min(deadline, look_at) - time.monotonic(), 0)):
                open_ = _drain(descriptor, kept)
                if not open_:
                    selector.unregister(descriptor)
            now = time.monotonic()
            if now >= deadline:
                stopped = f"it took longer than {limits.wall_s:g} s"
            elif now >= look_at:
                stopped, look_at = _excess(process.pid, limits), now + LOOK_EVERY_S
        if open_:
            _drain(descriptor, kept)
    code = process.poll()
    return Finished(-9 if code is None else code, kept.text(), stopped)


def _excess(root: int, limits: Limits) -> str:
    """What all the processes use too much of."""
    processes, resident = tree_usage(root)
    if processes > limits.processes + 3:  # of the sandbox itself
        return f"it had more than {limits.processes} processes"
    if resident > limits.memory_mib << 20:
        return f"its processes used more than {limits.memory_mib} MiB"
    return ""


def _drain(descriptor: int, kept: _Kept) -> bool:
    """Take what there is; whether more may come."""
    for _ in range(64):  # then the deadline is looked at
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept.add(data)
    return True


class _Kept:
    """The beginning and the end of a long text."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first = bytearray()
        self._last = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._first)
        if room > 0:
            self._first += data[:room]
            data = data[room:]
        self._last += data
        if len(self._last) > 2 * self._half:
            self._left_out += len(self._last) - self._half
            del self._last[: -self._half]

    def text(self) -> str:
        over = max(len(self._last) - self._half, 0)
        left_out = self._left_out + over
        between = f"\n[… {left_out} bytes left out …]\n" if left_out else ""
        first, last = (
            part.decode("utf-8", "replace")
            for part in (self._first, self._last[over:] if over else self._last)
        )
        return f"{first}{between}{last}"


# --- isolation ----------------------------------------------------------------------------------------------


@functools.cache
def best_isolation() -> Isolation:
    """The strongest that works here; tried once in a process, by running something in each."""
    for isolation, program in (
        (Isolation.BUBBLEWRAP, "bwrap"),
        (Isolation.NAMESPACES, "unshare"),
    ):
        if shutil.which(program) and _works(isolation):
            return isolation
    return Isolation.LIMITS


def _works(isolation: Isolation) -> bool:
    """Its folder can be written to, the system can't, and Python runs."""
    check = (
        f"echo x > mine && ! touch /usr/rollart-probe 2>/dev/null && test ! -e {Path.home() / '.rollart-probe'} "
        f"&& exec {sys.executable} -I -c 'import socket'"
    )
    with Sandbox(isolation=isolation) as sandbox:
        return sandbox.run(check).code == 0 and (sandbox.folder / "mine").is_file()


@functools.cache
def _shown() -> list[str]:
    """Folders that the code may read: the system's programs and libraries, and this Python with its packages."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
    python = [sys.prefix, sys.base_prefix]
    program = Path(sys.executable)
    while program.is_symlink():  # a virtual environment's python may be another one's, and so on
        program = program.parent / program.readlink()
        python.append(str(program.parent.parent))
    python += site.getsitepackages() + [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    for folder in python:
        if not any(folder == there or folder.startswith(f"{there}/") for there in wanted):
            wanted.append(folder)
    return [folder for folder in wanted if Path(folder).exists()]


def _bubblewrap(folder: Path) -> list[str]:
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for shown in _shown():
        kind = (
            ["--symlink", str(Path(shown).readlink())] if Path(shown).is_symlink() else ["--ro-bind", shown]
        )
        words += [*kind, shown]
    for name in ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return [*words, "--bind", str(folder), WORKSPACE, "--chdir", WORKSPACE, "--"]


def _unshare(base: Path) -> list[str]:
    """Own namespaces; the new root is a file system in memory, and the old one is gone before the code begins.

    Its capabilities are gone as well, so that no mount can be undone.
    """
    unshare = "unshare --user --map-root-user --mount --net --pid --ipc --uts --fork --kill-child=KILL"
    return [*unshare.split(), "/bin/sh", "-ec", _script(), "sandbox", str(base)]


@functools.cache
def _script() -> str:
    """Few programs, since each command has to wait for them: one ``mount`` reads all from ``fstab``."""
    folders = [f"'.{shown}'" for shown in _shown() if not Path(shown).is_symlink()]
    links = [(Path(shown).readlink(), shown) for shown in _shown() if Path(shown).is_symlink()]
    copies = [f"'{Path('/etc') / name}'" for name in ETC if (Path("/etc") / name).exists()]
    devices = " ".join(f"dev/{name}" for name in DEVICES)
    return "\n".join(
        [
            'PATH=$PATH:/usr/sbin:/sbin base=$1; shift; cd "$base/root"',
            'mount -t tmpfs -o size=64m,mode=755 tmpfs "$PWD"; cd "$PWD"',
            "mkdir -p proc dev etc tmp workspace; mount -t tmpfs -o size=256m tmpfs tmp",
            f"mkdir -p {' '.join(folders)}; touch {devices}; cp -RP {' '.join(copies)} etc/ 2>/dev/null || true",
            *(f"ln -s '{target}' '.{name}'" for target, name in links),
            'mount -a -T "$base/fstab"',
            "pivot_root . .; umount -l .; mount -o remount,ro /; cd /workspace",
            'exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all -- "$@"',
        ]
    )


def _fstab(base: Path) -> str:
    """What is mounted below ``base/root``."""
    root = base / "root"
    binds = [
        (Path(shown), f"{root}{shown}", "rbind,ro") for shown in _shown() if not Path(shown).is_symlink()
    ]
    binds += [(Path("/dev") / name, f"{root}/dev/{name}", "bind") for name in DEVICES]
    binds.append((base / "workspace", f"{root}{WORKSPACE}", "bind"))
    lines = [f"{_escaped(source)} {_escaped(target)} none {how} 0 0" for source, target, how in binds]
    return "\n".join([*lines, f"proc {_escaped(root)}/proc proc defaults 0 0", ""])


def _escaped(path: object) -> str:
    """As fstab writes a path."""
    return (
        str(path).replace("\\", r"\134").replace(" ", r"\040").replace("\t", r"\011").replace("\n", r"\012")
    )
