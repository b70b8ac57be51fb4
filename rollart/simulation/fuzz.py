"""Thousands of seeded fault schedules against the shipping controller.

Each seed draws a small run and its faults.  A run must end, with success where nothing befell it that it
can't survive, else with an error that says its cause; and no invariant may be broken on the way.  Of a seed
that fails the shortest list of faults that still fails is sought.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from rollart.simulation.run import Result, simulate
from rollart.simulation.scenario import Scenario, draw_scenario

__all__ = ["Failure", "Report", "Verdict", "fuzz", "judge", "run_seed", "shrink"]

END_AT_S = 20_000.0
"""Virtual time that no small run needs, whatever befalls it."""
CHUNK = 20


class Verdict(msgspec.Struct):
    """What came of one seed."""

    seed: int
    wrong: list[str]
    """Empty: all was well."""
    outcome: str
    transitions: int
    callbacks: int
    seconds: float
    """Of virtual time."""
    faults: dict[str, int]


class Failure(msgspec.Struct):
    """A seed that failed, and the least that makes it fail."""

    seed: int
    wrong: list[str]
    kept: list[int]
    """Numbers of the faults that it takes."""
    shuffle: bool
    schedule: list[str]

    @property
    def command(self) -> str:
        """What replays it."""
        kept = ",".join(map(str, self.kept)) or "none"
        shuffle = "" if self.shuffle else " --no-shuffle"
        return (
            f"python -m rollart.simulation fuzz --seeds {self.seed}:{self.seed + 1} --faults {kept}{shuffle}"
        )


class Report(msgspec.Struct):
    """What came of all seeds."""

    seeds: int = 0
    failures: int = 0
    failed: list[Failure] = msgspec.field(default_factory=list)
    transitions: int = 0
    callbacks: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    faults: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        """Count one seed's."""
        self.seeds += 1
        self.transitions += verdict.transitions
        self.callbacks += verdict.callbacks
        self.simulated_s += verdict.seconds
        self.outcomes[verdict.outcome] = self.outcomes.get(verdict.outcome, 0) + 1
        self.faults = dict(sorted((Counter(self.faults) + Counter(verdict.faults)).items()))


def run_seed(seed: int, *, kept: Sequence[int] | None = None, shuffle: bool = True) -> Verdict:
    """Simulate ``seed``, with only the faults of the numbers ``kept`` where given."""
    scenario = draw_scenario(seed)
    if kept is not None:
        scenario = Scenario(scenario.setup, [scenario.faults[number] for number in kept])
    result = simulate(scenario.setup, seed=seed, faults=scenario.faults, shuffle=shuffle, end_at_s=END_AT_S)
    return Verdict(
        seed,
        judge(scenario, result),
        result.outcome,
        result.transitions,
        result.callbacks,
        result.seconds,
        result.faults,
    )


def judge(scenario: Scenario, result: Result) -> list[str]:
    """What was wrong with ``result``; empty when all was well."""
    wrong = list(result.violations)
    if result.outcome == "error" and scenario.must_succeed():
        wrong.append(f"the run failed though nothing befell it that it can't survive: {result.cause}")
    if result.outcome == "error" and not result.cause:
        wrong.append("the run failed without a cause")
    if result.outcome == "success" and len(result.rows) != scenario.setup.config.steps:
        wrong.append(f"{len(result.rows)} rows of metrics for {scenario.setup.config.steps} steps")
    return wrong


def shrink(seed: int, *, shuffle: bool = True) -> Failure:
    """The least that makes ``seed`` fail: faults are left out one by one while it still does."""
    scenario = draw_scenario(seed)
    kept = list(range(len(scenario.faults)))
    verdict = run_seed(seed, kept=kept, shuffle=shuffle)
    if shuffle and (plain := run_seed(seed, kept=kept, shuffle=False)).wrong:
        verdict, shuffle = plain, False
    smaller = True
    while smaller:
        smaller = False
        for number in list(kept):
            fewer = [other for other in kept if other != number]
            tried = run_seed(seed, kept=fewer, shuffle=shuffle)
            if tried.wrong:
                kept, verdict, smaller = fewer, tried, True
    return Failure(seed, verdict.wrong, kept, shuffle, [str(scenario.faults[number]) for number in kept])


def fuzz(
    seeds: range, *, jobs: int, shuffle: bool = True, kept: Sequence[int] | None = None
) -> Iterator[Verdict | Report]:
    """Run all ``seeds`` in ``jobs`` processes; yields each ``Verdict`` as it comes and, last, the ``Report``."""
    started = time.perf_counter()
    report = Report()
    bad: list[int] = []
    for verdict in _verdicts(seeds, jobs, shuffle, kept):
        report.add(verdict)
        if verdict.wrong:
            bad.append(verdict.seed)
        yield verdict
    if kept is None:
        report.failed = [shrink(seed, shuffle=shuffle) for seed in sorted(bad)[:10]]
    report.failed += [
        Failure(v.seed, v.wrong, list(kept or ()), shuffle, [])
        for v in (run_seed(seed, kept=kept, shuffle=shuffle) for seed in sorted(bad)[len(report.failed) :])
    ]
    report.failures = len(bad)
    report.wall_s = time.perf_counter() - started
    yield report


def _verdicts(seeds: range, jobs: int, shuffle: bool, kept: Sequence[int] | None) -> Iterator[Verdict]:
    if jobs == 1 or len(seeds) == 1:
        for seed in seeds:
            yield run_seed(seed, kept=kept, shuffle=shuffle)
        return
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [pool.submit(_run_chunk, chunk, shuffle) for chunk in chunks]
        for done in concurrent.futures.as_completed(waiting):
            yield from done.result()


def _run_chunk(seeds: range, shuffle: bool) -> list[Verdict]:
    return [run_seed(seed, shuffle=shuffle) for seed in seeds]
