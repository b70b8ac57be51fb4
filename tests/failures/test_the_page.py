"""docs/reliability.md names a test for each known failure, and each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_known_failure_has_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)$", page, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 38))
    for number, row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        assert named, f"failure {number} has no test"
        for path, test in named:
            assert re.search(rf"def {test}\(", (ROOT / path).read_text()), f"{path} has no {test}"
