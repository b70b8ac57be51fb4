"""How fast the controller is: ``python -m benchmarks.controller [--json FILE]``.

The shipping controller (state machine, event stream, metrics, staleness, groups, redundancy) over ZeroMQ with
CURVE, against worker processes that answer at once: ten turns a trajectory, prompts of 64 tokens that grow by 48
a turn.  Beside it, in the same run: the smallest loop that could do the exchange (``bare``; ``bare_framed`` shares
frames as RollArt does), and the same workload as Ray-based trainers and the ``verifiers`` library write it.  The
peers have packages of their own: ``make peers``.
"""

from __future__ import annotations

import argparse
import json
import operator
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.parts.report import Row, figure, heading, run_row, write_report
from benchmarks.parts.turns_launch import SIDE_BYTES, SIDE_SHARE

FULL: tuple[str, ...] = ()
LIVE = (1_000, 10_000, 100_000)
PEERS_LIVE = 1_000
TURNS = {1_000: 150_000, 10_000: 300_000, 100_000: 1_000_000}
SHORT_TURNS = {1_000: 60_000, 10_000: 120_000, 100_000: 300_000}
PEER_TURNS = {"ray": 15_000, "verifiers": 10_000}
SHORT_PEER_TURNS = {"ray": 5_000, "verifiers": 1_000}
PEERS_PYTHON = Path(__file__).parent.parent / ".peers" / "bin" / "python"
HOLDS = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
PACKAGES = ("pyzmq", "msgspec", "uvloop")
CASES = {"turns": "", "side_payloads": " with 1 MB beside 1% of answers", "again": ", again"}


def measure(
    live: list[int], turns: dict[int, int], peers: Path | None, peer_turns: dict[str, int]
) -> list[Row]:
    """All rows; what is to be compared runs one after the other."""
    rows = []
    for count in live:
        wanted = turns.get(count, 10 * count)
        for system in ("bare", "bare_framed", "rollart"):
            rows.append(_row(system, count, "turns", [system, str(count), str(wanted)]))
        if count == PEERS_LIVE and peers is not None:
            for peer, enough in peer_turns.items():
                command = [str(peers), "-m", f"benchmarks.parts.turns_{peer}", str(count), str(enough)]
                rows.append({"system": peer, "live": count, "case": "turns", **run_row(command)})
                _say(rows[-1])
        if count == LIVE[1]:
            side = ["--side-bytes", str(SIDE_BYTES), "--side-share", str(SIDE_SHARE)]
            rows.append(
                _row("rollart", count, "side_payloads", ["rollart", str(count), str(wanted // 2), *side])
            )
        if (
            count == LIVE[2]
        ):  # the machine's speed changes over the minutes, so what is compared stands together
            few = LIVE[0]
            rows.append(_row("rollart", few, "again", ["rollart", str(few), str(turns[few])]))
    return rows


def _row(system: str, live: int, case: str, arguments: list[str]) -> Row:
    command = [sys.executable, "-m", "benchmarks.parts.turns_row", *arguments]
    row = {"system": system, "live": live, "case": case, **run_row(command)}
    _say(row)
    return row


def _say(row: Row) -> None:
    sys.stderr.write(
        f"{row['system']:>10} {row['live']:>7,} live {row['case']:<13} {row['turns_per_second']:>8,.0f} turns/s "
        f"{row['cpu_us_per_turn']:>6,.0f} µs/turn  lag p99 {row['loop_lag_p99_ms']:.1f} ms\n"
    )


# --- what it says ---------------------------------------------------------------------------------------


def targets(rows: list[Row]) -> list[Row]:
    """Each aim, what was found, and whether it holds; only those whose rows are there."""
    found = {(row["system"], row["live"], row["case"]): row for row in rows}
    small, middle, large = LIVE

    def of(system: str, live: int, name: str, case: str = "turns") -> float | None:
        row = found.get((system, live, case))
        return None if row is None else float(row[name])

    def ratio(above: float | None, below: float | None) -> float | None:
        return None if above is None or below is None else above / below

    rate, cpu, lag = "turns_per_second", "cpu_us_per_turn", "loop_lag_p99_ms"
    fast, held = of("rollart", middle, rate), of("rollart", large, "bytes_per_trajectory")
    suspend = max((row["suspend_max_ms"] for row in rows if row.get("suspends")), default=None)
    over_verifiers = ratio(of("rollart", small, rate), of("verifiers", small, rate))
    growth = ratio(of("rollart", large, cpu), of("rollart", small, cpu, "again"))
    aims = [
        ("turns/s at 10,000 live over Ray's at 1,000", ratio(fast, of("ray", small, rate)), ">=", 10.0),
        ("turns/s over verifiers', both at 1,000 live", over_verifiers, ">=", 10.0),
        ("turns/s over the bare loop's at 10,000 live", ratio(fast, of("bare", middle, rate)), ">=", 0.5),
        ("CPU a turn at 100,000 live over that at 1,000, right after it", growth, "<=", 1.5),
        ("bytes a live trajectory beyond its tokens, at 100,000 live", held, "<=", 6_000.0),
        ("longest SUSPEND under saturation, ms", suspend, "<", 100.0),
        ("1,000 cancels settled at 10,000 live, s", of("rollart", middle, "cancel_s"), "<", 1.0),
        (
            "loop lag p99 at 10,000 live with 1 MB beside 1% of answers, ms",
            of("rollart", middle, lag, "side_payloads"),
            "<",
            10.0,
        ),
    ]
    return [
        {"aim": text, "found": value, "relation": sign, "target": target, "holds": HOLDS[sign](value, target)}
        for text, value, sign, target in aims
        if value is not None
    ]


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown by name, for the docs."""
    rows = report["rows"]
    columns = {
        "turns_per_second": "turns/s",
        "cpu_us_per_turn": "CPU µs/turn",
        "loop_cpu_us_per_turn": "of it the loop's",
        "loop_lag_p50_ms": "lag p50 ms",
        "loop_lag_p99_ms": "lag p99 ms",
        "loop_lag_max_ms": "lag max ms",
        "bytes_per_trajectory": "bytes/trajectory",
    }
    lines = [heading(["system", "live", *columns.values()], text=1)]
    for row in rows:
        name = row["system"] + CASES[row["case"]]
        lines.append(f"| {name} | {row['live']:,} | {' | '.join(figure(row[c]) for c in columns)} |")
    aims = [heading(["aim", "found", "target", "holds"], text=1)]
    for aim in report["targets"]:
        relation = {">=": "≥", "<=": "≤", "<": "<"}[aim["relation"]]
        aims.append(
            f"| {aim['aim']} | {figure(aim['found'])} | {relation} {aim['target']:,g} "
            f"| {'yes' if aim['holds'] else 'no'} |"
        )
    return {"turns": "\n".join(lines), "targets": "\n".join(aims)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller", description=__doc__)
    parser.add_argument("--live", default=",".join(map(str, LIVE)), help="trajectories in flight, a list")
    parser.add_argument("--short", action="store_true", help="fewer turns")
    parser.add_argument(
        "--peers", type=Path, default=PEERS_PYTHON, metavar="PYTHON",
        help="the interpreter that has ray and verifiers; by default the one that make peers makes",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    try:
        live = [int(count) for count in options.live.split(",")]
    except ValueError:
        live = []
    if not live or min(live) < 100:
        sys.stderr.write(
            "python -m benchmarks.controller: --live takes numbers of at least 100, such as 1000,10000\n"
        )
        return 2
    peers = options.peers if options.peers.exists() else None
    if peers is None:
        sys.stderr.write(f"no peers: {options.peers} is not there (make peers)\n")
        if options.json and options.json.exists() and json.loads(options.json.read_text()).get("peers"):
            sys.stderr.write(
                f"python -m benchmarks.controller: {options.json} has the peers' rows, which would be lost\n"
            )
            return 2
    started = time.perf_counter()
    turns, peer_turns = (SHORT_TURNS, SHORT_PEER_TURNS) if options.short else (TURNS, PEER_TURNS)
    rows = measure(live, turns, peers, peer_turns)
    report = write_report(
        options.json, PACKAGES, rows=rows, targets=targets(rows), curve=True,
        form="short" if options.short else "full", peers=_peer_versions(peers),
        seconds=round(time.perf_counter() - started),
    )  # fmt: skip
    sys.stdout.write("\n\n".join(tables(report).values()) + "\n")
    return 0


def _peer_versions(python: Path | None) -> dict[str, str]:
    if python is None:
        return {}
    code = "import json, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in ('ray', 'verifiers')}))"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


if __name__ == "__main__":
    sys.exit(main())
