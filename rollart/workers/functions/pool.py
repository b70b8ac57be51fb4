"""Pool: the instances of one function, as many as its calls keep busy.

Calls wait in order for an instance that has room.  Whatever happens to an instance (a crash, a call that never ends)
costs the calls in it and no other.  What instances and calls took is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from rollart.workers.functions.frames import FrameProtocol
from rollart.workers.functions.instance import Outcome
from rollart.workers.functions.scaling import Limits, Load, Means, further, patience_s
from rollart.workers.functions.template import MESSAGE, THREAD_VARIABLES

__all__ = ["Crashed", "Function", "Pool", "TemplateBroken"]

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""For a call that nobody waits for any more: a plain function is not interrupted, and then its instance is killed."""
TEMPLATE_IDLE_S = 60.0
"""A template without instances ends after so long."""
_outcome = msgspec.json.Decoder(Outcome)


class Crashed(Exception):
    """The instance ended before its call did."""


class TemplateBroken(Exception):
    """The function can't be imported."""


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the host serves."""

    function: str
    """Import path."""
    memory_mib: int = 0
    """0: not bounded."""
    limits: Limits = Limits()


class _Call:
    __slots__ = ("asked_at", "body", "cold_s", "future", "instance", "number", "queue_s")

    def __init__(self, number: int, body: bytes, now: float) -> None:
        self.number = number
        self.body = body
        self.asked_at = now
        self.queue_s = self.cold_s = 0.0
        self.future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.instance: _Instance | None = None


class _Instance:
    """One process."""

    __slots__ = ("calls", "closing", "fresh_s", "idle_timer", "number", "pid", "protocol", "started_at")

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.started_at = now
        self.pid = 0
        self.protocol: FrameProtocol | None = None
        """``None`` while it starts."""
        self.calls: dict[int, _Call] = {}
        self.closing = False
        self.fresh_s = 0.0
        """What its start took, until a call has been told."""
        self.idle_timer: asyncio.TimerHandle | None = None


class Pool:
    """One function's."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.means = Means()
        self.counts: dict[str, int] = dict.fromkeys(
            ("calls", "cold_starts", "crashes", "cancelled", "killed"), 0
        )
        self.busy_s = 0.0
        self._paid_s = 0.0
        """Of the instances that have ended."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Call] = deque()
        self._instances: dict[int, _Instance] = {}
        self._next = 0
        self._template: _Template | None = None
        self._template_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def begin(self) -> None:
        """Start the least instances that there are to be."""
        self._look()

    # --- calls ----------------------------------------------------------------------------------------

    async def call(self, body: bytes, timeout_s: float) -> tuple[Outcome, float, float]:
        """What came of it, and seconds it waited and of the start that was made for it, 0 when there was none.

        ``Crashed``, ``TemplateBroken``, ``TimeoutError``.  To cancel it stops it.
        """
        self._next += 1
        call = _Call(self._next, body, self._loop.time())
        self._waiting.append(call)
        self.means.arrived(call.asked_at)
        self._look()
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await call.future
        except (asyncio.CancelledError, TimeoutError) as error:
            self.counts["cancelled"] += isinstance(error, asyncio.CancelledError)
            self._give_up(call)
            raise
        self.counts["calls"] += 1
        self.busy_s += outcome.busy_s
        return outcome, call.queue_s, call.cold_s

    def _give_up(self, call: _Call) -> None:
        instance = call.instance
        if instance is None:
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)
            return
        if call.number in instance.calls and instance.protocol is not None:
            instance.protocol.send(call.number, b"")
            self._loop.call_later(GRACE_S, self._kill_if_busy, instance, call)

    def _kill_if_busy(self, instance: _Instance, call: _Call) -> None:
        """A call that nobody waits for must not keep an instance."""
        if call.number in instance.calls and not instance.closing:
            self.counts["killed"] += 1
            self._kill(instance)

    def _look(self) -> None:
        """Hand out calls, start what is worth it."""
        limits = self.function.limits
        for instance in self._instances.values():
            while self._waiting and instance.protocol is not None and not instance.closing:
                if len(instance.calls) >= limits.calls_each:
                    break
                self._hand(instance, self._waiting.popleft())
        live = [instance for instance in self._instances.values() if not instance.closing]
        load = Load(
            waiting=len(self._waiting),
            running=sum(len(instance.calls) for instance in live),
            instances=len(live),
            starting=sum(instance.protocol is None for instance in live),
        )
        for _ in range(0 if self._closed else further(load, limits, self.means)):
            self._start()

    def _hand(self, instance: _Instance, call: _Call) -> None:
        assert instance.protocol is not None
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
            instance.idle_timer = None
        call.instance = instance
        call.queue_s = self._loop.time() - call.asked_at
        call.cold_s, instance.fresh_s = instance.fresh_s, 0.0
        instance.calls[call.number] = call
        instance.protocol.send(call.number, call.body)

    def _answered(self, instance: _Instance, number: int, body: bytes) -> None:
        call = instance.calls.pop(number, None)
        if call is not None:
            outcome = _outcome.decode(body)
            if not outcome.cancelled:
                self.means.called(outcome.busy_s)
            if not call.future.done():
                call.future.set_result(outcome)
        self._settle(instance)

    def _settle(self, instance: _Instance) -> None:
        """``instance`` has room: it takes what waits, or rests for a while and ends."""
        self._look()
        if not instance.calls and not instance.closing and instance.idle_timer is None:
            resting = sum(each.idle_timer is not None for each in self._instances.values())
            delay = patience_s(self.function.limits, self.means, resting)
            instance.idle_timer = self._loop.call_later(delay, self._rested, instance)

    def _rested(self, instance: _Instance) -> None:
        instance.idle_timer = None
        live = sum(not each.closing for each in self._instances.values())
        if live > self.function.limits.least and not instance.calls:
            self._retire(instance)

    # --- instances ------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._next += 1
        instance = self._instances[self._next] = _Instance(self._next, self._loop.time())
        self.counts["cold_starts"] += 1
        if self._template_timer is not None:
            self._template_timer.cancel()
            self._template_timer = None
        if self._template is None:
            self._template = _Template(self)
        self._template.fork(instance.number)

    def forked(self, number: int, pid: int, connection: socket.socket) -> None:
        """The template has forked instance ``number``, whose end of the connection is ``connection``."""
        instance = self._instances.get(number)
        if instance is None:
            connection.close()
            return
        instance.pid = pid
        protocol = FrameProtocol(
            lambda call, body: self._answered(instance, call, body), lambda: self._ended(instance)
        )
        self._loop.create_task(self._connect(instance, protocol, connection), name=f"instance {number}")

    async def _connect(self, instance: _Instance, protocol: FrameProtocol, connection: socket.socket) -> None:
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(lambda: protocol, connection)
        instance.protocol = protocol
        if instance.closing:
            protocol.close()
            return
        instance.fresh_s = self._loop.time() - instance.started_at
        self.means.started(instance.fresh_s)
        self._settle(instance)

    def _retire(self, instance: _Instance) -> None:
        instance.closing = True
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
            instance.idle_timer = None
        if instance.protocol is not None:
            instance.protocol.close()

    def _kill(self, instance: _Instance) -> None:
        instance.closing = True
        if self._template is not None and instance.pid:
            self._template.kill(instance.pid)

    def _ended(self, instance: _Instance) -> None:
        """Its connection is closed: by the host, or since the process ended."""
        if self._instances.pop(instance.number, None) is None:
            return
        self._paid_s += self._loop.time() - instance.started_at
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
        if not instance.closing:
            self.counts["crashes"] += 1
            logger.warning("%s: instance %d ended by itself", self.function.function, instance.pid)
        for call in instance.calls.values():
            if not call.future.done():
                call.future.set_exception(
                    Crashed(f"the instance (process {instance.pid}) ended during the call")
                )
        instance.calls.clear()
        self._look()
        self._rest_template()

    def _rest_template(self) -> None:
        if not self._instances and self._template is not None and self._template_timer is None:
            self._template_timer = self._loop.call_later(TEMPLATE_IDLE_S, self._end_template)

    def _end_template(self) -> None:
        self._template_timer = None
        if self._template is not None and not self._instances:
            self._template.close()
            self._template = None

    def template_ended(self, template: _Template, why: str) -> None:
        """The template is gone, and every instance with it; the next call starts another."""
        if self._template is template:
            self._template = None
        for instance in list(self._instances.values()):
            if instance.protocol is None:
                del self._instances[instance.number]
        if why:
            waiting, self._waiting = self._waiting, deque()
            for call in waiting:
                if not call.future.done():
                    call.future.set_exception(TemplateBroken(why))

    # --- the end --------------------------------------------------------------------------------------

    @property
    def paid_s(self) -> float:
        """Seconds of all instances from their start to their end, or to now."""
        now = self._loop.time()
        return self._paid_s + sum(now - instance.started_at for instance in self._instances.values())

    @property
    def stats(self) -> dict[str, Any]:
        """Counts and times since the host began."""
        return {
            **self.counts,
            "busy_s": self.busy_s,
            "paid_s": self.paid_s,
            "waiting": len(self._waiting),
            "running": sum(len(instance.calls) for instance in self._instances.values()),
            "instances": len(self._instances),
            "template": self._template is not None,
            "mean_busy_s": self.means.busy_s,
            "mean_cold_start_s": self.means.cold_s,
        }

    async def close(self) -> None:
        """End all instances and the template."""
        self._closed = True
        for instance in list(self._instances.values()):
            self._retire(instance)
        if self._template_timer is not None:
            self._template_timer.cancel()
        if self._template is not None:
            await self._template.end()


class _Template:
    """The host's side of a template process."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._host, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._host.setblocking(False)
        self._ready = False
        self._closed = False
        self._why = ""
        self._wanted: list[int] = []
        self._connections: dict[int, socket.socket] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._task = self._loop.create_task(self._run(), name=f"template {pool.function.function}")

    async def _run(self) -> None:
        function = self._pool.function
        try:
            self._process = await self._spawn(function)
        except OSError as error:
            self._theirs.close()
            self._host.close()
            self._pool.template_ended(self, f"no process can be started: {error}")
            return
        self._theirs.close()
        self._loop.add_reader(self._host, self._read)
        await self._process.wait()
        self._loop.remove_reader(self._host)
        while self._read():
            pass
        self._host.close()
        for connection in self._connections.values():
            connection.close()
        if not self._closed:
            self._pool.template_ended(
                self, self._why or f"the template ended with {self._process.returncode}"
            )

    async def _spawn(self, function: Function) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollart.workers.functions.template", str(self._theirs.fileno())),
            *(function.function, str(function.memory_mib), str(function.limits.calls_each), str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[self._theirs.fileno()],
            env=_environment(os.environ),
        )

    def fork(self, number: int) -> None:
        """Start an instance, as soon as the template is ready."""
        if not self._ready:
            self._wanted.append(number)
            return
        ours, theirs = socket.socketpair()
        self._connections[number] = ours
        try:
            socket.send_fds(self._host, [f"fork {number}".encode()], [theirs.fileno()])
        except OSError as error:  # it ends, and that is told
            logger.warning("template %s: %s", self._pool.function.function, error)
        theirs.close()

    def kill(self, pid: int) -> None:
        """Kill an instance."""
        with contextlib.suppress(OSError):
            self._host.send(f"kill {pid}".encode())

    def _read(self) -> bool:
        """Take one message; whether there was one."""
        try:
            message = self._host.recv(MESSAGE)
        except OSError:
            return False
        verb, _, rest = message.decode(errors="replace").partition(" ")
        if verb == "ready":
            self._ready = True
            wanted, self._wanted = self._wanted, []
            for number in wanted:
                self.fork(number)
        elif verb == "forked":
            forked, _, pid = rest.partition(" ")
            self._pool.forked(int(forked), int(pid), self._connections.pop(int(forked)))
        elif verb == "broken":
            self._why = rest
            logger.error("%s: %s", self._pool.function.function, rest)
        return bool(message)

    def close(self) -> None:
        """Let it end."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._host.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Let it end, and wait until it has."""
        self.close()
        try:
            async with asyncio.timeout(2.0):
                await asyncio.shield(self._task)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
            await self._task


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in own.items() if name != "ROLLART_FUNCTIONS_TOKEN"}
    return {**dict.fromkeys(THREAD_VARIABLES, "1"), **kept, "PYTHONUNBUFFERED": "1"}
