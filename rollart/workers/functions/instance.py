"""An instance: serves calls that come as frames, one at a time or several, until the host closes the connection."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rollart.rewards.loading import RewardFunction
from rollart.rewards.payload import Request, Result
from rollart.rewards.view import Unavailable
from rollart.workers.functions.frames import receive, send

__all__ = ["Outcome", "serve"]


class Outcome(msgspec.Struct):
    """What an instance says of a call; the host adds what it knows."""

    results: list[Result] = []
    unavailable: str = ""
    """The function says that its machinery failed."""
    malformed: str = ""
    """The request is none."""
    cancelled: bool = False
    """Nobody waits for it any more, and it has stopped."""
    busy_s: float = 0.0


_request = msgspec.json.Decoder(Request)
_encoder = msgspec.json.Encoder()


def serve(connection: socket.socket, function: RewardFunction, calls: int) -> None:
    """Serve ``calls`` at the same time."""
    random.seed(os.urandom(16))  # instances of one template must not draw the same
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115  # the instance's for its whole life
    if function.is_async:
        asyncio.run(_serve_async(connection, function))
    elif calls == 1:
        while (frame := receive(connection)) is not None:
            number, body = frame
            if body:  # to cancel what is done already is nothing
                send(connection, number, _carry_out(function, body))
    else:
        _serve_threads(connection, function, calls)


def _carry_out(function: RewardFunction, body: bytes) -> bytes:
    started = time.perf_counter()
    try:
        request = _request.decode(body)
        outcome = Outcome(results=function.results(request.scope, request.trajectories, request.options))
    except msgspec.DecodeError as error:
        outcome = Outcome(malformed=str(error))
    except Unavailable as error:
        outcome = Outcome(unavailable=f"{function.path}: {error}")
    outcome.busy_s = time.perf_counter() - started
    return _encoder.encode(outcome)


def _serve_threads(connection: socket.socket, function: RewardFunction, calls: int) -> None:
    lock = threading.Lock()

    def carry_out(number: int, body: bytes) -> None:
        answer = _carry_out(function, body)
        with lock:
            send(connection, number, answer)

    pool = ThreadPoolExecutor(calls)
    while (frame := receive(connection)) is not None:
        if frame[1]:
            pool.submit(carry_out, *frame)
    os._exit(0)  # whatever still runs is for nobody


async def _serve_async(connection: socket.socket, function: RewardFunction) -> None:
    from rollart.workers.functions.frames import FrameProtocol

    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def carry_out(number: int, body: bytes) -> None:
        started = time.perf_counter()
        try:
            request = _request.decode(body)
            results = await function.results_async(request.scope, request.trajectories, request.options)
            outcome = Outcome(results=results)
        except msgspec.DecodeError as error:
            outcome = Outcome(malformed=str(error))
        except Unavailable as error:
            outcome = Outcome(unavailable=f"{function.path}: {error}")
        outcome.busy_s = time.perf_counter() - started
        protocol.send(number, _encoder.encode(outcome))

    def on_frame(number: int, body: bytes) -> None:
        if not body:
            task = tasks.get(number)
            if task is not None:
                task.cancel()
            return
        task = tasks[number] = loop.create_task(carry_out(number, body))
        task.add_done_callback(lambda task: on_done(number, task))

    def on_done(number: int, task: asyncio.Task[None]) -> None:
        del tasks[number]
        if task.cancelled():
            protocol.send(number, _encoder.encode(Outcome(cancelled=True)))

    def on_end() -> None:
        if not ended.done():
            ended.set_result(None)

    protocol = FrameProtocol(on_frame, on_end)
    connection.setblocking(False)
    await loop.connect_accepted_socket(lambda: protocol, connection)
    await ended
    os._exit(0)
