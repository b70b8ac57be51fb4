"""I8, isolation: whatever goes wrong with a trajectory or a worker has its cause there, not in another's fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from rollart.controller import events
from rollart.controller.switchboard import LinkState
from rollart.controller.trajectory import Reason

__all__ = ["Isolation"]

_WORKER = re.compile(r"[a-z]+-\d+")
ENDING = ("the run is over", "it left: the run ended")


class Isolation:
    """Reads the event stream beside the faults; ``violations`` says what has no cause of its own."""

    def __init__(
        self, *, befell: Callable[[str], bool], troubled: Container[str], session_of: Callable[[int], str]
    ) -> None:
        """``befell(worker)``: a fault has happened to it; ``troubled``: sessions whose own environment fails or is
        slower than its deadline; ``session_of(trajectory)``: the session it has now, empty when it has none."""
        self._session_of = session_of
        self.violations: list[str] = []
        self._befell = befell
        self._troubled = troubled

    def feed(self, event: events.Event) -> None:
        """An event of the stream."""
        match event:
            case events.Moved(detail=detail) if detail:
                self._failed(event)
            case events.WorkerChanged(state=LinkState.GONE, worker=worker, reason=reason):
                if not reason.startswith(ENDING) and not self._befell(worker):
                    self.violations.append(f"I8 {worker} is gone, though no fault befell it: {reason}")
            case _:
                pass

    def _failed(self, event: events.Moved) -> None:
        """The trajectory's attempt ended for ``event.detail``."""
        if event.reason is Reason.NAN:  # the whole batch's, by what its trainer found
            return
        worker = _WORKER.match(event.detail)
        if worker is not None and self._befell(worker.group()):
            return
        session = self._session_of(event.trajectory) or f"{event.trajectory}.{event.attempt}"
        if session not in self._troubled:
            self.violations.append(
                f"I8 trajectory {event.trajectory}, attempt {event.attempt}: {event.reason} without a fault of its "
                f"own: {event.detail}"
            )
