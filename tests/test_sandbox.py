"""The sandbox: what code in it may do, and what it leaves."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollart.environments.sandbox import Isolation, Limits, Sandbox, best_isolation


@pytest.fixture(params=["best", "limits"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    isolation = best_isolation() if request.param == "best" else Isolation.LIMITS
    with Sandbox(Limits(wall_s=20.0, memory_mib=512, file_mib=4), isolation=isolation) as made:
        yield made


def running(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_files_output_exit_codes_and_input(sandbox: Sandbox) -> None:
    done = sandbox.run("cat; echo problem >&2; exit 3", stdin="given\n")
    assert (done.code, done.output, done.stopped) == (3, "given\nproblem\n", "")
    (sandbox.folder / "code.py").write_text("open('made', 'w').write('é'); print('done')")
    assert sandbox.run(["python3", "code.py"]).output == "done\n"
    assert (sandbox.folder / "made").read_text() == "é"
    assert sandbox.run("pwd").output.strip() == sandbox._environment()["HOME"]
    assert sandbox.run(["./nothing"]).code in (126, 127)


def test_limits_stop_a_command_with_the_reason(sandbox: Sandbox) -> None:
    started = time.monotonic()
    done = sandbox.run("sleep 317 & sleep 317", wall_s=1.0)
    assert done.stopped == "it took longer than 1 s" and time.monotonic() - started < 10
    assert not running("317")
    assert "MemoryError" in sandbox.run(["python3", "-c", "bytearray(2 << 30)"]).output
    done = sandbox.run(["python3", "-c", "import os\nwhile True: os.fork()"])
    assert done.stopped == "it had more than 64 processes"
    flood = sandbox.run("yes flood", wall_s=0.5)
    assert 19_000 < len(flood.output) < 21_000 and "bytes left out" in flood.output
    too_large = sandbox.run("head -c 9000000 /dev/zero > large; ls -l large")
    assert (sandbox.folder / "large").stat().st_size == 4 << 20, too_large


def test_nothing_that_was_started_goes_on(sandbox: Sandbox) -> None:
    done = sandbox.run("setsid sleep 318 & (setsid sleep 318 &); sleep 0.2; echo over")
    assert done.output == "over\n" and not running("318")


def test_its_folder_is_gone_afterwards() -> None:
    with Sandbox(isolation=Isolation.LIMITS) as made:
        base = made.folder.parent
        made.run("mkdir -p a/b; echo x > a/b/c; chmod 0 a/b/c")
        assert base.is_relative_to(tempfile.gettempdir())
    assert not base.exists()


def test_what_the_isolation_keeps_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With namespaces or bubblewrap; where the machine offers neither, that is what is said."""
    isolation = best_isolation()
    if isolation is Isolation.LIMITS:
        assert "network" in isolation.describe()
        return
    secret = tmp_path / "secret"
    secret.write_text("key")
    monkeypatch.setenv("SECRET", "key")
    with socket.socket() as server, Sandbox(Limits(wall_s=20.0)) as made:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        reach = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "OSError" in made.run(["python3", "-c", reach]).output
        assert made.run(["cat", str(secret)]).code != 0
        assert "key" not in made.run("env").output
        assert made.run("ls -d /proc/[0-9]* | wc -l").output.strip() in {"2", "3", "4", "5"}, (
            "its own processes"
        )
        for command in (
            "touch /usr/x",
            "touch /x",
            "mount -t tmpfs tmpfs /usr",
            "umount /usr",
            "touch /etc/x",
        ):
            assert made.run(command).code != 0, command
        assert made.run("touch /tmp/x; echo $HOME; touch here").output == "/workspace\n"
        assert (made.folder / "here").exists() and not (Path("/tmp") / "x").exists()
