"""Tables of the docs, made from ``benchmarks/results``: no number in them is typed by hand.

Between a line ``<!-- benchmark: NAME TABLE -->`` and the next ``<!-- end -->`` a page holds the table ``TABLE`` of
``benchmarks.NAME``, with a line that says where, when and from what it was measured.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "render", "rendered"]

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- benchmark: (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Everything that may hold a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rendered(page: Path) -> str:
    """The page as it should be; ``LookupError`` for a table that there is not."""

    def fill(found: re.Match[str]) -> str:
        head, name, table, end = found.groups()
        return f"{head}\n{_table(name, table, page)}\n\n{end}"

    return PLACE.sub(fill, page.read_text())


def render() -> list[Path]:
    """Bring all pages up to date; those that changed."""
    changed = []
    for page in pages():
        text = rendered(page)
        if text != page.read_text():
            page.write_text(text)
            changed.append(page)
    return changed


def _table(name: str, table: str, page: Path) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise LookupError(
            f"{page.name} wants figures of benchmarks.{name}, and there is no {path.relative_to(ROOT)}"
        )
    report: dict[str, Any] = json.loads(path.read_text())
    tables: dict[str, str] = importlib.import_module(f"benchmarks.{name}").tables(report)
    if table not in tables:
        raise LookupError(f"{page.name}: benchmarks.{name} has no table {table!r}, only {', '.join(tables)}")
    return f"{tables[table]}\n\n{_origin(name, report)}"


def _origin(name: str, report: dict[str, Any]) -> str:
    machine = report["machine"]
    form = " in its short form" if report.get("form") == "short" else ""
    return (
        f"*`python -m benchmarks.{name}`{form}, commit {report['commit']}, on {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['memory_gib']} GiB.*"
    )
