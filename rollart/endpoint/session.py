"""Session: the calls of one attempt of a trajectory, in the order in which they are answered.

A turn is one answered call.  Calls of one trajectory are answered one after the other; those of different ones never
wait for one another.  Invariants:

* equal requests are one turn: who repeats one is given the stored answer, or waits for the one that is on its way;
* a turn is recorded before a byte of its answer is sent, and whether anybody still waits for it changes nothing;
* when the trajectory ends, for whatever reason, every call of it ends with HTTP 410, now and later.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from rollart.controller.llm_proxy import Answer
from rollart.controller.switchboard import CallError
from rollart.controller.trajectory import Limits, Trajectory
from rollart.endpoint.answers import Completion, cut_at_stop, read_answer
from rollart.endpoint.calls import Call
from rollart.endpoint.errors import ApiError, bad_request, ended
from rollart.endpoint.recording import Prompt, Recording
from rollart.endpoint.text import Text
from rollart.environments.chat_template import ChatTemplate
from rollart.packing import ID_BYTES

__all__ = ["Session", "why_ended"]


class Session:
    """Answers the calls that carry one API key."""

    def __init__(
        self,
        trajectory: Trajectory,
        text: Text,
        template: ChatTemplate | None,
        *,
        sample: Callable[[Trajectory], Awaitable[Answer]],
        sampled: Callable[[Trajectory, Answer], None],
        counts: Counter[str],
        bug: Callable[[BaseException], None],
        unix_time: Callable[[], float],
    ) -> None:
        """``sample`` asks an engine for the trajectory's next answer (``CallError`` when there is none);
        ``sampled`` hears of each recorded one, and may end the trajectory."""
        self.trajectory = trajectory
        self.name = trajectory.session
        self.text = text
        self.broken: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()
        """Set when an engine failed a call: the attempt can't go on."""
        self.cut = ""
        """Why the last call was refused for the episode's length: ``max_turns`` or ``context``."""
        self.closed = ""
        """Why no call is answered any more; empty while they are."""
        self._recording = Recording(text, template, trajectory.ids_of, counts)
        self._sample = sample
        self._sampled = sampled
        self._counts = counts
        self._bug = bug
        self._unix_time = unix_time
        self.limits = trajectory.limits
        """The task's."""
        self._one_at_a_time = asyncio.Lock()
        self._answers: dict[bytes, asyncio.Task[Completion]] = {}
        """By the request's identity: the turns, and the calls that wait to be one."""

    async def answer(self, call: Call) -> Completion:
        """The call's answer; ``ApiError`` when it has none."""
        if self.closed:
            raise ended(self.closed)
        task = self._answers.get(call.identity)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._turn(call))
            self._answers[call.identity] = task
            task.add_done_callback(lambda done: self._forget_refused(call.identity, done))
        else:
            self._counts["calls_repeated"] += 1
        try:
            # Whoever waits may go away: the turn is the trajectory's, and a retry finds it.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self.closed:
                raise ended(self.closed) from None
            raise

    def close(self, why: str) -> None:
        """Answer no more calls; those under way end as well."""
        if self.closed:
            return
        self.closed = why
        for task in self._answers.values():
            task.cancel()
        self.trajectory.limits = self.limits

    def _forget_refused(self, identity: bytes, task: asyncio.Task[Completion]) -> None:
        """A call that was no turn may come again; one that failed for no known reason is a bug."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._answers.pop(identity, None)
        if error is not None and not isinstance(error, ApiError):
            self._bug(error)

    # --- one turn -------------------------------------------------------------------------------------

    async def _turn(self, call: Call) -> Completion:
        async with self._one_at_a_time:
            prompt = self._admit(call)
            trajectory = self.trajectory
            trajectory.limits = self._turn_limits(call)
            trajectory.asked(prompt.sequence, prompt.ids)
            try:
                answer = await self._sample(trajectory)
            except CallError as error:
                if not self.broken.done():
                    self.broken.set_result(error)
                raise ApiError(
                    503, f"no engine answered: {error}", code="generation_error", kind="server_error"
                ) from None
            self._require_live()
            return self._record(call, prompt, answer)

    def _require_live(self) -> None:
        """``ApiError`` (410) once the trajectory has ended; its owner closes the session only when it has its turn."""
        if self.trajectory.state.ended:
            raise ended(why_ended(self.trajectory))

    def _admit(self, call: Call) -> Prompt:
        """The prompt of a call that may be a turn; ``ApiError`` of one that may not."""
        self._require_live()
        limits, trajectory = self.limits, self.trajectory
        if trajectory.turns >= limits.max_turns:
            self.cut = "max_turns"
            raise bad_request(
                None,
                f"the trajectory has had its {limits.max_turns} turns (the task's max_turns): return its score",
                code="max_turns",
            )
        prompt = self._recording.prompt(call)
        if prompt.tokens >= limits.context_tokens:
            self.cut = "context"
            raise bad_request(
                "messages" if call.is_chat else "prompt",
                f"the prompt has {prompt.tokens} tokens, and the context {limits.context_tokens} "
                "(inference.max_model_len)",
                code="context_length_exceeded",
            )
        self.cut = ""
        return prompt

    def _turn_limits(self, call: Call) -> Limits:
        """Of this turn: the call may ask for less than the run allows."""
        limits = self.limits
        if call.max_tokens is None or call.max_tokens == limits.max_tokens:
            return limits
        return Limits(
            max_turns=limits.max_turns,
            max_tokens=call.max_tokens,
            context_tokens=limits.context_tokens,
            retries=limits.retries,
        )

    def _record(self, call: Call, prompt: Prompt, answer: Answer) -> Completion:
        trajectory = self.trajectory
        generated, raw, content = cut_at_stop(answer.generated, call.stop, self.text)
        completion = read_answer(
            call,
            generated,
            content,
            turn=f"{self.name}-{trajectory.turns}",
            prompt_tokens=prompt.tokens,
            created=int(self._unix_time()),
        )
        trajectory.generated(generated.ids, generated.logprobs, generated.versions)
        tokens = prompt.tokens + len(generated.ids) // ID_BYTES
        self._recording.answered(call, prompt, completion.message, tokens, raw)
        self._sampled(trajectory, Answer(generated, answer.worker, answer.routed_version))
        self._require_live()
        return completion


def why_ended(trajectory: Trajectory) -> str:
    """Of a trajectory that takes no more calls, in a sentence."""
    detail = f": {trajectory.detail}" if trajectory.detail else ""
    return f"trajectory {trajectory.id} is {trajectory.state}{detail}; it takes no more calls"
