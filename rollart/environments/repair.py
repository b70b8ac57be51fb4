"""Repair: a repository with a failing test, a shell in a sandbox, and pytest as the judge.

In the manner of SWE-bench (arXiv 2310.06770), at the size of this machine: a small generated package with one mistake
in it.  The policy answers with shell commands (all of its answer, or the first block in three backticks), sees what
they print, and says ``submit`` when it is done.  Then the package's files, and nothing else of the policy's, are put
beside the original tests in a new sandbox, and pytest decides: 1 when every test passes, else 0.

The mistake is made by changing one operator or number of the package; the generator has run the tests with it and
without it, so that every instance fails at first and can be repaired (``Repair.solution``).
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

from rollart.environments.environment import Environment, Turn
from rollart.environments.repositories import Repository, repository
from rollart.environments.sandbox import Limits, Sandbox
from rollart.environments.splits import draw

__all__ = ["Repair"]

BLOCK = re.compile(r"```(?:bash|sh|shell)?\n(.*?)(?:```|$)", re.DOTALL)
SUBMIT = re.compile(r"^\s*submit\s*$", re.MULTILINE | re.IGNORECASE)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
JUDGE = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]


class Repair(Environment):
    """``command_s`` bounds each command, ``judge_s`` the tests."""

    sandboxed = True

    def __init__(self, command_s: float = 20.0, judge_s: float = 60.0) -> None:
        self._limits = Limits(wall_s=command_s, cpu_s=60, memory_mib=2048, output_characters=4_000)
        self._judge_s = judge_s
        self._sandbox: Sandbox | None = None
        self._right: Repository
        self._broken = ""
        """The text of the module with the mistake."""
        self.module = ""
        """Its path."""

    def reset(self, seed: int, split: str) -> str:
        """Make the repository that ``seed`` and ``split`` name."""
        draw(self._candidate, random.Random(seed), split)
        self._sandbox = Sandbox(self._limits)
        self._write(self._sandbox, {**self._right.files, self.module: self._broken, **self._right.tests})
        files = " ".join(sorted([*self._right.files, *self._right.tests]))
        return (
            "A test of this repository fails, since there is a mistake in the package. Find and repair it.\n"
            f"Files: {files}\nAnswer with a shell command, such as: python3 -m pytest -q. "
            "Say submit when the tests pass.\n"
        )

    def step(self, action: str) -> Turn:
        """Carry out a command, or judge."""
        if SUBMIT.search(action):
            passed = self._judge()
            return Turn(reward=float(passed), done=True, info={"success": float(passed)})
        block = BLOCK.search(action)
        command = (block[1] if block else action).strip()
        if not command:
            return Turn("There was no command.\n$ ")
        assert self._sandbox is not None
        done = self._sandbox.run(command)
        stopped = f"\n[stopped: {done.stopped}]" if done.stopped else ""
        return Turn(f"{done.output}{stopped}\n[exit code {done.code}]\n$ ")

    def close(self) -> None:
        """Remove the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()

    @property
    def solution(self) -> str:
        """A command that repairs the package."""
        return f"cat > {self.module} <<'END'\n{self._right.files[self.module]}END"

    def _judge(self) -> bool:
        assert self._sandbox is not None
        with Sandbox(self._limits) as fresh:
            for name in self._right.files:
                theirs = self._sandbox.folder / name
                text = ""
                if theirs.is_file() and not theirs.is_symlink():
                    text = theirs.read_bytes()[: 1 << 20].decode("utf-8", "replace")
                self._write(fresh, {name: text})
            self._write(fresh, self._right.tests)
            done = fresh.run(JUDGE, wall_s=self._judge_s)
        # A package that ends the process early has the exit code 0 as well, but did not pass the tests.
        return done.code == 0 and f"{self._right.test_count} passed" in done.output.splitlines()[-1]

    @staticmethod
    def _write(sandbox: Sandbox, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = sandbox.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    # --- the mistake ----------------------------------------------------------------------------------

    def _candidate(self, rng: random.Random) -> str | None:
        self._right = repository(rng)
        self.module = rng.choice([name for name in self._right.files if not name.endswith("__init__.py")])
        mistakes = list(_mistakes(self._right.files[self.module]))
        self._broken = rng.choice(mistakes)
        if self._right.passes() and not self._right.passes({self.module: self._broken}):
            return f"{self.module}\n{self._broken}"
        return None


def _mistakes(source: str) -> Iterator[str]:
    """Every text of the module with one operator or number changed."""
    count = len(list(_sites(ast.parse(source))))
    for number in range(count):
        tree = ast.parse(source)
        node, field = list(_sites(tree))[number]
        value = getattr(node, field)
        if isinstance(node, ast.Compare):
            value[0] = SWAPS[type(value[0])]()
        elif isinstance(node, ast.Constant):
            node.value = value + 1
        else:
            setattr(node, field, SWAPS[type(value)]())
        yield f"{ast.unparse(tree)}\n"


def _sites(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, "ops"
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield node, "op"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value"
