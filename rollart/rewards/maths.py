"""Is the answer the reference, as mathematics?  By the package math-verify (``pip install rollart[rewards]``)."""

from __future__ import annotations

import threading

from rollart.rewards.kinds import extracted
from rollart.rewards.view import Score, TrajectoryView

__all__ = ["maths_check"]


def maths_check(
    trajectory: TrajectoryView,
    *,
    reference: str | None = None,
    extract: str | None = None,
    unparsable: float = 0.0,
) -> Score:
    """1 when the last answer's expression equals the reference's, else 0; ``unparsable`` when it has none.

    The answer's last boxed expression, LaTeX or number is compared: 0.5 equals \\frac{1}{2}.  ``extract`` is a
    regular expression for the part of the answer to look at.  A reference that is no mathematics is an error.
    """
    from math_verify import parse, verify  # type: ignore[import-not-found,unused-ignore]

    # math-verify keeps time with signals, which only a main thread has.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    wanted = trajectory.environment.reference if reference is None else reference
    gold = parse(wanted, parsing_timeout=seconds) or parse(f"${wanted}$", parsing_timeout=seconds)
    if all(isinstance(each, str) for each in gold):
        raise ValueError(f"the reference {wanted[:100]!r} is no mathematical expression")
    text = extracted(trajectory.answer, extract)
    found = parse(text, parsing_timeout=seconds) if text else []
    if not found:
        return Score(score=unparsable, success=0.0, parts={"parsed": 0.0})
    right = float(verify(gold, found, timeout_seconds=seconds))
    return Score(score=right, success=right, parts={"parsed": 1.0})
