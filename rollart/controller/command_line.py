"""The command line: ``run`` now; every command is a function and an entry in ``COMMANDS``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.errors import ConfigError, RollArtError

if TYPE_CHECKING:
    from rollart.config import Config
    from rollart.controller.run_folder import RunFolder

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Carry out a command; the process's exit code.  A user's mistake is one sentence on stderr."""
    parser = _parser()
    words = list(arguments)
    if words and words[0] == "--resume":
        words[0] = "resume"
    if words and words[0] not in COMMANDS and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    options, rest = parser.parse_known_args(words)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:  # argparse takes no more words after an option
        options.overrides = [*options.overrides, *rest]
    if "command" not in options:
        parser.print_help()
        return ConfigError.exit_code
    try:
        return COMMANDS[options.command][1](options)
    except RollArtError as error:
        # Only the first line: the rest was told when it happened, and the cause is to be the last line.
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollart.controller",
        description="Train LLM agents by reinforcement learning. A bare CONFIG means: run CONFIG.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (add, _) in COMMANDS.items():
        add(commands, name)
    return parser


# --- run ----------------------------------------------------------------------------------------------------


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    run = commands.add_parser(
        name,
        help="train",
        description="Train by CONFIG; key=value replaces a setting, such as rollout.group_size=16.",
    )
    run.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config and the placement, and start nothing",
    )
    run.set_defaults(command=name)


def _run(options: argparse.Namespace) -> int:
    from rollart.controller import preflight
    from rollart.controller.configuration import load_config
    from rollart.controller.run_folder import RunFolder, to_yaml

    config = load_config(options.config, options.overrides)
    preflight.check_layout(config)
    preflight.check_environments(config)
    config = preflight.resolve_rewards(config)
    folder = RunFolder.choose(config)
    if options.dry_run:
        from rollart.controller.resource_manager import ResourceManager

        placement = ResourceManager(config).explain()
        sys.stdout.write(f"{to_yaml(config)}\n# run folder: {folder.path}\n# placement:\n")
        sys.stdout.writelines(f"#   {line}\n" for line in placement.splitlines())
        sys.stdout.flush()
        return 0
    preflight.check_packages(config)
    return _start(config, folder)


# --- resume -------------------------------------------------------------------------------------------------


def _add_resume(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    resume = commands.add_parser(
        name,
        help="go on with a run that was killed, interrupted or failed (also: --resume RUN)",
        description="Go on with the run in the folder RUN, from its journal and its last checkpoint.",
    )
    resume.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME")
    resume.set_defaults(command=name, overrides=[])


def _resume(options: argparse.Namespace) -> int:
    from rollart.controller import preflight
    from rollart.controller.run_folder import RunFolder

    if options.overrides:
        raise ConfigError("a run is resumed with the settings it has: config.yaml in its folder")
    folder = RunFolder(options.folder.absolute())
    config = folder.reopen()
    try:
        preflight.check_environments(config)
        preflight.check_packages(config)
    except BaseException:
        folder.clean()
        raise
    return _start(config, folder, resume=True)


def _start(config: Config, folder: RunFolder, *, resume: bool = False) -> int:
    import uvloop

    from rollart.controller.collector import collecting_rarely
    from rollart.controller.controller import Outcome
    from rollart.controller.local_run import run_locally

    async def run() -> Outcome:
        with collecting_rarely():  # the process is the run's
            return await run_locally(config, folder, stream=sys.stdout, resume=resume)

    outcome = uvloop.run(run())
    sys.stdout.write(f"{outcome}: {folder.path}\n")
    return INTERRUPTED if outcome is Outcome.INTERRUPTED else 0


COMMANDS: dict[
    str,
    tuple[
        Callable[[argparse._SubParsersAction[argparse.ArgumentParser], str], None],
        Callable[[argparse.Namespace], int],
    ],
] = {"run": (_add_run, _run), "resume": (_add_resume, _resume)}
