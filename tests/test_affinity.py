"""Which hardware a task's requests go to: as declared, with fallbacks, proposed, and told to the event stream."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollart.config import Config
from rollart.config.routing import Phase
from rollart.controller import events
from rollart.controller.affinity import Orders
from rollart.controller.events import Event, parse_events
from rollart.controller.proposal import KNOWN_TURNS, propose, speeds_of
from rollart.controller.resource_manager import ResourceManager
from rollart.controller.roles import Load, decide
from rollart.controller.task_profile import TaskProfile
from rollart.simulation.engine import BatchingEngine, EngineCosts
from rollart.simulation.faults import Fault, FaultKind
from rollart.simulation.hardware import CPU
from rollart.simulation.run import Result, Setup, simulate
from rollart.simulation.scenario import SMALL
from rollart.simulation.workload import Distribution, Family
from rollart.simulation.world import Timings

TWO = [{"hardware": "H800"}, {"hardware": "H20"}]


def config(tasks: Sequence[str] = ("A", "B"), *, steps: int = 4, **inference: Any) -> Config:
    return msgspec.convert(
        {
            "name": "affinity",
            "steps": steps,
            "model": {"random": {}},
            "tasks": [{"name": name, "environment": "simulated:Family"} for name in tasks],
            "sampling": {"max_tokens": 16},
            "rollout": {"groups_per_batch": 4, "group_size": 4},
            "inference": {"max_num_seqs": 8, **inference},
            "heartbeat_timeout_s": 10.0,
        },
        Config,
    )


def run(
    config: Config,
    *,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    prompt: int = 40,
    engine_step_s: float = 0.01,
) -> tuple[Result, list[Event]]:
    """A simulated run, and its events."""
    family = Family(
        turns=Distribution(3, 0.4, low=1, high=6),
        prompt_tokens=Distribution(prompt),
        observation_tokens=Distribution(10),
        answer_tokens=Distribution(12, 0.4),
        reset_s=Distribution(0.1, 0.5),
        step_s=Distribution(0.1, 0.5),
    )
    setup = Setup(
        config=config,
        families={task.name: family for task in config.tasks},
        timings=Timings(start_s=2.0, pull_s=0.1, load_s=0.05, publish_s=0.2, save_s=0.0),
        engine=lambda placement: BatchingEngine(
            EngineCosts(CPU, SMALL, step_overhead_s=engine_step_s),
            token_budget=256,
            max_requests=config.inference.max_num_seqs,
        ),
        step_s=lambda lengths, scored: 1.0,
        delay=lambda worker, size: 0.001,
    )
    result = simulate(setup, seed=seed, faults=faults, shuffle=True)
    assert result.violations == []
    assert result.outcome == "success", result.cause
    return result, list(parse_events(io.BytesIO(result.events), "the run"))


def test_the_declared_order_then_the_other_classes_in_the_order_of_the_pools() -> None:
    pools = [{"hardware": name} for name in ("H800", "H20", "CPU")]
    affinity = {"A": "H20", "B": ["CPU", "H800"], "default": {"prefill": "H800", "decode": ["H20", "CPU"]}}
    orders = Orders(config(("A", "B", "C"), pools=pools, hw_affinity=affinity).inference)
    assert orders.of("A").whole == ("H20", "H800", "CPU")
    assert orders.of("B").whole == ("CPU", "H800", "H20")
    assert not orders.of("B").split
    assert orders.of("C").prefill == ("H800", "H20", "CPU")
    assert orders.of("C").decode == ("H20", "CPU", "H800")
    assert Orders(config().inference).trivial


@pytest.mark.parametrize(
    ("inference", "said"),
    [
        ({"pools": TWO, "hw_affinity": {"A": "H100"}}, "no pool is of class H100; there are H800, H20"),
        ({"pools": TWO, "hw_affinity": {"X": "H800"}}, "there is no such task; there are A, B, default"),
        ({"hw_affinity": {"A": "CPU"}}, "does nothing with one hardware class"),
        ({"pools": [{"hardware": "H800", "phase": "prefill"}]}, "all are for prefill"),
        ({"disaggregation": {}}, "disaggregation does nothing"),
        ({"pools": TWO, "workers": 3}, "workers is 3 and the pools have 2"),
        ({"pools": [{"hardware": "odd"}, {"hardware": "H20"}], "hw_affinity": "auto"}, "not odd"),
        ({"pools": [{"hardware": "H20", "workers": 2, "devices": [0]}]}, "2 workers and 1 devices"),
    ],
)
def test_a_placement_that_can_not_exist_is_refused(inference: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        config(**inference)


def test_the_placement_is_explained() -> None:
    pools = [
        {"hardware": "H800", "workers": 2, "phase": "prefill", "devices": [0, 1]},
        {"hardware": "H20", "slowdown": 4, "phase": "decode", "threads": 2},
    ]
    said = ResourceManager(config(pools=pools, hw_affinity={"A": "H20"})).explain()
    assert (
        "inference-1      a process of this machine, hardware class H800, 1 thread(s), GPU 1, for prefill"
        in said
    )
    assert (
        "inference-2      a process of this machine, hardware class H20, 2 thread(s), for decode, slowed"
        in said
    )
    assert "task A           on H20, else H800" in said
    assert "task B           prefill on H800, else H20, decode on H800, else H20" in said


def classes_of(found: Sequence[Event]) -> dict[str, str]:
    return {e.worker: e.hardware_class for e in found if isinstance(e, events.WorkerChanged)}


def test_each_task_runs_on_its_class_and_the_stream_says_so() -> None:
    _, found = run(config(pools=TWO, hw_affinity={"A": "H800", "default": "H20"}))
    task = {e.trajectory: e.task for e in found if isinstance(e, events.Dispatched)}
    bound = [e for e in found if isinstance(e, events.Bound)]
    assert {e.trajectory for e in bound} == {e.trajectory for e in found if isinstance(e, events.Sampled)}
    for e in bound:
        assert e.wanted == {"A": "H800", "B": "H20"}[e.task]
        assert bool(e.reason) == (e.hardware_class != e.wanted)
    on_wanted = [
        classes_of(found)[e.worker] == {"A": "H800", "B": "H20"}[task[e.trajectory]]
        for e in found
        if isinstance(e, events.Sampled)
    ]
    assert sum(on_wanted) > 0.9 * len(on_wanted)


def test_a_class_that_is_gone_or_full_is_passed_over() -> None:
    affinity = {"A": "H800", "B": "H20"}
    crash = Fault(8.0, FaultKind.CRASH, "inference-0", 0.0)
    _, found = run(config(pools=TWO, hw_affinity=affinity, steps=6), faults=[crash])
    reasons = {e.reason for e in found if isinstance(e, events.Bound) and e.task == "A"}
    assert "no H800 worker is left" in reasons
    _, found = run(config(pools=TWO, hw_affinity={"default": "H800"}, max_requests=2))
    reasons = {e.reason for e in found if isinstance(e, events.Bound)}
    assert "every H800 worker is full" in reasons


def test_prefill_and_decode_apart_and_what_survives() -> None:
    pools = [{"hardware": "H800", "phase": "prefill"}, {"hardware": "H20", "workers": 2, "phase": "decode"}]
    _, found = run(config(pools=pools))
    sampled = [e for e in found if isinstance(e, events.Sampled)]
    apart = [e for e in sampled if e.prefilled_by]
    assert len(apart) > 0.5 * len(sampled)
    assert {e.prefilled_by for e in apart} == {"inference-0"}
    assert {e.worker for e in apart} == {"inference-1", "inference-2"}
    for worker in ("inference-0", "inference-1"):
        crash = Fault(9.0, FaultKind.CRASH, worker, 0.0)
        _, found = run(config(pools=pools, steps=6), faults=[crash])
        gone = next(e.t for e in found if isinstance(e, events.WorkerChanged) and e.state == "gone")
        later = [e for e in found if isinstance(e, events.Sampled) and e.t > gone + 1]
        assert later
        assert all(worker not in (e.worker, e.prefilled_by) for e in later)


def test_requests_are_split_by_the_length_of_their_prompt() -> None:
    pools = [{"hardware": "H800", "phase": "prefill"}, {"hardware": "H20", "phase": "both"}]
    _, found = run(config(pools=pools, disaggregation={"min_prompt_tokens": 45}))
    turns = {(e.trajectory, e.turn): bool(e.prefilled_by) for e in found if isinstance(e, events.Sampled)}
    assert not any(apart for (_, turn), apart in turns.items() if turn == 0)
    assert any(apart for (_, turn), apart in turns.items() if turn > 0)


def test_what_a_lost_worker_had_reported_is_kept() -> None:
    crash = Fault(8.0, FaultKind.CRASH, "inference-0", 0.0)
    kept = 0
    for seed in range(6):
        _, found = run(config(workers=2, progress_every_s=0.02, max_requests=4), faults=[crash], seed=seed)
        kept += sum(e.kept_tokens > 0 for e in found if isinstance(e, events.Sampled))
    assert kept > 0


def test_a_worker_changes_its_phase_when_the_queues_say_so() -> None:
    def loads(*of: tuple[str, int]) -> list[Load]:
        return [Load(f"{phase}{n}", Phase(phase), requests) for n, (phase, requests) in enumerate(of)]

    many_prompts = loads(("prefill", 9), ("decode", 4), ("decode", 2))
    change = decide(many_prompts, waiting=0, sequences=8)
    assert change is not None
    assert (change.worker, change.to) == ("decode2", Phase.PREFILL)
    assert decide(loads(("prefill", 9), ("decode", 4)), waiting=0, sequences=8) is None
    assert decide(loads(("prefill", 9), ("decode", 8), ("decode", 8)), waiting=0, sequences=8) is None
    assert decide(loads(("prefill", 3), ("decode", 1), ("decode", 1)), waiting=0, sequences=8) is None
    full = loads(("prefill", 1), ("prefill", 0), ("decode", 8))
    change = decide(full, waiting=3, sequences=8)
    assert change is not None
    assert (change.worker, change.to) == ("prefill1", Phase.DECODE)
    assert decide(loads(("both", 9), ("decode", 4)), waiting=0, sequences=8) is None

    pools = [{"hardware": "H800", "phase": "prefill"}, {"hardware": "H20", "workers": 3, "phase": "decode"}]
    _, found = run(
        config(pools=pools, disaggregation={"adapt": True}, steps=8, max_num_seqs=64),
        prompt=200,
        engine_step_s=0.2,
    )
    changes = [e for e in found if isinstance(e, events.RoleChanged)]
    assert changes
    assert (changes[0].before, changes[0].after) == ("decode", "prefill")
    later = {e.prefilled_by for e in found if isinstance(e, events.Sampled) and e.t > changes[0].t + 5}
    assert changes[0].worker in later


def test_a_task_is_proposed_the_class_that_it_gains_most_on() -> None:
    speeds = speeds_of(config(pools=TWO).inference.all_pools)
    profiles = {
        "A": TaskProfile(KNOWN_TURNS, prompt_tokens=4000, answer_tokens=50, hit_share=0.5, turn_number=8),
        "B": TaskProfile(KNOWN_TURNS, prompt_tokens=400, answer_tokens=3000, hit_share=0.2, turn_number=1),
    }
    found = propose(profiles, speeds, {"A": "H20", "B": "H20"})
    assert list(found) == ["A"]
    assert found["A"].order == ["H800", "H20"]
    assert found["A"].reason.startswith("4000 prompt tokens (50% of them cached) and 50 answer tokens a turn")
    assert list(propose(profiles, speeds, {"A": "H800", "B": "H800"})) == ["B"]
    assert propose(profiles, speeds, {"A": "H800", "B": "H20"}) == {}
    assert propose(profiles, speeds, {"A": "H20", "B": "H20", "C": "H20"}) == {}
    alike = dict.fromkeys("AB", profiles["A"])
    assert propose(alike, speeds, {"A": "H20", "B": "H800"}) == {}
