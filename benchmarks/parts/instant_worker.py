"""A worker process that answers every request at once: ``python -m benchmarks.parts.instant_worker``.

It is a plain loop over two sockets, so that on a small machine the cores are the controller's.  It speaks
the shipped protocol with CURVE; what it says of versions and canaries is what a sound worker would say.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import zmq

from benchmarks.parts import turns
from rollart.outbox import MOST_ANSWERS
from rollart.packing import ID_BYTES, pack_floats
from rollart.peer import Peer
from rollart.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Beat,
    Cancel,
    Close,
    Collect,
    Done,
    Export,
    Failure,
    FailureKind,
    Generate,
    Generated,
    Hello,
    Message,
    Observation,
    PruneCheckpoints,
    Publish,
    Published,
    Pull,
    Pulled,
    Ready,
    Reset,
    Resume,
    Role,
    SaveCheckpoint,
    Shutdown,
    Step,
    Suspend,
    ToWorker,
    Trained,
    TrainPart,
    TrainStep,
    Update,
    Updated,
    Welcome,
    decode_to_worker,
    encode,
)
from rollart.workers.worker import die_with_parent

MAX_DRAIN = 16
BEAT_S = 1.0


class InstantWorker:
    """One worker."""

    def __init__(self, role: Role, name: str, peer: Peer, side_payload: bytes, side_share: float) -> None:
        self._role = role
        self._name = name
        self._side_payload = side_payload
        self._side_share = side_share
        self._draw = random.Random(name)
        self._context = zmq.Context()
        self._control = self._dial("control", peer)
        self._data = self._dial("data", peer)
        self._held = False
        self._version = 0
        self._turns: dict[str, int] = {}
        self._over = False

    def _dial(self, kind: str, peer: Peer) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{kind}:{self._name}".encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if peer.server_public:
            socket.curve_serverkey = peer.server_public.encode()
            socket.curve_publickey = peer.client_public.encode()
            socket.curve_secretkey = peer.client_secret.encode()
        socket.connect(peer.address)
        return socket

    def run(self) -> None:
        """Serve until the controller says that it is enough."""
        hello = Hello(PROTOCOL_VERSION, self._role, self._name, os.getpid(), "CPU", {})
        self._control.send(encode(hello))
        self._data.send(encode(Attach(self._name)))
        beat = time.monotonic()
        while not self._over:
            poller = [self._control] if self._held else [self._control, self._data]
            zmq.select(poller, [], [], BEAT_S / 2)
            self._drain(self._control)
            if not self._held:
                self._drain(self._data)
            if time.monotonic() > beat:
                self._control.send(encode(Beat(0, 0)))
                beat += BEAT_S
        self._context.destroy(linger=100)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MAX_DRAIN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answers = [a for m in decode_to_worker(frames[0]) if (a := self._answer(m)) is not None]
            if self._side_share:
                answers = [a for a in answers if not self._send_with_side_payload(socket, a)]
            for first in range(0, len(answers), MOST_ANSWERS):
                socket.send(encode(*answers[first : first + MOST_ANSWERS]))

    def _send_with_side_payload(self, socket: zmq.Socket[bytes], answer: Message) -> bool:
        if self._draw.random() >= self._side_share:
            return False
        socket.send_multipart([encode(answer), self._side_payload])
        return True

    def _answer(self, message: ToWorker) -> Message | None:
        match message:
            case Generate(seq=seq):
                return Generated(
                    seq, turns.ANSWER, turns.LOGPROBS, turns.versions_of(self._version), "length", 0
                )
            case Step(seq=seq, session=session):
                turn = self._turns[session] = self._turns[session] + 1
                return Observation(seq, turns.OBSERVATION, self._draw.random(), turn >= turns.TURNS, {})
            case Reset(seq=seq, session=session):
                self._turns[session] = 0
                return Observation(seq, turns.FIRST, 0.0, False, {})
            case Close(session=session):
                self._turns.pop(session, None)
                return None
            case Cancel(seq=seq):
                return Failure(seq, FailureKind.CANCELLED, "cancelled")
            case _:
                return self._order(message)

    def _order(self, message: ToWorker) -> Message | None:
        match message:
            case Welcome():
                return Ready(1_000_000, {})
            case TrainStep(seq=seq, step_id=step, version=version):
                return Trained(seq, step, version + 1, "", {})
            case Publish(seq=seq, version=version, canary=canary):
                return Published(seq, version, "", _scores(canary), 0, 0.0)
            case Update(seq=seq, version=version, canary=canary):
                self._version = version
                return Updated(seq, version, _scores(canary), 0.0)
            case Suspend(seq=seq):
                self._held = True
                return Done(seq)
            case Resume(seq=seq):
                self._held = False
                return Done(seq)
            case TrainPart(seq=seq) | Collect(seq=seq) | Export(seq=seq):
                return Done(seq)
            case SaveCheckpoint(seq=seq) | PruneCheckpoints(seq=seq):
                return Done(seq)
            case Pull(seq=seq):
                return Pulled(seq, 0)
            case Shutdown():
                self._over = True
        return None


def _scores(canary: bytes) -> bytes:
    return pack_floats([-1.0] * (len(canary) // ID_BYTES - 1))


def main() -> int:
    """Run a worker; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=[str(role) for role in Role])
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--side-bytes", type=int, default=0, help="of a second frame beside some answers")
    parser.add_argument("--side-share", type=float, default=0.0, help="of the answers that have one")
    options = parser.parse_args()
    die_with_parent(options.parent)
    peer = Peer.read(options.key_file)
    InstantWorker(Role(options.role), options.name, peer, bytes(options.side_bytes), options.side_share).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
