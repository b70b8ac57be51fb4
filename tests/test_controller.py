"""The whole controller over real ZeroMQ, against scripted workers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest
import zmq

from rollart.controller import events
from rollart.controller.controller import Outcome
from rollart.errors import RunError
from rollart.packing import pack_ids
from rollart.protocol import Close, Done, Step, VersionRun, encode
from rollart.workers.worker import Deterministic
from tests.scripted import Script, ScriptedRun, config_of

ROLLOUTS = [
    {"update_at": "batch", "staleness_bound": 1},
    {"update_at": "batch", "staleness_bound": 3, "redundant_groups": 2, "redundant_members": 1},
    {"update_at": "publish", "staleness_bound": 0},
    {"update_at": "publish", "staleness_bound": 1, "redundant_groups": 1, "redundant_members": 2},
    {"update_at": "publish", "staleness_bound": 2, "mixed_versions": "drop"},
]


def heavy_tailed(script: Script) -> Script:
    script.step_s = lambda: 0.05 if script.random.random() < 0.1 else 0.0
    script.generate_s = lambda: script.random.random() * 0.01
    script.train_s = lambda: 0.01
    return script


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=lambda r: f"{r['update_at']}-alpha{r['staleness_bound']}")
@pytest.mark.parametrize("workers", [1, 3])
async def test_a_run_keeps_the_invariants(tmp_path: Path, rollout: dict[str, object], workers: int) -> None:
    config = config_of(
        steps=12, rollout=rollout, sampling={"max_tokens": 4}, inference={"workers": workers},
        environments={"workers": 2}, evaluation={"episodes": 3, "every": 5},
    )  # fmt: skip
    script = heavy_tailed(Script())
    run = ScriptedRun(config, script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(12))
    alpha = config.rollout.staleness_bound
    assert all(row["staleness_max"] <= alpha for row in rows)
    assert all(row["train_lag_max"] <= alpha + (config.rollout.update_at == "batch") for row in rows)
    evaluated = [e.version for e in run.events if isinstance(e, events.Evaluated)]
    assert evaluated[0] == 0 and evaluated[-1] == 12 and len(evaluated) == 4


@pytest.mark.parametrize("update_at", ["batch", "publish"])
async def test_batches_that_wait_for_the_trainer_keep_the_order_of_its_requests(
    tmp_path: Path, update_at: str
) -> None:
    """Each version is published between its own step and the next, also when the next batch is there already."""
    script = Script()
    script.train_s = lambda: 0.02
    rollout = {"update_at": update_at, "staleness_bound": 3, "redundant_groups": 4}
    run = ScriptedRun(config_of(steps=15, rollout=rollout), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []


async def test_a_batch_is_what_was_sampled(tmp_path: Path) -> None:
    script = heavy_tailed(Script())
    run = ScriptedRun(config_of(sampling={"max_tokens": 3}), script, tmp_path / "run")
    await run.controller.run()
    seen: set[int] = set()
    for batch in script.batches:
        assert [len(group.samples) for group in batch] == [2, 2]
        for sample in (s for group in batch for s in group.samples):
            assert sample.trajectory not in seen
            seen.add(sample.trajectory)
            turns = sum(sample.mask) // 3
            # Reset gives 3 tokens, each answer has 3, each observation but the last 2.
            assert sample.mask == bytes(3) + (b"\1" * 3 + bytes(2)) * (turns - 1) + b"\1" * 3
            assert len(sample.ids) == 4 * len(sample.mask) and len(sample.logprobs) == 4 * sum(sample.mask)
            assert sum(run.count for run in sample.versions) == sum(sample.mask)
    assert len(seen) == 12


async def test_one_failing_trajectory_changes_no_other(tmp_path: Path) -> None:
    script = Script()
    failures = iter([Deterministic("no such command"), RuntimeError("the sandbox is gone")] * 3)
    script.fail_step = lambda step: next(failures, None)
    run = ScriptedRun(config_of(), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    moves = [e for e in run.events if isinstance(e, events.Moved)]
    failed = [e for e in moves if e.after == "failed"]
    retried = [e for e in moves if e.after == "pending"]
    assert len(failed) == 3 and all("no such command" in e.detail for e in failed)
    assert len(retried) == 3 and all("the sandbox is gone" in e.detail for e in retried)


async def test_a_source_that_only_fails_stops_the_run_with_the_cause(tmp_path: Path) -> None:
    script = Script()
    script.fail_step = lambda step: Deterministic("the licence server says no")
    config = config_of(rollout={"max_failed_groups": 4, "member_refills": 1})
    run = ScriptedRun(config, script, tmp_path / "run")
    with pytest.raises(RunError, match=r"4 groups in a row .*the licence server says no"):
        await run.controller.run()
    assert run.violations == []
    assert isinstance(run.events[-1], events.Ended) and "licence server" in run.events[-1].reason


async def test_a_wrong_canary_takes_the_worker_out_and_the_others_go_on(tmp_path: Path) -> None:
    script = Script()
    script.canary = lambda worker, version: -1.5 if (worker, version) == ("inference-0", 2) else -1.0
    run = ScriptedRun(config_of(steps=5, inference={"workers": 2}), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    (gone,) = [e for e in run.events if isinstance(e, events.WorkerChanged) and "canary" in e.reason]
    assert gone.worker == "inference-0" and "0.5 nats" in gone.reason
    after = run.events[run.events.index(gone) :]
    assert not [e for e in after if isinstance(e, events.Sampled) and e.worker == "inference-0"]


async def test_the_last_worker_with_a_wrong_canary_ends_the_run(tmp_path: Path) -> None:
    script = Script()
    script.canary = lambda worker, version: -2.0 if version == 1 else -1.0
    run = ScriptedRun(config_of(inference={"restarts": 0}), script, tmp_path / "run")
    with pytest.raises(RunError, match=r"no inference worker is left.*canary differs by 1 nats"):
        await run.controller.run()


async def test_a_lost_worker_costs_only_time(tmp_path: Path) -> None:
    script = heavy_tailed(Script())
    config = config_of(
        steps=8, inference={"workers": 2}, environments={"workers": 2}, sampling={"max_tokens": 4}
    )
    run = ScriptedRun(config, script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while len(script.batches) < 2:
        await asyncio.sleep(0.01)
    run.launcher.workers["inference-1"].end("pulled the plug")
    run.launcher.workers["environment-0"].end("pulled the plug")
    assert await task is Outcome.SUCCESS
    assert run.violations == []


async def test_a_lost_trainer_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    script = Script()
    script.train_s = lambda: 30.0
    run = ScriptedRun(config_of(trainer={"restarts": 0}), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while run.controller.loop is None or run.controller.loop.doing != "train_step":
        await asyncio.sleep(0.01)
    run.launcher.workers["trainer-0"].end("pulled the plug")
    with pytest.raises(RunError, match="pulled the plug"):
        await task


@pytest.mark.parametrize("phase", ["get_batch", "update", "train_step", "evaluation", "finishing"])
async def test_an_interrupt_ends_every_trajectory(tmp_path: Path, phase: str) -> None:
    script = heavy_tailed(Script())
    script.train_s = lambda: 0.05
    config = config_of(steps=20, evaluation={"episodes": 4, "every": 3})
    run = ScriptedRun(config, script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while run.controller.loop is None or run.controller.loop.doing != phase:
        await asyncio.sleep(0)
    run.controller.interrupt()
    assert await task is Outcome.INTERRUPTED
    assert run.violations == []
    assert "saved the weights after" in run.output.getvalue()
    assert not run.folder.private.exists()
    assert run.folder.store is not None and not run.folder.store.exists()


async def test_the_last_environment_worker_is_the_cause_that_is_told(tmp_path: Path) -> None:
    script = heavy_tailed(Script())
    run = ScriptedRun(config_of(steps=1000, environments={"restarts": 0}), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while len(script.batches) < 2:
        await asyncio.sleep(0.01)
    run.launcher.workers["environment-0"].end("pulled the plug")
    with pytest.raises(
        RunError, match=r"no environment worker is left.*pulled the plug[\s\S]*the log of environment-0"
    ):
        await asyncio.wait_for(task, 10)
    assert run.violations == []


async def test_a_worker_that_is_lost_at_start_ends_the_run_though_it_has_siblings(tmp_path: Path) -> None:
    script = Script()
    script.fail_setup = lambda worker: worker == "inference-1"
    run = ScriptedRun(config_of(inference={"workers": 2}), script, tmp_path / "run")
    with pytest.raises(
        RunError, match=r"inference-1 is lost while the run starts[\s\S]*the log of inference-1"
    ):
        await asyncio.wait_for(run.controller.run(), 10)


async def test_a_broken_environment_worker_does_not_draw_the_episodes(tmp_path: Path) -> None:
    script = heavy_tailed(Script())
    resets = {"environment-0": 0, "environment-1": 0}

    def fail_reset(worker: str) -> Exception | None:
        resets[worker] += 1
        return RuntimeError("the sandbox is gone") if worker == "environment-0" else None

    script.fail_reset = fail_reset
    run = ScriptedRun(config_of(steps=10, environments={"workers": 2}), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    assert resets["environment-0"] < resets["environment-1"] / 2


async def test_episodes_wait_for_a_place(tmp_path: Path) -> None:
    """Fewer places than trajectories in flight: they take turns, and none fails."""
    script = heavy_tailed(Script())
    run = ScriptedRun(config_of(steps=5), script, tmp_path / "run")
    script.places = 2
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    assert not [e for e in run.events if isinstance(e, events.Moved) and e.after in ("failed", "pending")]


async def test_cancelled_trajectories_end_and_are_replaced(tmp_path: Path) -> None:
    """In whatever stage they are, also those that are only just started; evaluations and the ended are left."""
    script = heavy_tailed(Script())
    run = ScriptedRun(config_of(steps=4), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    rollout, cancelled = None, 0
    while not task.done():
        await asyncio.sleep(0.01)
        rollout = getattr(run.controller, "rollout", None)
        if rollout is not None and cancelled < 6:
            chosen = [t for g in rollout.buffer.groups.values() for t in (*g.in_flight.values(), *g.scored)][
                :2
            ]
            rollout.cancel([*chosen, *chosen])
            cancelled += len(chosen)
            assert all(t.state.ended for t in chosen)
    assert await task is Outcome.SUCCESS
    assert run.violations == []
    ends = [e for e in run.events if isinstance(e, events.Moved) and e.reason == "cancelled"]
    assert 3 <= len(ends) <= cancelled, "a group that loses two may end, and its others with it"
    assert rollout is not None and not rollout.manager.tasks


async def test_redundant_members_are_aborted_at_the_engine(tmp_path: Path) -> None:
    script = Script()
    slow = iter([5.0, 5.0])
    script.generate_s = lambda: next(slow, 0.0)
    config = config_of(steps=2, rollout={"redundant_members": 2, "redundant_groups": 1})
    run = ScriptedRun(config, script, tmp_path / "run")
    assert await asyncio.wait_for(run.controller.run(), 4) is Outcome.SUCCESS
    assert script.aborted >= 1
    rows = run.rows
    assert sum(row["members_cut"] for row in rows) >= 2


async def test_a_skipped_step_leaves_the_version_and_its_batch_fails(tmp_path: Path) -> None:
    script = Script()
    script.skip = lambda step: "the loss is NaN" if step == 1 else ""
    run = ScriptedRun(config_of(steps=4), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    steps = [e for e in run.events if isinstance(e, events.TrainedStep)]
    assert [(e.before, e.after) for e in steps] == [(0, 1), (1, 1), (1, 2), (2, 3)]
    failed = {e.trajectory for e in run.events if isinstance(e, events.Moved) and e.reason == "nan"}
    assert failed == {s.trajectory for s in steps[1].samples}


async def test_only_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    script = Script()
    script.skip = lambda step: "the loss is NaN"
    run = ScriptedRun(config_of(steps=9), script, tmp_path / "run")
    with pytest.raises(RunError, match="3 train_steps in a row were skipped; the last: the loss is NaN"):
        await run.controller.run()


async def test_groups_without_signal_are_filtered_and_then_stop_the_run(tmp_path: Path) -> None:
    script = Script()
    script.turns = lambda seed: 1
    script.random.randrange = lambda *bounds: 4  # type: ignore[method-assign]
    config = config_of(rollout={"filter_groups": True, "max_filtered_groups": 10})
    run = ScriptedRun(config, script, tmp_path / "run")
    with pytest.raises(RunError, match="10 groups in a row had equal rewards"):
        await run.controller.run()


async def test_an_answer_that_cannot_be_true_is_not_trained_on(tmp_path: Path) -> None:
    script = Script()
    run = ScriptedRun(config_of(inference={"workers": 1}, rollout={"retries": 0}), script, tmp_path / "run")
    task = asyncio.create_task(run.controller.run())
    while "inference-0" not in getattr(run, "launcher", Script()).__dict__.get("workers", {}):
        await asyncio.sleep(0.001)
    worker = run.launcher.workers["inference-0"]
    honest = worker.generate  # type: ignore[attr-defined]
    lies = iter(["short", "positive", "version"])

    async def lie(seq: int, count: int, temperature: float) -> object:
        answer = await honest(seq, count, temperature)
        match next(lies, ""):
            case "short":
                answer.logprobs = b""
            case "positive":
                answer.logprobs = b"\0\0\x80\x3f" * count
            case "version":
                answer.versions = [VersionRun(-1, count)]
        return answer

    worker.generate = lie  # type: ignore[attr-defined]
    assert await task is Outcome.SUCCESS
    assert run.controller.proxy.refused_answers == 3
    assert run.rows[0]["refused_answers"] == 3
    assert not any("refused_answers" in row for row in run.rows[1:])
    assert run.violations == []


async def test_a_slow_step_is_a_timeout_of_its_trajectory(tmp_path: Path) -> None:
    script = Script()
    slow = iter([3.0])
    script.step_s = lambda: next(slow, 0.0)
    tasks = [{"name": "Count", "environment": "tests.scripted:Nothing", "step_timeout_s": 0.2}]
    script.train_s = lambda: 0.1
    run = ScriptedRun(config_of(tasks=tasks, steps=5), script, tmp_path / "run")
    assert await asyncio.wait_for(run.controller.run(), 2.5) is Outcome.SUCCESS
    reasons = [e.reason for e in run.events if isinstance(e, events.Moved) and e.after == "pending"]
    assert reasons == ["env_timeout"]


async def test_the_status_says_what_is_waited_for(tmp_path: Path) -> None:
    script = Script()
    asked = iter([0.0])
    script.generate_s = lambda: next(asked, 0.5)
    script.turns = lambda seed: 1
    run = ScriptedRun(config_of(steps=1, evaluation={"episodes": 4}), script, tmp_path / "run")
    controller = run.controller
    task = asyncio.create_task(controller.run())

    async def reads(start: str) -> None:
        async with asyncio.timeout(10):
            while controller.loop is None or not controller.status.startswith(start):
                await asyncio.sleep(0.001)

    await reads("evaluation: 3 of 4 episodes left")
    engine = controller.proxy.engines["inference-0"]
    controller.proxy.close(engine)
    await reads("get_batch, 8 requests wait for an engine: 0 of 2 groups complete")
    controller.proxy.open(engine, engine.version)
    await reads("get_batch: 0 of 2 groups complete")
    assert await task is Outcome.SUCCESS


async def test_what_is_refused_is_in_the_metrics(tmp_path: Path) -> None:
    """In the first object all of it since the run began, the start included; then what is new."""
    script = Script()
    run = ScriptedRun(config_of(steps=4), script, tmp_path / "run")
    controller, transport = run.controller, run.transport
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.curve_serverkey = transport.peer_file.server_public.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(transport.address)
    task = asyncio.create_task(controller.run())
    async with asyncio.timeout(20):
        while not transport.refused_peers:
            await asyncio.sleep(0.001)
        stranger.close(linger=0)
        context.term()
        while not script.batches:
            await asyncio.sleep(0)
        await run.launcher.workers["trainer-0"].one_at_a_time.acquire()  # the second step waits meanwhile
        while not run.rows:
            await asyncio.sleep(0.001)
        worker = run.launcher.workers["environment-0"]
        transport.send(b"control:environment-0", [b"no message"])
        for frame in (encode(Done(10**9)), encode(Close("not for a controller")), b"no message"):
            worker._control.send([frame])
        while (
            not controller.switchboard.refused_frames_at_workers or controller.switchboard.refused_frames < 2
        ):
            await asyncio.sleep(0.001)
        run.launcher.workers["trainer-0"].one_at_a_time.release()
        assert await task is Outcome.SUCCESS
    keys = ("refused_peers", "refused_frames", "refused_frames_at_workers", "late_answers")
    told = [{key: row[key] for key in keys if key in row} for row in run.rows]
    assert list(told[0]) == ["refused_peers"]
    assert told[1] == {"refused_frames": 2, "refused_frames_at_workers": 1, "late_answers": 1}
    assert told[2:] == [{}, {}]


async def test_what_is_discarded_is_told_by_task_and_length(tmp_path: Path) -> None:
    """Short has 1 turn and Long 3; some of Long fail in their second."""
    script = Script()
    script.turns = lambda seed: 9
    steps: Counter[str] = Counter()
    fates = itertools.cycle([None, None, Deterministic("no such command")])

    def fail_step(step: Step) -> Exception | None:
        steps[step.session] += 1
        return next(fates) if steps[step.session] == 2 else None

    script.fail_step = fail_step
    environment = "tests.scripted:Nothing"
    tasks = [{"name": n, "environment": environment, "max_turns": m} for n, m in (("Short", 1), ("Long", 3))]
    # The evaluation's episodes end too, and are none of these.
    config = config_of(tasks=tasks, steps=6, rollout={"redundant_members": 1}, evaluation={"episodes": 4})
    run = ScriptedRun(config, script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS

    task_of = {
        e.trajectory: e.task for e in run.events if isinstance(e, events.Dispatched) and e.kind == "train"
    }
    turns: dict[str, list[int]] = {}
    for move in run.events:
        # What the end of the run aborts comes after the last object.
        if isinstance(move, events.Moved) and move.trajectory in task_of and move.reason != "shutdown":
            end = {"consumed": "consumed", "aborted": "discarded", "failed": "discarded"}.get(move.after)
            if end:
                turns.setdefault(f"task/{task_of[move.trajectory]}/{end}", []).append(move.turns)
    assert set(turns) == {f"task/{t}/{e}" for t in ("Short", "Long") for e in ("consumed", "discarded")}
    assert turns["task/Short/consumed"] == [1] * len(turns["task/Short/consumed"])
    assert turns["task/Long/consumed"] == [3] * len(turns["task/Long/consumed"])
    assert 2 in turns["task/Long/discarded"]
    for key, ended in turns.items():
        told = [(row[key], row[f"{key}_turns_mean"]) for row in run.rows if key in row]
        assert sum(count for count, _ in told) == len(ended)
        assert sum(count * mean for count, mean in told) == pytest.approx(sum(ended), abs=0.01)
    assert {key for row in run.rows for key in row if "consumed" in key or "discarded" in key} - {
        "consumed", "tokens_discarded"
    } == {
        *turns, *(f"{key}_turns_mean" for key in turns)
    }  # fmt: skip


@pytest.mark.parametrize("keep", [None, 5])
async def test_checkpoints_are_written_and_cleared_by_the_trainer(tmp_path: Path, keep: int | None) -> None:
    script = Script()
    trainer = {"checkpoint_every": 2, "keep_checkpoints": keep}
    run = ScriptedRun(config_of(steps=5, trainer=trainer), script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert script.saved == [f"step-{step:06}" for step in (2, 4, 5)]
    assert script.pruned == [(name, keep or 2) for name in script.saved]


async def test_an_answer_goes_on_elsewhere_from_the_tokens_that_its_lost_worker_had_reported(
    tmp_path: Path,
) -> None:
    config = config_of(steps=3, sampling={"max_tokens": 6}, inference={"workers": 2})
    script = Script()
    script.lose_after = {"inference-0": 4}
    run = ScriptedRun(config, script, tmp_path / "run")
    assert await run.controller.run() is Outcome.SUCCESS
    assert run.violations == []
    kept = [e for e in run.events if isinstance(e, events.Sampled) and e.kept_tokens]
    assert kept
    assert {(e.worker, e.kept_tokens, e.tokens) for e in kept} == {("inference-1", 4, 6)}
    begun = {bytes(r.prompt) for name, r in script.requests if name == "inference-0"}
    gone_on = [r for name, r in script.requests if name == "inference-1" and r.max_tokens == 2]
    assert len(gone_on) == len(kept)
    assert all(r.prompt.endswith(pack_ids(range(10, 14))) and r.prompt[:-16] in begun for r in gone_on)
