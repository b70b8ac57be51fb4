"""``calibrate`` and ``plan`` of the simulator's command line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from rollart.config import Config
from rollart.controller.configuration import load_config
from rollart.errors import ConfigError
from rollart.simulation.calibrating import ROUNDS, calibrate
from rollart.simulation.calibration import Calibration, load_calibration
from rollart.simulation.observed import read_run
from rollart.simulation.planner import STEPS, Plan, plan
from rollart.simulation.pools import load_pools, pool_site
from rollart.simulation.site import CalibratedSite, Site

__all__ = ["add_calibrate", "add_plan"]

FEWEST_STEPS = 4


def add_calibrate(commands: argparse._SubParsersAction[Any]) -> None:
    """``calibrate RUN_FOLDER``."""
    parser = commands.add_parser("calibrate", help="fit latency models to a run")
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="of a run that has ended")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default RUN_FOLDER/calibration.json")
    parser.add_argument(
        "--cores",
        type=_at_least(1),
        default=len(os.sched_getaffinity(0)),
        help="CPU cores of the machine that the run was on; default: as many as this one has",
    )
    parser.add_argument(
        "--rounds",
        type=_at_least(0),
        default=ROUNDS,
        help=f"of simulating the run and correcting the models; default {ROUNDS}",
    )
    parser.set_defaults(run=_calibrate)


def add_plan(commands: argparse._SubParsersAction[Any]) -> None:
    """``plan CONFIG``."""
    parser = commands.add_parser("plan", help="predict a run, and what more hardware would bring")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="of the run, a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--pools", type=Path, metavar="FILE", help="hardware to plan for, a YAML file")
    where.add_argument("--calibration", type=Path, metavar="FILE", help="of a run on the machine to plan for")
    parser.add_argument(
        "--slower",
        type=_slower,
        action="append",
        default=[],
        metavar="TASK=SECONDS",
        help="with --calibration: a reset and a step of the task's environment take so much longer than then",
    )
    parser.add_argument(
        "--steps", type=_at_least(FEWEST_STEPS), default=STEPS, help=f"to simulate, default {STEPS}"
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of the simulation, default 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan")
    parser.set_defaults(run=_plan)


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {least}")
        return int(text)

    return number


def _slower(text: str) -> tuple[str, float]:
    task, equals, seconds = text.rpartition("=")
    try:
        found = float(seconds)
    except ValueError:
        found = -1.0
    if not equals or not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no TASK=SECONDS such as FrozenLake=0.1")
    return task, found


def _calibrate(options: argparse.Namespace, out: TextIO) -> int:
    found = calibrate(read_run(options.folder), cores=options.cores, rounds=options.rounds)
    path = options.out or options.folder / "calibration.json"
    found.save(path)
    out.write(summary_of(found))
    out.write(f"wrote {path}\n")
    return 0


def _plan(options: argparse.Namespace, out: TextIO) -> int:
    config = load_config(options.config, options.overrides)
    site, where = _site(options, config)

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"simulating {what}\n")

    found = plan(site, steps=options.steps, seed=options.seed, tell=tell)
    out.write(report_of(found, where))
    if options.json:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"can't write {options.json}: {error.strerror}") from None
    return 0


def _site(options: argparse.Namespace, config: Config) -> tuple[Site, str]:
    if options.calibration is not None:
        calibration = load_calibration(options.calibration)
        site = CalibratedSite(config, calibration, slower=dict(options.slower))
        return site, f"the machine that {calibration.run} ran on ({calibration.machine.cores} CPU cores)"
    if options.slower:
        raise ConfigError(
            "--slower is about a calibrated run: with --pools, the task's family gives the times"
        )
    site_of_pools = pool_site(load_pools(options.pools), config)
    pools = ", ".join(f"{pool.gpus} {pool.hardware_class}" for pool in site_of_pools.cluster.generation)
    trainer = site_of_pools.cluster
    return (
        site_of_pools,
        f"{pools} that generate and {trainer.trainer.devices} {trainer.trainer_class} that train "
        f"{trainer.model.name}",
    )


# --- for people ----------------------------------------------------------------------------------------------


def summary_of(found: Calibration) -> str:
    """The models in a few lines."""
    engine, trainer, machine = found.engine, found.trainer, found.machine
    lines = [
        f"{found.run}: {found.steps} steps on {machine.cores} CPU cores",
        f"engine step   {engine.step_s.value * 1e3:.2f} ms + {engine.sequence_s.value * 1e3:.3f} ms a sequence "
        f"+ {engine.prompt_token_s.value * 1e6:.2f} µs a token of prompt "
        f"({engine.step_s.observations} answers, off by {engine.relative_error:.0%} each)",
        f"train_step    {trainer.step_s.value:.3f} s + {trainer.token_s.value * 1e6:.1f} µs a token "
        f"({trainer.step_s.observations} steps, off by {trainer.relative_error:.0%} each)",
        f"controller    {machine.message_s.value * 1e3:.3f} ms a message, "
        f"{machine.hop_s.value * 1e3:.1f} ms on the way to an environment or back",
    ]
    for name, task in found.tasks.items():
        lines.append(
            f"{name}: {task.turns.mean:.2f} turns ({task.turns.observations} episodes), reset "
            f"{task.reset_s.mean * 1e3:.1f} ms, step {task.step_s.mean * 1e3:.1f} ms, "
            f"answers of {task.answer_tokens.mean:.1f} tokens"
        )
    if found.check is not None:
        measured, predicted = found.check.measured_step_s, found.check.predicted_step_s
        lines.append(
            f"the run itself: {measured.value:.3f} s a step measured, {predicted:.3f} s simulated "
            f"({predicted / measured.value - 1:+.0%}, after {found.check.rounds} rounds)"
        )
    return "\n".join(lines) + "\n"


def report_of(found: Plan, where: str) -> str:
    """The plan as people read it."""
    now = found.prediction
    limits = ", ".join(
        f"{name} {_seconds(limit)}"
        for name, limit in sorted(now.limits_s.items(), key=lambda item: -item[1])
        if name != now.bottleneck
    )
    lines = [
        f"{found.run} on {where}, {found.steps} steps simulated",
        f"step time     {_seconds(now.step_s)} ± {_seconds(now.step_error_s)} (get_batch {_seconds(now.get_batch_s)}, "
        f"weights {_seconds(now.update_wait_s)}, train_step {_seconds(now.train_step_s)})",
        f"throughput    {now.trajectories_per_s:,.1f} trajectories/s trained, {now.tokens_per_s:,.0f} tokens/s sampled",
        f"idle          {', '.join(f'{name} {share:.0%}' for name, share in now.idle.items())}",
        f"bottleneck    {now.bottleneck}: at least {_seconds(now.limits_s[now.bottleneck])} a step ({limits})",
        f"bound         {_seconds(now.bound_s)} a step; the run takes {now.step_s / now.bound_s:.2f} times as long",
        "",
        f"{'one more':<28} {'step time':>10} {'speed':>7}  bottleneck then",
    ]
    lines += [
        f"{change.more:<28} {_seconds(change.step_s):>10} {change.speedup:>6.2f}×  {change.bottleneck}"
        for change in found.changes
    ]
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:,.1f} s"
