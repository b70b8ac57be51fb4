"""Rollout: every trajectory of a run, from its dispatch to its end, and the batches made of them.

Joins the pure parts (trajectory, buffer, bound) with the coroutines that do the I/O, and tells the event
stream of each transition.  Whatever may change what is admissible ends in ``review``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rollart.config import Config, MixedVersions
from rollart.controller import events
from rollart.controller.env_manager import EnvManager
from rollart.controller.evaluation import Evaluation
from rollart.controller.journal import Drew, Dropped, Journal, Left, OpenGroup
from rollart.controller.kept_trajectory import restored, scored_record
from rollart.controller.llm_proxy import Answer, LLMProxy
from rollart.controller.metrics import Metrics
from rollart.controller.record import Record
from rollart.controller.reward_groups import GroupMembers
from rollart.controller.rewards import Rewards
from rollart.controller.run_context import RunContext
from rollart.controller.sample_buffer import Group, GroupPolicy, Orders, SampleBuffer
from rollart.controller.staleness import Bound, Versions
from rollart.controller.switchboard import Switchboard
from rollart.controller.task_source import TaskSource
from rollart.controller.trajectory import Kind, Limits, Reason, State, Trajectory
from rollart.packing import ID_BYTES, count_unsound

if TYPE_CHECKING:
    from rollart.endpoint.server import Endpoint

__all__ = ["Rollout"]

EVAL_GROUP = -1
GROUPS_AT_ONCE, MOVES_AT_ONCE = 4, 64


class Rollout:
    """The rollout side of a run."""

    def __init__(
        self,
        config: Config,
        switchboard: Switchboard,
        proxy: LLMProxy,
        versions: Versions,
        bound: Bound,
        *,
        rewards: Rewards,
        run: RunContext,
        metrics: Metrics,
        journal: Journal,
        endpoint: Endpoint | None = None,
    ) -> None:
        self._config = config
        self._bound = bound
        self.rewards = rewards
        self._proxy = proxy
        self._versions = versions
        self._run = run
        self._metrics = metrics
        self._next_id = 0
        self._journal = journal
        self._restored = Orders()
        self._observer = self._moved  # one bound method for all trajectories
        self._group_closed: asyncio.Future[None] | None = None
        self._admitting = False
        self._admit_soon = False
        self._batch_wanted: asyncio.Future[list[Group]] | None = None
        self.in_training: list[Group] = []
        """The groups of the batch that is in training."""
        self._leaving: Iterator[Trajectory] = iter(())
        """Trajectories of the batch that was trained last, which have yet to end."""
        self._skipped = ""
        self._eval: dict[int, Trajectory] = {}
        self._limits = {
            task.name: Limits(
                max_turns=task.max_turns,
                max_tokens=config.sampling_of(task).max_tokens,
                context_tokens=task.context_tokens or config.inference.max_model_len,
                retries=config.rollout.retries,
            )
            for task in config.tasks
        }
        self.source = TaskSource(config.tasks, config.seed)
        self._last_failure: dict[str, str] = {}
        """Of each task."""
        self.buffer = SampleBuffer(
            _policy(config),
            bound,
            versions,
            draw_task=lambda: self.source.draw(versions.n),
            make=self._make_train,
            on_group_end=self._group_ended,
        )
        rewards.attach(self._members)
        self.manager = EnvManager(
            config,
            switchboard,
            proxy,
            rewards,
            run=run,
            on_sampled=self._sampled,
            on_settled=self._settled,
            endpoint=endpoint,
        )
        self.evaluation = Evaluation(
            config.tasks, config.evaluation.episodes, start=self._start_eval, run=run
        )

    # --- the batch ------------------------------------------------------------------------------------

    def restore(self, tell: Callable[[list[events.KeptTrajectory]], None]) -> None:
        """Take up what the run before this one left in the journal; ``tell`` hears of the trajectories that go on,
        before any other is started.

        A batch that was in training then is ``in_training``.
        """
        ledger = self._journal.ledger
        self.source.restore(ledger.source)
        for task, outcome, error in ledger.left:
            self._tell_source(task, outcome, error)
        self._next_id = ledger.reserved
        kept: list[Trajectory] = []
        shipped = ledger.shipped
        if shipped is not None:
            for drawn, positions in shipped.groups:
                group = Group(drawn.id, drawn.task, drawn.seed, 0)
                group.scored = self._restore_scored(drawn, positions.values())
                kept += group.scored
                self.in_training.append(group)
            self._versions.busy = True
        opened = [
            (drawn, self._restore_scored(drawn, ledger.scored[drawn.id].values()))
            for drawn in ledger.groups.values()
        ]
        kept += [trajectory for _, scored in opened for trajectory in scored]
        tell([events.KeptTrajectory(t.id, t.attempt, t.sampled) for t in kept])
        for drawn, scored in opened:
            self._restored.add(self.buffer.reopen(drawn.id, drawn.task, drawn.seed, scored))
        self.buffer.go_on_at(ledger.next_group)

    def _restore_scored(self, group: OpenGroup, positions: Iterable[int]) -> list[Trajectory]:
        found: list[Trajectory] = []
        for position in positions:
            record = self._journal.scored(position)
            limits = self._limits[group.task]
            found.append(restored(record, group.task, group.seed, limits, self._observer))
            self._metrics.restored(found[-1])
        return found

    def admit(self) -> None:
        """Begin to fill the buffer."""
        self._admitting = True
        orders, self._restored = self._restored, Orders()
        self._carry_out(orders)
        self.review()

    async def get_batch(self) -> list[Group]:
        """The next batch's groups, as soon as they are complete; nothing else may take one meanwhile."""
        self._batch_wanted = asyncio.get_running_loop().create_future()
        self._offer_batch()
        return await self._batch_wanted

    async def groups_of_next_batch(self) -> list[Group]:
        """Complete groups that the batch will have, as soon as there are some; each is given once."""
        while True:
            groups = self.buffer.stream()
            if groups:
                return groups
            self._group_closed = asyncio.get_running_loop().create_future()
            await self._group_closed

    def review(self) -> None:
        """The versions changed, or a group left: abort what is too old, admit what fits, offer a batch."""
        self._proxy.changed()  # a request may wait for a worker that the bound barred until now
        self._carry_out(self.buffer.sweep())
        self._admit_some()
        self._offer_batch()

    def _admit_some(self) -> None:
        """Open groups, a few at a time: a new batch must not keep all others waiting."""
        if not self._admitting:
            return
        before = len(self.buffer.groups)
        orders = self.buffer.admit(GROUPS_AT_ONCE)
        opened = len(self.buffer.groups) - before
        self._tell_drawn(opened)
        self._carry_out(orders)
        if opened == GROUPS_AT_ONCE and not self._admit_soon:
            self._admit_soon = True
            asyncio.get_running_loop().call_soon(self._admit_more)
        elif warm := self._config.environments.warm_groups:
            rollout = self._config.rollout
            coming = [
                instance
                for instance in self.source.peek(warm, self._versions.n)
                if not self._config.task(instance[0]).is_agent
            ]
            self.manager.warm.prepare(coming, rollout.group_size + rollout.redundant_members)

    def _tell_drawn(self, count: int) -> None:
        """Of the ``count`` groups opened last."""
        if count and self._journal.keeps:
            last = itertools.islice(reversed(self.buffer.groups.values()), count)
            drawn = [OpenGroup(group.id, group.task, group.seed) for group in last]
            self._journal.write(Drew(drawn[::-1], self.source.state()))

    def _admit_more(self) -> None:
        self._admit_soon = False
        self._admit_some()

    def _offer_batch(self) -> None:
        if self._batch_wanted is None or self._batch_wanted.done():
            return
        if self._group_closed is not None and not self._group_closed.done() and self.buffer.has_unstreamed:
            self._group_closed.set_result(None)
        groups = self.buffer.take_batch()
        if groups is not None:
            self.in_training = groups
            self._batch_wanted.set_result(groups)

    def batch_trained(self, skipped: str) -> None:
        """The batch's train_step ended; ``skipped`` says why it was not applied, empty when it was.

        ``end_trained`` follows; whatever happens before it is done, ``close`` ends the rest the same way.
        """
        self._leaving = iter([t for group in self.in_training for t in group.scored])
        self._skipped = skipped
        self.in_training = []

    async def end_trained(self) -> None:
        """End the trajectories of the batch that was trained, a few at a time."""
        while self._end_some(MOVES_AT_ONCE):
            await asyncio.sleep(0)

    def _end_some(self, most: int | None = None) -> bool:
        """End trajectories of the batch that was trained; whether ``most`` were not enough."""
        ended = list(itertools.islice(self._leaving, most))
        for trajectory in ended:
            if self._skipped:
                trajectory.fail(Reason.NAN, self._skipped)
            else:
                trajectory.move(State.CONSUMED)
        return len(ended) == most

    def close(self, reason: Reason) -> None:
        """Stop admitting and end every trajectory."""
        self._admitting = False
        self._end_some()
        self._carry_out(self.buffer.clear(reason))
        for trajectory in (t for group in self.in_training for t in group.scored):
            trajectory.abort(reason)
        self.in_training = []
        for trajectory in list(self._eval.values()):
            if not trajectory.state.ended:
                trajectory.abort(reason)
                self.manager.stop(trajectory)

    def cancel(self, trajectories: Iterable[Trajectory]) -> None:
        """End training trajectories in whatever stage they are in, up to their batch; their groups replace them."""
        for trajectory in trajectories:
            self._carry_out(self.buffer.cancel(trajectory))
        self.review()

    # --- trajectories ---------------------------------------------------------------------------------

    def _make_train(self, *, group: int, member: int, task: str, seed: int) -> Trajectory:
        return self._make(Kind.TRAIN, group, member, task, seed)

    def _start_eval(self, task: str, seed: int) -> Trajectory:
        trajectory = self._make(Kind.EVAL, EVAL_GROUP, len(self._eval), task, seed)
        self._eval[trajectory.id] = trajectory
        self.manager.start(trajectory)
        return trajectory

    def _make(self, kind: Kind, group: int, member: int, task: str, seed: int) -> Trajectory:
        trajectory = Trajectory(
            id=self._next_id,
            group=group,
            member=member,
            task=task,
            seed=seed,
            kind=kind,
            limits=self._limits[task],
            observer=self._observer,
        )
        self._journal.reserve(self._next_id)
        self._next_id += 1
        if self.rewards.reads(task):
            trajectory.record = Record()
        self._metrics.dispatched(trajectory)
        self._run.write(events.Dispatched(self._run.clock(), trajectory.id, group, member, task, seed, kind))
        return trajectory

    def _members(self, group: int) -> GroupMembers | None:
        found = self.buffer.groups.get(group)
        if found is None:
            return None
        return GroupMembers(self.buffer.policy.size, found.scored, list(found.in_flight.values()))

    def _carry_out(self, orders: Orders) -> None:
        for trajectory in orders.stop:
            self.manager.stop(trajectory)
        for trajectory in orders.start:
            if not trajectory.state.ended:
                self.manager.start(trajectory)
        if orders.failure is not None:
            self._run.bug(orders.failure)

    # --- what is heard of them ------------------------------------------------------------------------

    def _moved(self, trajectory: Trajectory, before: State, reason: Reason) -> None:
        self._metrics.moved(trajectory, before, reason)
        detail = trajectory.detail if trajectory.state in (State.FAILED, State.PENDING) else ""
        if trajectory.state is State.FAILED:
            self._last_failure[trajectory.task] = trajectory.detail
        self._run.write(
            events.Moved(
                self._run.clock(),
                trajectory.id,
                trajectory.attempt,
                before,
                trajectory.state,
                reason,
                detail,
                trajectory.turns,
                trajectory.tokens,
            )
        )
        if trajectory.state.ended:
            if before is State.SCORED and trajectory.state is State.ABORTED:
                self._journal.write(Dropped(trajectory.id))
            if trajectory.kind is Kind.EVAL:
                self._eval.pop(trajectory.id, None)
            else:
                self.rewards.changed(trajectory.group)

    def _sampled(self, trajectory: Trajectory, answer: Answer) -> None:
        generated = answer.generated
        count = len(generated.ids) // ID_BYTES
        self._run.write(
            events.Sampled(
                self._run.clock(),
                trajectory.id,
                trajectory.attempt,
                trajectory.turns - 1,
                answer.worker,
                answer.routed_version,
                count,
                len(generated.logprobs) // ID_BYTES,
                count_unsound(generated.logprobs),
                generated.versions,
                generated.finish_reason,
                generated.cached_tokens,
                answer.prefilled_by,
                answer.kept_tokens,
            )
        )
        if trajectory.kind is Kind.EVAL:
            return
        if (trajectory.oldest or 0) < self._bound.floor(self._versions):
            self._abort(trajectory, Reason.STALE)
        elif (
            self._config.rollout.mixed_versions is MixedVersions.DROP
            and trajectory.oldest != trajectory.newest
        ):
            self._abort(trajectory, Reason.MIXED_VERSIONS)

    def _abort(self, trajectory: Trajectory, reason: Reason) -> None:
        trajectory.abort(reason)
        self._settled(trajectory)

    def _settled(self, trajectory: Trajectory) -> None:
        if trajectory.kind is Kind.EVAL:
            self.evaluation.settled(trajectory)
            return
        if trajectory.state is State.SCORED and self._journal.keeps:
            self._journal.write(scored_record(trajectory))
        self._carry_out(self.buffer.settled(trajectory))
        self._admit_some()
        self._offer_batch()

    def _group_ended(self, group: Group, outcome: str) -> None:
        version = group.version
        self._run.write(
            events.GroupEnded(
                self._run.clock(),
                group.id,
                outcome,
                len(group.scored),
                -1 if version is None else version,
                group.dispatched,
            )
        )
        failed = outcome == "incomplete" and group.failures
        error = self._last_failure.get(group.task, "") if failed else ""
        if outcome != "shipped":
            self._journal.write(Left(group.id, "failed" if failed else outcome, error))
        self._tell_source(group.task, "failed" if failed else outcome, error)

    def _tell_source(self, task: str, outcome: str, error: str) -> None:
        """A task whose groups fail is taken out after so many in a row, and the others go on."""
        if outcome in ("shipped", "filtered"):
            self.source.group_succeeded(task)
        elif outcome == "failed" and self.source.group_failed(task, error):
            self.manager.warm.drop(task)
            self._run.write(events.Quarantined(self._run.clock(), task, error))


def _policy(config: Config) -> GroupPolicy:
    rollout = config.rollout
    return GroupPolicy(
        per_batch=rollout.groups_per_batch,
        size=rollout.group_size,
        smallest=rollout.smallest_group,
        redundant_groups=rollout.redundant_groups,
        redundant_members=rollout.redundant_members,
        refills=rollout.member_refills,
        filter_groups=rollout.filter_groups,
        max_filtered=rollout.max_filtered_groups or 256,
        max_failed=rollout.max_failed_groups,
    )
