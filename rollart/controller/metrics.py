"""What a run measures, folded from its events into one object a step.

Counts are of the time since the step before; a distribution is given as mean and max.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import msgspec

from rollart.config import MixedVersions
from rollart.controller import events
from rollart.controller.sample_buffer import Group
from rollart.controller.staleness import Bound, Versions
from rollart.controller.trajectory import Kind, Reason, State, Trajectory
from rollart.protocol import VersionRun

__all__ = ["BatchMetrics", "Metrics", "MetricsFile", "Row", "trained_runs"]

TASK_MEANS = ("trajectories", "reward_mean", "success_rate", "turns_mean", "truncated_share")
Row = dict[str, float | int | str | None]


class Metrics:
    """Counters over the current step, and the live trajectories by state."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        refusals: Callable[[], Mapping[str, int]],
        loop_lag: Callable[[], float] | None = None,
    ) -> None:
        """``refusals()`` is what was refused since the run began, by name; ``loop_lag()`` how late the event loop was
        at most since it was asked last."""
        self.live: Counter[str] = Counter()
        """Trajectories in each state that is no end, of training and evaluation."""
        self._clock = clock
        self._refusals = refusals
        self._loop_lag = loop_lag
        self._told: Counter[str] = Counter()
        self._step: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        """Of the trajectories that ended, by the name of their count in ``_step``."""
        self._swaps: list[events.Swapped] = []
        self._pulls: list[events.Pulled] = []
        self._started = clock()

    def dispatched(self, trajectory: Trajectory) -> None:
        """A trajectory exists."""
        self.live[trajectory.state] += 1
        if trajectory.kind is Kind.TRAIN:
            self._step["trajectories_started"] += 1

    def restored(self, trajectory: Trajectory) -> None:
        """A trajectory of an earlier controller is here again."""
        self.live[trajectory.state] += 1

    def moved(self, trajectory: Trajectory, before: State, reason: Reason) -> None:
        """A trajectory changed state."""
        self.live[before] -= 1
        state = trajectory.state
        if not state.ended:
            self.live[state] += 1
            if state is State.PENDING:
                self._step["trajectories_retried"] += 1
        elif trajectory.kind is Kind.TRAIN:
            end = state.value if state is State.CONSUMED else f"{state}_{reason}"
            self._step[end] += 1
            if state is not State.CONSUMED:
                self._step["tokens_discarded"] += trajectory.sampled
            self._count_for_task(trajectory, "consumed" if state is State.CONSUMED else "discarded")

    def _count_for_task(self, trajectory: Trajectory, end: str) -> None:
        """Discarding by length would bias the batches: the turns of what is consumed and what is not are told."""
        name = f"task/{trajectory.task}/{end}"
        self._step[name] += 1
        self._turns[name] += trajectory.turns

    def listen(self, event: events.Event) -> None:
        """An event of the stream."""
        if type(event) is events.Moved:  # told by ``moved``, and by far the most
            return
        match event:
            case events.Sampled():
                self._step["tokens_sampled"] += event.tokens
                self._step["turns"] += 1
                self._step["prefix_hit_tokens"] += event.cached_tokens
                if len(event.versions) > 1:
                    self._step["generations_spanning_updates"] += 1
            case events.Swapped():
                self._swaps.append(event)
            case events.Pulled():
                self._pulls.append(event)
            case events.GroupEnded(outcome="filtered"):
                self._step["groups_filtered"] += 1
            case events.GroupEnded(outcome="incomplete"):
                self._step["groups_incomplete"] += 1
            case events.Quarantined():
                self._step["tasks_quarantined"] += 1
            case _:
                pass

    def take_step(self) -> Row:
        """The counts since the last call, with rates; a new step begins."""
        now = self._clock()
        seconds = max(now - self._started, 1e-9)
        step, turns, swaps, pulls = self._step, self._turns, self._swaps, self._pulls
        self._step, self._turns, self._started = Counter(), Counter(), now
        self._swaps, self._pulls = [], []
        row: Row = {
            "step_seconds": round(seconds, 4),
            "tokens_per_second": round(step["tokens_sampled"] / seconds, 1),
            "members_cut": step[f"{State.ABORTED}_{Reason.REDUNDANT}"],
            "generations_spanning_updates": step["generations_spanning_updates"],
        }
        row.update((name, step[name]) for name in sorted(step) if name not in row)
        row.update((f"{name}_turns_mean", round(turns[name] / step[name], 4)) for name in sorted(turns))
        if swaps:
            row["weight_pull_seconds"] = round(max(s.pull_s for s in swaps), 4)
            row["weight_pause_seconds"] = round(max(s.suspend_s + s.update_s + s.resume_s for s in swaps), 4)
            row["canary_gap_max"] = max(s.canary_gap for s in swaps)
        row.update(_weights_row(pulls))
        if self._loop_lag is not None:
            row["loop_lag_max_seconds"] = round(self._loop_lag(), 4)
        return row

    def take_refusals(self) -> Row:
        """What was refused since the last call, if anything was."""
        totals = Counter(self._refusals())
        new, self._told = totals - self._told, totals
        return dict(new)


def _weights_row(pulls: Sequence[events.Pulled]) -> Row:
    """What pulling weights came to."""
    whole = [pull for pull in pulls if not pull.superseded]
    row: Row = {
        "weight_pulls_superseded": len(pulls) - len(whole),
        "weight_buckets_refetched": sum(pull.refetched for pull in pulls),
    }
    row = {name: count for name, count in row.items() if count}
    if whole:
        seconds, size = sum(pull.seconds for pull in whole), sum(pull.size_bytes for pull in whole)
        row["weight_pulled_bytes"] = size
        row["weight_moved_bytes"] = sum(pull.moved_bytes for pull in whole)
        row["weight_pull_gb_per_second"] = round(size / max(seconds, 1e-9) / 1e9, 4)
    return row


def trained_runs(trajectory: Trajectory, mixed: MixedVersions) -> list[VersionRun]:
    """Runs over the sampled tokens that have a weight in the loss."""
    if mixed is MixedVersions.MASK:
        newest = trajectory.newest
        return [run for run in trajectory.runs if run.version == newest]
    return trajectory.runs


class BatchMetrics:
    """Rewards and ages of a batch, by the versions of the time at which it is formed."""

    def __init__(
        self, groups: Sequence[Group], bound: Bound, versions: Versions, mixed: MixedVersions
    ) -> None:
        self._ages = [bound.staleness(group.version or 0, versions) for group in groups]
        self._whole = max(len(group.scored) for group in groups)
        self._n = versions.n
        self._mixed = mixed
        self._counts: Counter[str] = Counter()
        self._reward = self._success = 0.0
        self._tasks: dict[str, list[float]] = {}
        """Of each task: trajectories, rewards, successes, turns, truncated ones."""
        self._lag_max = self._lag_sum = self._tokens = 0

    def add(self, group: Group) -> None:
        """Count in a group of the batch; each has its turn, since a large batch takes a while."""
        counts = self._counts
        counts["groups_short"] += len(group.scored) < self._whole
        task = self._tasks.setdefault(group.task, [0.0] * len(TASK_MEANS))
        for t in group.scored:
            for at, value in enumerate((1, t.score, _succeeded(t), t.turns, bool(t.truncated))):
                task[at] += value
            self._reward += t.score
            self._success += _succeeded(t)
            counts["turns"] += t.turns
            counts["trajectories"] += 1
            counts["of_several_versions"] += t.oldest != t.newest
            counts["truncated"] += bool(t.truncated)
            for run in trained_runs(t, self._mixed):
                lag = self._n - run.version
                self._lag_max = max(self._lag_max, lag)
                self._lag_sum += lag * run.count
                self._tokens += run.count

    @property
    def row(self) -> Row:
        """Of all that were counted in."""
        counts, members = self._counts, self._counts["trajectories"]
        ages = Counter(self._ages)
        return {
            **{f"staleness_share/{age}": ages[age] / len(self._ages) for age in sorted(ages)},
            "reward_mean": self._reward / members,
            "success_rate": self._success / members,
            "turns_mean": counts["turns"] / members,
            "staleness_mean": sum(self._ages) / len(self._ages),
            "staleness_max": max(self._ages),
            "train_lag_mean": self._lag_sum / self._tokens,
            "train_lag_max": self._lag_max,
            "trajectories": members,
            "trajectories_of_several_versions": counts["of_several_versions"],
            "truncated": counts["truncated"],
            "groups_short": counts["groups_short"],
            **self._of_tasks(),
        }

    def _of_tasks(self) -> Row:
        """The same of each task, where the batch has several."""
        if len(self._tasks) < 2:
            return {}
        row: Row = {}
        for task, sums in sorted(self._tasks.items()):
            row[f"task/{task}/trajectories"] = int(sums[0])
            row.update(
                (f"task/{task}/{name}", s / sums[0]) for name, s in zip(TASK_MEANS[1:], sums[1:], strict=True)
            )
        return row


def _succeeded(trajectory: Trajectory) -> float:
    """What the environment calls success; a reward of at least 1 where it doesn't say."""
    return trajectory.success if trajectory.success is not None else float(trajectory.score >= 1)


class MetricsFile:
    """``metrics.jsonl``: one JSON object a step."""

    def __init__(self, file: TextIO, *, more: bool = False) -> None:
        """``file`` is closed by ``close``; ``more``: what is in it stays, but for a torn last line."""
        self._file = file
        self.last_step = -1
        """Of the last object that was in ``file``."""
        if more:
            file.seek(0)
            whole = file.read().rpartition("\n")[0]
            if whole:
                whole += "\n"
                self.last_step = int(msgspec.json.decode(whole.splitlines()[-1])["step"])
            file.seek(0)
            file.truncate()
            file.write(whole)

    def write(self, row: Row) -> None:
        """Append ``row``; it is in the file when this returns."""
        self._file.write(msgspec.json.encode(row).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
