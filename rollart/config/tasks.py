"""Parts of a task's configuration: where its instances come from, and how its answers are sampled."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from rollart.config.algorithm import Algorithm
from rollart.config.rewards import Reward
from rollart.config.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)

__all__ = ["Dataset", "Task", "TaskSampling", "weight_at"]


class Dataset(Section, frozen=True, kw_only=True):
    """Rows that a task's instances are made of, each epoch in a new order, again and again.

    A path is a ``.jsonl`` or ``.parquet`` file, or a folder that Hugging Face's ``datasets`` saved; the last two need
    the package pyarrow.  A row reaches the environment as ``reset``'s third parameter, ``row``.
    """

    path: str
    eval_path: str | None = None
    """The rows of evaluations, which training never sees."""
    eval_share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Of the rows of ``path``, chosen by their content, where there is no ``eval_path``; by default 0.2."""
    shuffle: bool = True
    """Each epoch has an order of its own, by the run's seed; otherwise the file's."""

    def __post_init__(self) -> None:
        if self.eval_path is not None and self.eval_share is not None:
            raise ValueError("eval_share does nothing beside eval_path")


class TaskSampling(Section, frozen=True, kw_only=True):
    """What one task has otherwise than the run's ``sampling``; what is not set here is as there."""

    temperature: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    allowed_token_ids: list[int | str] | None = None
    max_tokens: PositiveInt | None = None
    stop_token_ids: list[int | str] | None = None
    ignore_eos: bool | None = None


def weight_at(curriculum: dict[int, float], step: int) -> float:
    """The weight at train_step ``step``: linear between the curriculum's steps, and constant outside them."""
    points = sorted(curriculum.items())
    before = points[0]
    for point in points:
        if step < point[0]:
            share = (step - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return before[1] + max(share, 0.0) * (point[1] - before[1])
        before = point
    return before[1]


class Task(Section, frozen=True, kw_only=True):
    """A kind of episode."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]+$")]
    """The paper's tag_name."""
    environment: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None = None
    """Import path of an environment class, ``module:Class``."""
    agent: Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")] | None = None
    """Instead of an environment: import path of an agent, ``module:function``, that plays whole episodes by itself
    through the run's OpenAI-compatible endpoint, and returns its score (docs/endpoint.md)."""
    agent_command: Annotated[list[str], Meta(min_length=1)] | None = None
    """Instead of an environment: an agent as a program and its arguments; its score is its output's last line."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class; an agent is given them as they are."""
    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the other tasks' weights."""
    curriculum: dict[int, NonNegativeFloat] = {}
    """Instead of ``weight``: train_step → weight, linear between the steps, such as ``{0: 1, 100: 0}``."""
    dataset: Dataset | None = None
    """The instances are rows of it, and not drawn by seed."""
    interpreter: str | None = None
    """The Python of its environment workers, where its packages clash with this run's; rollart must be installed
    there (without dependencies, beside msgspec, PyYAML, pyzmq and tokenizers)."""
    chat: bool = False
    """The environment's texts are a user's messages, by the model's chat template."""
    max_turns: PositiveInt = 8
    """A trajectory is cut, and scored as it is, after this many turns."""
    context_tokens: PositiveInt | None = None
    """Tokens of prompt and answers together; by default, and at most, ``inference.max_model_len``."""
    reset_timeout_s: PositiveFloat = 60.0
    step_timeout_s: PositiveFloat = 60.0
    episode_timeout_s: PositiveFloat | None = None
    """A trajectory that has taken longer when its environment answers is cut, and scored as it is.  An agent's
    begins again, or fails; by default it has 600."""
    sampling: TaskSampling = TaskSampling()
    max_failed_groups: PositiveInt = 8
    """So many groups in a row that end without a sample for its failures take the task out of the run, with its
    error; the last task that is left stops the run by ``rollout.max_failed_groups`` instead."""
    reward: Reward | list[Reward] | None = None
    """What scores its trajectories, or several whose weighted scores are summed (docs/rewards.md); by default the
    sum of the environment's own rewards."""
    algorithm: Algorithm | None = None
    """In place of the run's ``algorithm``, the whole section."""

    def __post_init__(self) -> None:
        self._check_kind()
        if self.curriculum and self.weight != 1.0:
            raise ValueError("weight does nothing beside curriculum")
        if any(step < 0 for step in self.curriculum):
            raise ValueError("curriculum's steps must be at least 0")
        if self.curriculum and not any(self.curriculum.values()):
            raise ValueError("curriculum gives it the weight 0 at every step: leave the task out")
        if self.reward == []:
            raise ValueError("reward is an empty list: leave it out for the environment's own rewards")

    def weight_at(self, step: int) -> float:
        """Its share of the groups at train_step ``step``."""
        return weight_at(self.curriculum, step) if self.curriculum else self.weight

    @property
    def rewards(self) -> list[Reward]:
        """``reward`` as a list; empty: the environment's own."""
        if self.reward is None:
            return []
        return self.reward if isinstance(self.reward, list) else [self.reward]

    def _check_kind(self) -> None:
        kinds = {
            "environment": self.environment,
            "agent": self.agent,
            "agent_command": self.agent_command,
        }
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "a task needs one of environment (module:Class), agent (module:function) and agent_command (a list)"
                + (f"; this one has {' and '.join(given)}" if given else "")
            )
        if self.environment is None:
            self._check_agent()

    def _check_agent(self) -> None:
        if (self.reset_timeout_s, self.step_timeout_s) != (60.0, 60.0):
            raise ValueError(
                "reset_timeout_s and step_timeout_s do nothing for an agent; use episode_timeout_s"
            )
        idle = {"chat": self.chat, "dataset": self.dataset, "reward": self.reward}
        for name, value in idle.items():
            if value:
                raise ValueError(
                    f"{name} is for environments: an agent is given a seed, and returns its score"
                )

    @property
    def is_agent(self) -> bool:
        """An agent plays it, through the endpoint."""
        return self.environment is None
