"""Does the code in the answer pass its tests?  Runs it in processes of its own, confined (``confine.py``).

What is confined: CPU time, memory, files and processes, always; the network and other processes, where the kernel has
user namespaces for everybody.  What is not: the code reads what the run's user may read.  And a program that wants to
deceive a test which runs in its own interpreter can: tests by input and output don't have that weakness.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rollart.rewards.view import Score, TrajectoryView, Unavailable

__all__ = ["Ran", "code_tests", "run_confined"]

CONFINE = Path(__file__).with_name("confine.py")
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
RUN_TEST = (
    "import sys; word, test = sys.stdin.read().split('\\n', 1); names = {'__name__': 'answer'}; "
    "exec(compile(open('answer.py').read(), 'answer.py', 'exec'), names); "
    "exec(compile(test, 'test', 'exec'), names); sys.stdout.flush(); print('\\n' + word)"
)
MAX_OUTPUT = 1 << 20


class Ran(msgspec.Struct, frozen=True):
    """What a confined command did."""

    code: int
    """128 + the signal when one ended it; -1 when its time was up."""
    output: str
    isolated: bool
    """It had namespaces of its own, and so no network."""


def code_tests(
    trajectory: TrajectoryView,
    *,
    reference: str | None = None,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
    all_or_nothing: bool = False,
    need_isolation: bool = False,
) -> Score:
    """The share of the tests that the code in the last answer passes.

    The code is the last ```` ```python ```` block, or all of the answer.  The reference is Python with assertions (one
    test), or JSON: ``{"asserts": ["assert f(1) == 2", …]}``, ``{"io": [{"input": "3\\n", "output": "9"}, …]}`` or both.
    Each test has ``timeout_s`` and ``memory_mib``.  ``need_isolation`` refuses to run code that could reach a network.
    """
    tests = _tests(trajectory.environment.reference if reference is None else reference)
    blocks = BLOCK.findall(trajectory.answer)
    code = blocks[-1] if blocks else trajectory.answer
    isolated = True
    passed = 0
    with tempfile.TemporaryDirectory(prefix="rollart-code-") as folder:
        (Path(folder) / "answer.py").write_text(code, encoding="utf-8", errors="replace")
        for test in tests:
            ran, right = _run(test, Path(folder), timeout_s, memory_mib)
            isolated &= ran.isolated
            if need_isolation and not ran.isolated:
                raise Unavailable(
                    "this machine gives ordinary users no namespaces, so code could reach the network"
                )
            passed += right
    share = passed / len(tests)
    score = float(share == 1) if all_or_nothing else share
    return Score(score=score, success=float(share == 1), parts={"passed": share, "isolated": float(isolated)})


def _tests(reference: str) -> list[dict[str, str]]:
    try:
        told: Any = json.loads(reference)
    except ValueError:
        told = {"asserts": [reference]}
    if not isinstance(told, dict):
        told = {"asserts": [reference]}
    tests = [{"assert": str(each)} for each in told.get("asserts", [])]
    tests += [{"input": str(each["input"]), "output": str(each["output"])} for each in told.get("io", [])]
    if not tests or not reference.strip():
        raise ValueError("the reference holds no tests")
    return tests


def _run(test: dict[str, str], folder: Path, timeout_s: float, memory_mib: int) -> tuple[Ran, bool]:
    """One test: what ran, and whether it passed."""
    python = [sys.executable, "-I", "-S", "-B"]
    if "assert" in test:
        word = secrets.token_hex(8)  # a program that only ends, with code 0, has passed nothing
        ran = run_confined(
            [*python, "-c", RUN_TEST],
            folder,
            stdin=f"{word}\n{test['assert']}",
            timeout_s=timeout_s,
            memory_mib=memory_mib,
        )
        return ran, ran.code == 0 and ran.output.rstrip("\n").endswith(f"\n{word}")
    ran = run_confined(
        [*python, "answer.py"], folder, stdin=test["input"], timeout_s=timeout_s, memory_mib=memory_mib
    )
    return ran, ran.code == 0 and _lines(ran.output) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def run_confined(command: list[str], folder: Path, *, stdin: str, timeout_s: float, memory_mib: int) -> Ran:
    """Run ``command`` in ``folder``, confined; whatever it started has ended when this returns."""
    limits = {
        "RLIMIT_CPU": int(timeout_s) + 1,
        "RLIMIT_AS": memory_mib << 20,
        "RLIMIT_FSIZE": 16 << 20,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if os.getuid():  # of root the kernel counts nothing
        limits["RLIMIT_NPROC"] = 4096
    told, tell = os.pipe()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CONFINE), json.dumps(limits), str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=[tell],
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "ROLLART_TELL": str(tell)},
        )
        os.close(tell)
        try:
            process.communicate(stdin.encode("utf-8", "replace"), timeout=timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with os.fdopen(told, "rb") as said:
            isolated = said.read(1) == b"i"
        output.seek(0)
        return Ran(code, output.read(MAX_OUTPUT).decode(errors="replace"), isolated)
