"""The benchmarks fit together: the docs hold what the results say."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import all as every
from benchmarks.parts.render import RESULTS, ROOT, pages, rendered


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_tables_of_the_docs_are_those_of_the_results(page: Path) -> None:
    assert page.read_text() == rendered(page), "renew them: python -m benchmarks.all --render"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_figures_are_of_a_benchmark_and_have_their_origin(path: Path) -> None:
    report = json.loads(path.read_text())
    assert path.stem in every.found()
    assert {"machine", "versions", "commit", "form"} <= set(report)
    assert all(importlib.import_module(f"benchmarks.{path.stem}").tables(report).values())


@pytest.mark.parametrize("name", every.found())
def test_each_benchmark_takes_the_common_words(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "--short" in done.stdout
    assert "--json FILE" in done.stdout
    assert callable(importlib.import_module(f"benchmarks.{name}").tables)


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
    from benchmarks.controller import measure

    rows = measure([180], {180: 2_000}, None, {})
    assert [row["system"] for row in rows] == ["bare", "bare_framed", "rollart"]
    assert all(0 < row["cpu_us_per_turn"] < 1e4 < row["turns_per_second"] * 1e3 for row in rows)


def test_every_aim_is_judged_by_its_rows() -> None:
    from benchmarks.controller import LIVE, targets

    small, middle, large = LIVE
    common = {
        "case": "turns", "turns_per_second": 100.0, "cpu_us_per_turn": 10.0, "loop_lag_p99_ms": 1.0,
        "bytes_per_trajectory": 5_000.0, "suspend_max_ms": 5.0, "suspends": 3, "cancel_s": 0.1,
    }  # fmt: skip
    rows = [{**common, "system": "rollart", "live": live} for live in LIVE]
    rows += [{**common, "system": name, "live": middle} for name in ("bare", "bare_framed")]
    rows += [
        {**common, "system": name, "live": small, "turns_per_second": 10.0} for name in ("ray", "verifiers")
    ]
    rows.append({**common, "system": "rollart", "live": middle, "case": "side_payloads"})
    rows.append({**common, "system": "rollart", "live": small, "case": "again"})
    aims = targets(rows)
    assert len(aims) == 8 and all(aim["holds"] for aim in aims)
    worse = {
        "turns_per_second": 20.0, "bytes_per_trajectory": 7_000.0, "loop_lag_p99_ms": 11.0, "cancel_s": 1.5,
        "suspend_max_ms": 101.0,
    }  # fmt: skip
    slow = [{**row, **worse} if row["system"] == "rollart" else row for row in rows]
    slow = [{**row, "cpu_us_per_turn": 16.0} if row["live"] == large else row for row in slow]
    assert not any(aim["holds"] for aim in targets(slow))
    assert targets([]) == []
