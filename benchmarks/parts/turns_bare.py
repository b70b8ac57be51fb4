"""The turns exchange by the smallest possible ZeroMQ and msgspec loop: one row of ``benchmarks.controller``.

A coroutine a trajectory and a future a request over one ROUTER socket with CURVE, to the same workers, with
the same messages, one a frame or, ``framed``, as RollArt shares frames.  No groups, bound, deadlines, metrics, events
or failures: a limit, no peer.
"""

from __future__ import annotations

import asyncio
from functools import partial

from benchmarks.parts import turns
from benchmarks.parts.measure import measure_turns, resident_bytes
from benchmarks.parts.turns_launch import InstantLauncher, SidePayloads, key_file_of
from rollart.controller.collector import collecting_rarely
from rollart.controller.transport import ZmqTransport
from rollart.launch.local import Placement
from rollart.outbox import Outbox
from rollart.protocol import (
    Generate,
    Generated,
    Hello,
    Message,
    Observation,
    Reset,
    Role,
    Shutdown,
    Step,
    ToController,
    Welcome,
    decode_to_controller,
    encode,
)

__all__ = ["measure"]

PROCESSES = {Role.INFERENCE: b"data:inference", Role.ENVIRONMENT: b"data:environment"}


class _Bare:
    def __init__(self, transport: ZmqTransport, *, framed: bool) -> None:
        self._transport = transport
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._seq = 0
        self._outboxes = {
            role: Outbox(partial(transport.send, identity)) for role, identity in PROCESSES.items() if framed
        }
        self._loop = asyncio.get_running_loop()
        self.welcomed = 0
        self.turns = 0
        self.tokens: dict[int, bytearray] = {}
        self.enough = False

    def receive(self, identity: bytes, frames: list[bytes]) -> None:
        for message in decode_to_controller(frames[0]):
            self._hear(identity, message)

    def _hear(self, identity: bytes, message: ToController) -> None:
        future = self._pending.pop(getattr(message, "seq", 0), None)
        if future is not None:
            future.set_result(message)
        elif isinstance(message, Hello):
            self._transport.send(identity, [encode(Welcome(b"", "", "", "", "", "", 1.0, 30.0))])
            self.welcomed += 1

    def call(self, to: Role, request: Message) -> asyncio.Future[Message]:
        future = self._pending[self._seq] = self._loop.create_future()
        if self._outboxes:
            self._outboxes[to].add(request)
        else:
            self._transport.send(PROCESSES[to], [encode(request)])
        return future

    def seq(self) -> int:
        self._seq += 1
        return self._seq

    async def trajectory(self, number: int) -> None:
        episode = 0
        while not self.enough:
            session = f"{number}.{episode}"
            seen = await self.call(Role.ENVIRONMENT, Reset(self.seq(), session, turns.TASK, 0, "train"))
            assert isinstance(seen, Observation)
            ids = self.tokens[number] = bytearray(seen.ids)
            while not seen.done and not self.enough:
                request = Generate(
                    self.seq(), session, bytes(ids), turns.ANSWER_TOKENS, 1.0, b"", b"", False, None
                )
                answer = await self.call(Role.INFERENCE, request)
                assert isinstance(answer, Generated)
                ids += answer.ids
                seen = await self.call(Role.ENVIRONMENT, Step(self.seq(), session, answer.ids))
                assert isinstance(seen, Observation)
                ids += seen.ids
                self.turns += 1
            episode += 1


async def measure(
    live: int, *, turns_wanted: int, side: SidePayloads, framed: bool = False
) -> dict[str, object]:
    """A row: ``turns_wanted`` turns with ``live`` trajectories in flight; ``framed``: messages share frames."""
    transport = ZmqTransport()
    bare = _Bare(transport, framed=framed)
    transport.start(bare.receive)
    async with key_file_of(transport.peer_file) as key_file:
        launcher = InstantLauncher(key_file, side)
        for role in PROCESSES:
            await launcher.start(Placement(str(role), role, "CPU"))
        while bare.welcomed < len(PROCESSES):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # the data connections too
        try:
            with collecting_rarely():
                return await _run(bare, live, turns_wanted)
        finally:
            for role in PROCESSES:
                transport.send(f"control:{role}".encode(), [encode(Shutdown("enough"))])
            await launcher.stop(grace_s=2.0)
            transport.close()


async def _run(bare: _Bare, live: int, turns_wanted: int) -> dict[str, object]:
    before = resident_bytes()
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(bare.trajectory(number)) for number in range(live)]
    row = await measure_turns(
        lambda: bare.turns,
        warm=live,
        wanted=turns_wanted,
        bytes_per_trajectory=lambda: (resident_bytes() - before - sum(map(len, bare.tokens.values()))) / live,
    )
    bare.enough = True
    await asyncio.wait(tasks)
    return row
