"""Rules of the wire, checked on every message that is sent: what the event stream alone can't show.

I7: no request goes to an inference worker before its first weights are verified, nor between the moment it
is told to suspend and the one at which it has resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollart.protocol import (
    Cancel,
    Done,
    Generate,
    Hello,
    Message,
    Resume,
    Suspend,
    TrainStep,
    decode_to_controller,
    decode_to_worker,
)
from rollart.simulation.network import TO_WORKER

__all__ = ["WireRules"]


class WireRules:
    """Hears every message as it is sent; ``violations`` says what was wrong."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._closed: dict[str, str] = {}
        """Inference workers that may get no request, and why."""
        self._resuming: dict[str, int] = {}
        self._sent: set[int] = set()
        """Sequence ids."""
        self._steps: dict[int, int] = {}

    def hear(self, direction: str, worker: str, frames: Sequence[bytes]) -> None:
        """A frame is on its way."""
        try:
            messages: Sequence[Message] = (
                decode_to_worker(frames[0]) if direction == TO_WORKER else decode_to_controller(frames[0])
            )
        except msgspec.DecodeError:
            self.violations.append(f"{worker}: a message that does not decode was sent {direction}")
            return
        for message in messages:
            self._hear(direction, worker, message)

    def _hear(self, direction: str, worker: str, message: Message) -> None:
        match message:
            case Hello(role="inference"):
                self._closed[worker] = "it has no weights yet"
            case Suspend():
                self._closed[worker] = "it is suspended"
            case Resume(seq=seq):
                self._resuming[worker] = seq
            case Done(seq=seq):
                if self._resuming.get(worker) == seq:
                    del self._resuming[worker]
                    self._closed.pop(worker, None)
            case Generate():
                if worker in self._closed:
                    self.violations.append(f"I7 a request was sent to {worker}: {self._closed[worker]}")
            case TrainStep(step_id=step, version=version):
                if self._steps.setdefault(step, version) != version:
                    self.violations.append(
                        f"I2 step {step} was sent for versions {self._steps[step]}, {version}"
                    )
            case _:
                pass
        if direction == TO_WORKER and (sent := getattr(message, "seq", None)) is not None:
            if isinstance(message, Cancel):  # it names the request that it cancels
                return
            if sent in self._sent:
                self.violations.append(f"sequence id {sent} was used again")
            self._sent.add(sent)
