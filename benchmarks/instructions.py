"""How many instructions of Python the controller takes a turn: ``python -m benchmarks.instructions [--json FILE]``.

A simulated run of the shipping controller, traced: its bytecode instructions, by function, over the turns.  Unlike
time this is the same on every machine, so a test compares it with what is stored and says what moved.  What C code
does (encoding, dicts, ZeroMQ) is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rollart
from benchmarks.parts.render import RESULTS
from benchmarks.parts.report import Row, figure, heading, write_report
from benchmarks.parts.turns_shape import ANSWER_TOKENS, FIRST_TOKENS, OBSERVATION_TOKENS, TURNS
from rollart.config import Config, Inference, Model, RandomModel, Rollout, Sampling, Task
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.hardware import CPU
from rollart.simulation.run import Setup, simulate
from rollart.simulation.scenario import SMALL
from rollart.simulation.workload import Distribution, Family
from rollart.simulation.world import Timings

FULL: tuple[str, ...] = ()
STORED = RESULTS / "instructions.json"
PACKAGE = Path(rollart.__file__).parent
TRACED = tuple(
    str(PACKAGE / part)
    for part in ("controller", "outbox.py", "packed_array.py", "packing.py", "protocol.py")
)
CHECK = str(PACKAGE / "controller" / "invariants.py")
"""Only simulations and tests run it."""
NOTABLE = 0.05
"""Share of a turn's instructions by which the whole may move; a function that moves by a tenth of that is named."""


def measure() -> Row:
    """Instructions a turn, in all and by function."""
    counts: Counter[CodeType] = Counter()
    wanted: dict[CodeType, bool] = {}

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            counts[frame.f_code] += 1
        return traced

    def called(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in wanted:
            wanted[code] = code.co_filename.startswith(TRACED) and code.co_filename != CHECK
        if not wanted[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return traced

    before = sys.gettrace()
    sys.settrace(called)
    try:
        result = simulate(_setup(), seed=0, check=False)
    finally:
        sys.settrace(before)
    if result.outcome != "success" or result.violations:
        raise RuntimeError(f"the simulated run failed: {result.cause} {result.violations[:3]}")
    turns = sum(row["turns"] for row in result.rows)
    by_function: Counter[str] = Counter()
    for code, count in counts.items():
        by_function[_name(code)] += count
    return {
        "turns": turns,
        "per_turn": sum(counts.values()) / turns,
        "functions": {name: round(count / turns, 2) for name, count in by_function.most_common()},
    }


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(PACKAGE).with_suffix('')}:{code.co_qualname}"


def _setup() -> Setup:
    """The exchange of ``benchmarks.controller``, small."""
    config = Config(
        name="instructions",
        steps=4,
        model=Model(random=RandomModel(max_position_embeddings=1024)),
        tasks=[Task(name="turns", environment="simulated:Family", max_turns=TURNS)],
        sampling=Sampling(max_tokens=ANSWER_TOKENS),
        rollout=Rollout(groups_per_batch=4, group_size=8, redundant_groups=1, redundant_members=1),
        inference=Inference(workers=2, max_model_len=1024),
    )
    family = Family(
        turns=Distribution(TURNS),
        prompt_tokens=Distribution(FIRST_TOKENS),
        observation_tokens=Distribution(OBSERVATION_TOKENS),
        answer_tokens=Distribution(ANSWER_TOKENS),
        reset_s=Distribution(0.1, 0.5),
        step_s=Distribution(0.1, 0.5),
    )
    return Setup(
        config=config,
        families={"turns": family},
        timings=Timings(start_s=2.0, pull_s=0.1, load_s=0.05, publish_s=0.2, save_s=0.0),
        engine=lambda placement: BatchingEngine(
            EngineCosts(CPU, SMALL, step_overhead_s=0.01), token_budget=2048
        ),
        step_s=lambda lengths, scored: 1.0,
        delay=lambda worker, size: 0.001,
    )


def moved(stored: Row, found: Row) -> list[str]:
    """What a person wants to know when the count has changed: the functions, most first."""
    names = {*stored["functions"], *found["functions"]}
    changes = {n: found["functions"].get(n, 0.0) - stored["functions"].get(n, 0.0) for n in names}
    notable = NOTABLE * stored["per_turn"] / 10
    return [
        f"{name}: {stored['functions'].get(name, 0.0):.1f} → {found['functions'].get(name, 0.0):.1f}"
        for name, change in sorted(changes.items(), key=lambda item: -abs(item[1]))
        if abs(change) >= notable
    ]


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    lines = [heading(["function", "instructions a turn"], text=1)]
    lines += [f"| `{name}` | {figure(count)} |" for name, count in list(report["functions"].items())[:20]]
    lines += [f"| all {len(report['functions'])} | {figure(report['per_turn'])} |"]
    return {"functions": "\n".join(lines)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("--short", action="store_true", help="as without: there is one form only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    stored = json.loads(STORED.read_text()) if STORED.exists() else None
    report = write_report(options.json, (), form="full", **measure())
    sys.stdout.write(tables(report)["functions"] + "\n")
    if stored is not None:
        sys.stdout.write(f"\nstored: {stored['per_turn']:.1f}, now {report['per_turn']:.1f} a turn\n")
        sys.stdout.write("".join(f"{line}\n" for line in moved(stored, report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
