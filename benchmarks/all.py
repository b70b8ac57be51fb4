"""Every benchmark of the project, one after the other: ``python -m benchmarks.all``.

A benchmark is a module of this package that takes ``--json FILE`` and ``--short``, makes tables for the docs
(``tables``), and says what else its whole form wants (``FULL``).  Its figures go to ``benchmarks/results``, and
the tables in the docs are made anew from them.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks.parts.render import RESULTS, render


def found() -> dict[str, ModuleType]:
    """All benchmarks by name."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.ispkg]
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in names if name != "all"}
    return {name: module for name, module in modules.items() if hasattr(module, "FULL")}


def run(name: str, arguments: tuple[str, ...], results: Path) -> bool:
    """Run a benchmark; whether it succeeded."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        *arguments,
        "--json",
        str(results / f"{name}.json"),
    ]
    sys.stderr.write(f"== {' '.join(command[1:])}\n")
    code = subprocess.run(command, check=False).returncode
    sys.stderr.write(
        f"== {name}: {'done' if code == 0 else f'FAILED with {code}'} in {time.perf_counter() - started:.0f} s\n"
    )
    return code == 0


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    benchmarks_found = found()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(benchmarks_found)}; by default all"
    )
    parser.add_argument("--full", action="store_true", help="the whole form, as the docs should have it")
    parser.add_argument(
        "--render", action="store_true", help="measure nothing, only renew the tables in the docs"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in benchmarks_found]
    if unknown:
        sys.stderr.write(
            f"python -m benchmarks.all: there is no benchmark {unknown[0]!r}; there are {', '.join(benchmarks_found)}\n"
        )
        return 2
    failed = []
    if not options.render:
        RESULTS.mkdir(exist_ok=True)
        for name in options.names or benchmarks_found:
            module = benchmarks_found[name]
            if not run(name, module.FULL if options.full else ("--short",), RESULTS):
                failed.append(name)
    try:
        for page in render():
            sys.stderr.write(f"renewed {page.name}\n")
    except LookupError as error:
        sys.stderr.write(f"python -m benchmarks.all: {error}\n")
        return 1
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
