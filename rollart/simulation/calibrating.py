"""From what was observed of a run to its calibration.

What a request took depends on who else computed on the same cores.  So times are turned into work first: the time
in which somebody computes counts by the rate that the ``Host``'s rule gives, with those who computed then.  The models
are fitted to work; then the run itself is simulated with them, and each is corrected by the factor between what came
out and what was observed, a few rounds, until the simulated run is as the real one was.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rollart.config import Config, Evaluation
from rollart.controller import events
from rollart.controller.trajectory import State
from rollart.errors import ConfigError
from rollart.simulation.calibration import (
    Calibration,
    Check,
    EngineModel,
    MachineModel,
    TaskModel,
    TrainerModel,
    WeightModel,
    calibrated_setup,
    kv_tokens_of,
)
from rollart.simulation.fitting import (
    Measured,
    fit,
    mean,
    mean_of,
    sample_of,
    shared_share,
    turns_of,
)
from rollart.simulation.observed import Call, Observed, Request, observe
from rollart.simulation.run import simulate

__all__ = ["ROUNDS", "calibrate", "simulated_config", "steady"]

BIN_S = 0.005
BURST = 150
"""Messages, at least, in a stretch that the controller handles one after the other."""
FASTEST = 0.02
"""Share of the stretches that tell its rate: where it has nothing else to wait for."""
FIXED_SHARE = 0.1
"""Of a train_step: about what its fixed part may be, unless the steps say otherwise."""
ROUNDS = 3
SHORT_TOKENS = 4
"""Answers of fewer, on average, show the engine's single steps."""
GAP_S = 0.008
"""Between the answers of one step and those of the next, at least; an engine's answers of one step may take a moment
to come."""
CLASSES = 10
"""Of the engine's steps, by the tokens that they compute."""
QUICK = 0.25
"""The quantile of a class's steps that counts."""
CALM = 0.05
"""Share of the calls of environments, those that began with the fewest others under way."""
CALM_CALLS = 20
"""At least, of each kind."""
MOST_STEPS = 12
"""That are simulated in a round."""
FEWEST_STEPS = 5
MOST_CORRECTION = 2.0
"""Of a round, either way."""
DAMPING = 0.6
"""Exponent of the first round's correction, and less in each later one: who computes less also leaves more to the
others, and what is corrected by all of the difference swings."""


def steady(config: Config, steps: int) -> int:
    """The first step, of so many, that no longer shows the run's beginning."""
    return min(config.rollout.staleness_bound + 1, max(0, steps - 2))


def simulated_config(config: Config, steps: int) -> Config:
    """``config`` with so many steps, and nothing that is no part of a step."""
    trainer = msgspec.structs.replace(config.trainer, checkpoint_every=0, keep_checkpoints=None)
    return msgspec.structs.replace(config, steps=steps, evaluation=Evaluation(), trainer=trainer)


def calibrate(seen: Observed, *, cores: int, rounds: int = ROUNDS) -> Calibration:
    """The models of a run on a machine with so many ``cores``; ``ConfigError`` when there is too little of it."""
    if len(seen.step_s) < FEWEST_STEPS or not seen.requests or not seen.train_steps:
        raise ConfigError(
            f"the run has {len(seen.step_s)} train_steps with {len(seen.requests)} answers: a calibration takes at "
            f"least {FEWEST_STEPS} steps"
        )
    message_s = _message_s(seen.messages_s)
    found = _first(seen, cores, message_s)
    steps = min(MOST_STEPS, len(seen.step_s))
    config = simulated_config(seen.config, steps)
    measured = _summary(seen)
    best, least = found, math.inf
    for number in range(rounds + 1):
        simulated = _simulated(found, config)
        check = Check(
            measured_step_s=mean_of(seen.step_s[steady(seen.config, len(seen.step_s)) :]),
            predicted_step_s=float(f"{simulated.step_s:.6g}"),
            rounds=number,
        )
        off = _distance(measured, simulated)
        if off < least:
            best, least = msgspec.structs.replace(found, check=check), off
        found = _corrected(found, measured, simulated, DAMPING / (1 + number / 2))
    return best


# --- the first estimate --------------------------------------------------------------------------------------


def _message_s(times: Sequence[float]) -> Measured:
    """Seconds that the controller takes for a message, where it has many to handle.

    Its clock stands still while its loop carries out what is ready: a stretch goes from one such time to another.
    """
    starts = [i for i in range(len(times)) if i == 0 or times[i] > times[i - 1]]
    rates = []
    for start in starts:
        at = bisect.bisect_left(starts, start + BURST)
        if at < len(starts):
            rates.append((times[starts[at]] - times[start]) / (starts[at] - start))
    rates.sort()
    return mean_of(rates[: max(min(3, len(rates)), int(len(rates) * FASTEST))])


class _Work:
    """Seconds of work that somebody who computed from one time to another had done, on cores shared by all."""

    def __init__(self, seen: Observed, cores: int, message_s: float) -> None:
        end = max((seen.step_s and seen.train_steps[-1].end_s) or 0.0, seen.requests[-1].end_s)
        bins = int(end / BIN_S) + 2
        busy = [0.0] * bins
        by_worker: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for request in seen.requests:
            by_worker[request.worker].append((request.start_s, request.end_s))
        threads = seen.config.inference.threads
        for spans in by_worker.values():
            _add(busy, _union(spans), threads)
        _add(busy, [(s.start_s, s.end_s) for s in seen.train_steps], seen.config.trainer.threads)
        messages = [0.0] * bins
        for time in seen.messages_s:
            messages[min(bins - 1, int(time / BIN_S))] += message_s
        backlog = 0.0
        rates = []
        for number in range(bins):
            backlog += messages[number]
            possible = BIN_S * min(1.0, cores / (busy[number] + 1))
            handled = min(possible, backlog)
            backlog -= handled
            rates.append(min(1.0, cores / max(1.0, busy[number] + handled / possible)))
        self._done = [0.0, *itertools.accumulate(rate * BIN_S for rate in rates)]

    def __call__(self, start_s: float, end_s: float) -> float:
        return self._at(end_s) - self._at(start_s)

    def _at(self, time: float) -> float:
        low = min(len(self._done) - 2, int(time / BIN_S))
        part = time / BIN_S - low
        return self._done[low] + part * (self._done[low + 1] - self._done[low])


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _add(busy: list[float], spans: Sequence[tuple[float, float]], threads: int) -> None:
    """Add the share of each bin that the spans cover."""
    for start, end in spans:
        low, high = int(max(0.0, start) / BIN_S), min(len(busy) - 1, int(end / BIN_S))
        for number in range(low, high + 1):
            covered = min(end, (number + 1) * BIN_S) - max(start, number * BIN_S)
            busy[number] += threads * max(0.0, covered) / BIN_S


class _Flow:
    """A quantity that requests take along evenly over their time: how much of it falls between two times."""

    def __init__(self, requests: Sequence[Request], amount: Callable[[Request], float]) -> None:
        changes: list[tuple[float, float]] = []
        for request in requests:
            rate = amount(request) / max(1e-6, request.end_s - request.start_s)
            changes += [(request.start_s, rate), (max(request.end_s, request.start_s + 1e-6), -rate)]
        changes.sort()
        self._times = [time for time, _ in changes]
        self._rates = list(itertools.accumulate(rate for _, rate in changes))
        spans = (after - before for before, after in itertools.pairwise(self._times))
        self._sums = [
            0.0,
            *itertools.accumulate(rate * span for rate, span in zip(self._rates, spans, strict=False)),
        ]

    def between(self, start_s: float, end_s: float) -> float:
        """Of the quantity, from ``start_s`` to ``end_s``."""
        return self._until(end_s) - self._until(start_s)

    def _until(self, time: float) -> float:
        at = bisect.bisect_right(self._times, time) - 1
        return self._sums[at] + self._rates[at] * (time - self._times[at]) if at >= 0 else 0.0


def _first(seen: Observed, cores: int, message_s: Measured) -> Calibration:
    config = seen.config
    work = _Work(seen, cores, message_s.value)
    trainer, trainer_error = fit(
        [[1.0, float(step.tokens)] for step in seen.train_steps],
        [work(step.start_s, step.end_s) for step in seen.train_steps],
        # The batches of one run are much alike, and say little of what a batch of no tokens would take.
        small={0: FIXED_SHARE},
    )
    swaps = seen.swaps
    environments = _Environments(seen)
    tasks = {task.name: _task(seen, task.name, environments) for task in config.tasks}
    return Calibration(
        run=config.name,
        steps=len(seen.step_s),
        tasks=tasks,
        engine=_engine(seen, work, message_s.value),
        trainer=TrainerModel(step_s=trainer[0], token_s=trainer[1], relative_error=trainer_error),
        weights=WeightModel(
            publish_s=mean_of(seen.publish_s),
            pull_s=mean_of([swap.pull_s for swap in swaps]),
            suspend_s=mean_of([swap.suspend_s for swap in swaps]),
            update_s=mean_of([swap.update_s for swap in swaps]),
            resume_s=mean_of([swap.resume_s for swap in swaps]),
        ),
        machine=MachineModel(
            cores=cores,
            processes={"controller": 1, "inference": config.inference.workers, "trainer": 1},
            engine_threads=config.inference.threads,
            trainer_threads=config.trainer.threads,
            message_s=message_s,
            hop_s=_hop_s(seen, tasks),
            start_s={role: mean_of(times) for role, times in seen.start_s.items()},
        ),
    )


def _engine(seen: Observed, work: _Work, message_s: float) -> EngineModel:
    by_worker: defaultdict[str, list[Request]] = defaultdict(list)
    for request in seen.requests:
        by_worker[request.worker].append(request)
    short = statistics.fmean(request.tokens for request in seen.requests) < SHORT_TOKENS
    rows: list[list[float]] = []
    targets: list[float] = []
    count = sum(
        (_by_steps if short else _by_answers)(requests, work, rows, targets)
        for requests in by_worker.values()
    )
    coefficients, error = fit(rows, targets)
    step_s, sequence_s, prompt_token_s = (
        msgspec.structs.replace(number, observations=count) for number in coefficients
    )
    # Answers of one step come together: the controller takes each in, and sends its environment the step.
    sequence_s = msgspec.structs.replace(sequence_s, value=max(0.0, sequence_s.value - 2 * message_s))
    later = [request for request in seen.requests if not request.first and request.prompt_tokens]
    hits = [request.cached_tokens / request.prompt_tokens for request in later]
    return EngineModel(
        step_s=step_s,
        sequence_s=sequence_s,
        prompt_token_s=prompt_token_s,
        relative_error=error,
        prefix_hit_share=mean_of(hits),
        kv_tokens=kv_tokens_of(seen.config),
    )


def _by_steps(requests: Sequence[Request], work: _Work, rows: list[list[float]], targets: list[float]) -> int:
    """Where answers are a token or few, each step of the engine ends with some: they come in bursts, a step apart.

    What else goes on in between, on cores that are shared, only makes a step longer: of the steps that computed about
    as many tokens, the quick ones count.
    """
    ordered = sorted(requests, key=lambda request: request.end_s)
    bursts = [[ordered[0]]]
    for before, request in itertools.pairwise(ordered):
        if request.end_s - before.end_s >= GAP_S:
            bursts.append([])
        bursts[-1].append(request)
    steps: list[tuple[float, float, float]] = []
    for last, burst in itertools.pairwise(bursts):
        began = last[0].end_s
        if min(request.start_s for request in burst) < began:  # the engine went from one step to the next
            prompts = sum(request.prompt_tokens - request.cached_tokens for request in burst)
            steps.append((float(prompts), float(len(burst)), work(began, burst[0].end_s)))
    steps.sort()
    count = len(steps)
    for number in range(CLASSES):
        alike = steps[number * len(steps) // CLASSES : (number + 1) * len(steps) // CLASSES]
        if alike:
            mean_prompts, sequences, _ = (statistics.fmean(column) for column in zip(*alike, strict=True))
            rows.append([1.0, sequences, mean_prompts])
            targets.append(sorted(seconds for _, _, seconds in alike)[int(QUICK * (len(alike) - 1))])
    return count


def _by_answers(
    requests: Sequence[Request], work: _Work, rows: list[list[float]], targets: list[float]
) -> int:
    """Where answers are long: as many steps as it has tokens, and what all requests brought into them."""
    sampled = _Flow(requests, lambda r: r.tokens)
    prompts = _Flow(requests, lambda r: r.prompt_tokens - r.cached_tokens)
    for request in requests:
        start, end = request.start_s, request.end_s
        tokens = sampled.between(start, end)
        # It waits for half of a step that runs when it comes, if there are others.
        waits = 0.5 if tokens > request.tokens else 0.0
        rows.append([request.tokens + waits, tokens, prompts.between(start, end)])
        targets.append(work(start, end))
    return len(requests)


class _Environments:
    """What the calls of environments took of the environments' own, without the waiting for them.

    The calls that began when the fewest others were under way waited least.  And all of them together can't have
    acted for longer than there were calls under way, nor more at a time than there are threads.
    """

    def __init__(self, seen: Observed) -> None:
        calls = [call for call in seen.calls if call.state != State.SCORING and not call.failed]
        self._starts = sorted(call.start_s for call in calls)
        self._ends = sorted(call.end_s for call in calls)
        grouped: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
        for call in calls:
            grouped[call.task, call.state].append(call)
        self._own = {kind: self._calmest(members) for kind, members in grouped.items()}
        acted_s = sum(mean(self._own[kind]) * len(members) for kind, members in grouped.items())
        environments = seen.config.environments
        self._share = min(
            1.0, self._possible_s(environments.workers * environments.threads) / max(acted_s, 1e-9)
        )

    def own_s(self, task: str, state: State) -> list[float]:
        """A sample of it."""
        return [seconds * self._share for seconds in self._own.get((task, state), [])]

    def _calmest(self, calls: list[Call]) -> list[float]:
        ordered = sorted(calls, key=lambda call: self._under_way(call.start_s))
        return [call.end_s - call.start_s for call in ordered[: max(CALM_CALLS, int(CALM * len(calls)))]]

    def _under_way(self, start_s: float) -> int:
        """When one begins at ``start_s``, itself left out; those of the same moment count."""
        return bisect.bisect_right(self._starts, start_s) - 1 - bisect.bisect_right(self._ends, start_s)

    def _possible_s(self, threads: int) -> float:
        changes = sorted([(time, 1) for time in self._starts] + [(time, -1) for time in self._ends])
        total, calls, last = 0.0, 0, 0.0
        for time, change in changes:
            total += min(calls, threads) * (time - last)
            calls, last = calls + change, time
        return total


def _hop_s(seen: Observed, tasks: Mapping[str, TaskModel]) -> Measured:
    """A first estimate: half of what a call took beyond its environment's own time."""
    calls = [call for call in seen.calls if call.state != State.SCORING and not call.failed]
    own = {
        (name, state): sample.mean
        for name, task in tasks.items()
        for state, sample in ((State.RESETTING, task.reset_s), (State.STEPPING, task.step_s))
    }
    beyond = [(call.end_s - call.start_s - own[call.task, State(call.state)]) / 2 for call in calls]
    found = mean_of(beyond)
    return msgspec.structs.replace(found, value=max(0.0, found.value))


def _task(seen: Observed, name: str, environments: _Environments) -> TaskModel:
    calls = [call for call in seen.calls if call.task == name]
    if not calls:
        raise ConfigError(f"no episode of task {name!r} began in the run: there is nothing to calibrate on")
    failures: defaultdict[str, list[float]] = defaultdict(list)
    tokens: defaultdict[str, list[float]] = defaultdict(list)
    for call in calls:
        failures[call.state].append(float(call.failed))
        if call.tokens:
            tokens[call.state].append(call.tokens)
    episodes = [episode for episode in seen.episodes if episode.task == name]
    answers = [float(request.tokens) for request in seen.requests]
    return TaskModel(
        turns=turns_of([(episode.turns, episode.whole) for episode in episodes]),
        turns_shared=shared_share([(e.group, e.turns) for e in episodes if e.whole]),
        max_turns=seen.config.task(name).max_turns,
        first_observation_tokens=sample_of(tokens[State.RESETTING]),
        later_observation_tokens=sample_of(tokens[State.STEPPING]),
        answer_tokens=sample_of(answers),
        reset_s=sample_of(environments.own_s(name, State.RESETTING)),
        step_s=sample_of(environments.own_s(name, State.STEPPING)),
        score_s=sample_of([c.end_s - c.start_s for c in calls if c.state == State.SCORING]),
        reset_failures=mean_of(failures[State.RESETTING]),
        step_failures=mean_of(failures[State.STEPPING]),
        reward=mean_of(seen.reward),
        success=mean_of(seen.success),
    )


# --- corrections ---------------------------------------------------------------------------------------------


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is compared by."""

    step_s: float
    answer_s: float
    """Of a request, on average."""
    train_s: float
    environment_s: float
    pause_s: float


def _summary(seen: Observed) -> _Summary:
    first = steady(seen.config, len(seen.step_s))
    begin = seen.train_steps[min(first, len(seen.train_steps) - 1)].start_s
    requests = [r.end_s - r.start_s for r in seen.requests if r.start_s >= begin]
    calls = [
        c.end_s - c.start_s
        for c in seen.calls
        if c.start_s >= begin and c.state != State.SCORING and not c.failed
    ]
    trains = [s.end_s - s.start_s for s in seen.train_steps[first:]]
    pauses = [s.suspend_s + s.update_s + s.resume_s for s in seen.swaps]
    return _Summary(
        step_s=statistics.fmean(seen.step_s[first:]),
        answer_s=mean(requests),
        train_s=mean(trains),
        environment_s=mean(calls),
        pause_s=mean(pauses),
    )


def _simulated(calibration: Calibration, config: Config) -> _Summary:
    result = simulate(calibrated_setup(calibration, config), seed=0, check=False)
    if result.outcome != "success":
        raise ConfigError(
            f"the calibrated run can't be simulated: it ended with {result.outcome}: {result.cause}"
        )
    stream = events.parse_events(io.BytesIO(result.events), "the simulated run")
    return _summary(observe(config, stream, result.rows))


def _corrected(found: Calibration, measured: _Summary, simulated: _Summary, damping: float) -> Calibration:
    trainer, weights, machine = found.trainer, found.weights, found.machine
    by_train = _ratio(measured.train_s, simulated.train_s) ** damping
    by_pause = _ratio(measured.pause_s, simulated.pause_s) ** damping
    hop_s = machine.hop_s.value + damping * (measured.environment_s - simulated.environment_s) / 2
    replace = msgspec.structs.replace
    return replace(
        found,
        trainer=replace(
            trainer, step_s=_scaled(trainer.step_s, by_train), token_s=_scaled(trainer.token_s, by_train)
        ),
        weights=replace(weights, update_s=_scaled(weights.update_s, by_pause)),
        machine=replace(machine, hop_s=replace(machine.hop_s, value=float(f"{max(0.0, hop_s):.6g}"))),
    )


def _ratio(measured: float, simulated: float) -> float:
    if measured <= 0 or simulated <= 0:
        return 1.0
    return min(MOST_CORRECTION, max(1 / MOST_CORRECTION, measured / simulated))


def _distance(measured: _Summary, simulated: _Summary) -> float:
    """How far two runs are apart: the sum of their relative differences, that of the step's time counting most."""
    weights = {"step_s": 3.0, "train_s": 1.0, "environment_s": 0.5}
    return sum(
        weight * abs(math.log(_ratio(getattr(measured, name), getattr(simulated, name))))
        for name, weight in weights.items()
    )


def _scaled(number: Measured, factor: float) -> Measured:
    value, error = (float(f"{x * factor:.6g}") for x in (number.value, number.error))
    return Measured(value, error, number.observations)
