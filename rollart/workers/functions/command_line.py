"""``python -m rollart.workers functions FUNCTION…``: serve reward functions over HTTP, from an elastic pool.

The token that callers must tell comes from the environment variable ROLLART_FUNCTIONS_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from rollart.config import Task
from rollart.config.rewards import Reward
from rollart.errors import ConfigError
from rollart.rewards.check import Checked
from rollart.workers.functions.host import FunctionHost
from rollart.workers.functions.pool import Function
from rollart.workers.functions.scaling import Limits

__all__ = ["TOKEN_VARIABLE", "main"]

TOKEN_VARIABLE = "ROLLART_FUNCTIONS_TOKEN"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rollart.workers functions", description=__doc__)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help="import path, module:function")
    parser.add_argument("--file", type=Path, help="JSON list of functions with limits of their own")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than loopback want a token"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--address-file", type=Path, help="write the base URL there, too")
    parser.add_argument("--min-instances", type=int, default=0)
    parser.add_argument("--max-instances", type=int, default=32)
    parser.add_argument("--calls-per-instance", type=int, default=1)
    parser.add_argument(
        "--idle-s", type=float, help="of an instance without calls; by default what a start takes"
    )
    parser.add_argument("--memory-mib", type=int, default=0, help="of an instance; 0: not bounded")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.parent:
        from rollart.workers.worker import die_with_parent

        die_with_parent(options.parent)
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        if not token and not _is_loopback(options.host):
            raise ConfigError(f"--host {options.host} can be reached by others: set {TOKEN_VARIABLE}")
        functions = _functions(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        import uvloop

        return uvloop.run(_serve(options, functions, token))
    except OSError as error:
        sys.stderr.write(f"error: can't listen on {options.host}:{options.port}: {error}\n")
        return 1


def _functions(options: argparse.Namespace) -> list[Function]:
    _check_numbers(options)
    limits = Limits(options.min_instances, options.max_instances, options.calls_per_instance, options.idle_s)
    found = [
        Function(function=path, memory_mib=options.memory_mib, limits=limits) for path in options.functions
    ]
    if options.file is not None:
        try:
            found += msgspec.json.decode(options.file.read_bytes(), type=list[Function])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"can't read the functions in {options.file}: {error}") from None
    if not found:
        raise ConfigError("there is no function to serve: name one, module:function")
    wrong = [each.function for each in found if ":" not in each.function]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no import path: write module:function")
    _check_loading(options.functions)
    return found


def _check_numbers(options: argparse.Namespace) -> None:
    """``ConfigError`` where a number makes no pool."""
    least = {
        "min_instances": 0,
        "max_instances": 1,
        "calls_per_instance": 1,
        "idle_s": 0,
        "memory_mib": 0,
        "port": 0,
    }
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {bound}")
    if options.port > 65535:
        raise ConfigError(f"--port is {options.port}; it must be at most 65535")
    if options.min_instances > options.max_instances:
        raise ConfigError(
            f"--min-instances ({options.min_instances}) must be at most --max-instances ({options.max_instances})"
        )


def _check_loading(functions: list[str]) -> None:
    """``ConfigError`` where one can't be imported, tried in a process of its own: this one imports none of them."""
    if not functions:
        return
    rewards: list[Reward] = [Reward(function=path) for path in functions]
    task = Task(name="functions", environment="none:None", reward=rewards)
    command = [sys.executable, "-m", "rollart.rewards.check", "--names"]
    result = subprocess.run(command, input=msgspec.json.encode([task]), stdout=subprocess.PIPE, check=False)
    try:
        error = msgspec.json.decode(result.stdout, type=Checked).error
    except msgspec.DecodeError:
        error = f"importing them ended the process that tried it, with exit code {result.returncode}"
    if error:
        raise ConfigError(error.removeprefix("task functions: reward: "))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(options: argparse.Namespace, functions: list[Function], token: str) -> int:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, ended.set)
    host = FunctionHost(functions, token)
    address = await host.start(options.host, options.port)
    sys.stdout.write(f"serving {', '.join(host.pools)} at {address}\n")
    sys.stdout.flush()
    if options.address_file is not None:
        part = options.address_file.with_suffix(".part")
        part.write_text(address)
        part.rename(options.address_file)
    await ended.wait()
    await host.close()
    return 0
