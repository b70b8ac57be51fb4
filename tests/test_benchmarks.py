"""The benchmarks fit together: the docs hold what the results say."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from benchmarks import all as every
from benchmarks.parts.render import RESULTS, ROOT, pages, rendered


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_tables_of_the_docs_are_those_of_the_results(page: object) -> None:
    text = page.read_text()  # type: ignore[attr-defined]
    assert text == rendered(page), "renew them: python -m benchmarks.all --render"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", every.found())
def test_each_benchmark_has_figures_with_their_origin(name: str) -> None:
    import json

    report = json.loads((RESULTS / f"{name}.json").read_text())
    assert {"machine", "versions", "commit", "form"} <= set(report)
    assert all(importlib.import_module(f"benchmarks.{name}").tables(report).values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["benchmarks.all", "nothing"], "there is no benchmark 'nothing'"),
        (["benchmarks.controller", "--live", "many"], "--live takes numbers"),
        (["benchmarks.schedules", "--models", "7B"], "there is no model '7B'"),
        (["benchmarks.ablations", "nothing"], "there is no ablation 'nothing'"),
    ],
)
def test_a_wrong_word_is_told_in_a_line(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_controller_and_the_bare_loop_do_the_exchange() -> None:
    """Both on real sockets, few turns: the benchmark's own parts work."""
    from benchmarks.controller import measure, targets

    rows = measure([180], {180: 2_000}, None)
    assert [(row["system"], row["case"]) for row in rows] == [("bare", "turns"), ("rollart", "turns")]
    assert all(row["turns_per_second"] > 0 and row["bytes_per_trajectory"] != 0 for row in rows)
    assert targets(rows) == [] or all(aim["found"] is not None for aim in targets(rows))
