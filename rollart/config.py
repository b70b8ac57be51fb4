"""The configuration of a run: one YAML file into these Structs.

Every field does something; a key that is not here is an error.  Units are in the names or in the docs.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollart.config_algorithm import Algorithm, Loss
from rollart.config_health import Health
from rollart.config_rewards import Reward, Scope
from rollart.config_routing import Disaggregation, HwAffinity, Pool, check_routing, splits
from rollart.config_section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)
from rollart.config_tasks import Dataset, TaskSampling, weight_at

__all__ = [
    "Algorithm",
    "Config",
    "Decay",
    "Endpoint",
    "Environments",
    "Evaluation",
    "Health",
    "Inference",
    "MixedVersions",
    "Model",
    "RandomModel",
    "Recompute",
    "Reward",
    "Rollout",
    "Sampling",
    "Schedule",
    "Task",
    "Trainer",
    "UpdateAt",
]


class UpdateAt(enum.StrEnum):
    """When inference workers take new weights, which decides what ``staleness_bound`` speaks of."""

    BATCH = "batch"
    """The paper's order: all workers together, right after a batch is formed."""
    PUBLISH = "publish"
    """Each worker by itself, as soon as it holds the newest version."""


class Schedule(enum.StrEnum):
    """How generation and training take turns; all but the first are there to be compared with."""

    ROLLART = "rollart"
    """Both at once, every trajectory at its own pace, the bound kept at every turn.  With ``update_at: publish``
    and alpha 0 it is the usual synchronous loop with asynchronous environments and rewards (``sync_plus``)."""
    SYNC = "sync"
    """All trajectories of a batch take each turn together, are scored together, and are trained on before the
    next begin."""
    ONE_OFF = "one_off"
    """A batch is trained on while the next is generated, whole, with the weights from before that step."""
    AREAL = "areal"
    """As AReaL (arXiv 2505.24298): the bound is kept when a trajectory starts, and never looked at again."""


class MixedVersions(enum.StrEnum):
    """What becomes of a trajectory whose tokens were sampled by several weight versions."""

    CORRECT = "correct"
    """Train on all tokens, each with the importance ratio against the engine's own log-probability."""
    MASK = "mask"
    """Train only on the tokens of the trajectory's newest version."""
    DROP = "drop"
    """Abort the trajectory (reason ``mixed_versions``) and start another."""


class RandomModel(Section, frozen=True, kw_only=True):
    """A Qwen3 of this shape with weights drawn from ``seed``, and a tokenizer with one token a character."""

    seed: NonNegativeInt = 0
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, Meta(ge=32, multiple_of=32)] = 32
    """vLLM's attention on CPU takes multiples of 32."""
    max_position_embeddings: PositiveInt = 512
    tie_word_embeddings: bool = False
    characters: str | None = None
    """The tokenizer's characters; by default printable ASCII and the newline."""
    tokens: list[str] = []
    """Texts that are one token each, beside the characters: whole tool calls, say."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.characters is not None and len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat a character")
        if len(set(self.tokens)) != len(self.tokens) or any(len(token) < 2 for token in self.tokens):
            raise ValueError("tokens must be different texts of at least 2 characters")


class Model(Section, frozen=True, kw_only=True):
    """The policy: a Hugging Face folder, or a random model."""

    path: str | None = None
    random: RandomModel | None = None
    chat_template: str | None = None
    """A Jinja file that renders messages, instead of the folder's own template; for environments that use messages."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.random is None):
            raise ValueError("give either path (a Hugging Face folder) or random (a model from a seed)")


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


class Sampling(Section, frozen=True, kw_only=True):
    """How the engine samples; only what the trainer can reproduce exactly is accepted."""

    temperature: Annotated[float, Meta(ge=0.01, le=2)] = 1.0
    """vLLM's range: it raises a lower one to 0.01."""
    max_tokens: PositiveInt = 1
    """Tokens an answer (one turn) has at most."""
    allowed_token_ids: list[int | str] = []
    """The only tokens that may be sampled, as ids or as entries of the tokenizer's vocabulary; empty: all."""
    stop_token_ids: list[int | str] = []
    """Tokens that end an answer, besides the model's end-of-sequence tokens; they stay in the answer."""
    ignore_eos: bool = False


class Rollout(Section, frozen=True, kw_only=True):
    """How trajectories become batches."""

    staleness_bound: NonNegativeInt = 1
    """alpha: how many versions old a trained group may be; what counts as its age depends on ``update_at``."""
    update_at: UpdateAt = UpdateAt.BATCH
    schedule: Schedule = Schedule.ROLLART
    groups_per_batch: PositiveInt = 8
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Trajectories of one task instance that share a baseline (G)."""
    min_group: Annotated[int, Meta(ge=2)] | None = None
    """A group that can't complete closes short with at least so many; by default ``group_size``."""
    redundant_groups: NonNegativeInt = 0
    """Groups in flight beyond what the bound admits for the next batches (R)."""
    redundant_members: NonNegativeInt = 0
    """Trajectories a group starts beyond ``group_size``; it closes at the first ``group_size``."""
    member_refills: NonNegativeInt = 4
    """Trajectories a group may start in place of failed or stale ones."""
    retries: NonNegativeInt = 2
    """Times a trajectory starts again after an infrastructure failure."""
    mixed_versions: MixedVersions = MixedVersions.CORRECT
    filter_groups: bool = False
    """Drop groups whose rewards are all equal, and sample others in their place."""
    max_filtered_groups: PositiveInt | None = None
    """So many filtered groups in a row stop the run, for it gets no signal; by default 256."""
    max_failed_groups: PositiveInt = 32
    """So many groups in a row that end without a sample stop the run: its environments or engines are broken."""

    def __post_init__(self) -> None:
        if self.update_at is UpdateAt.BATCH and self.staleness_bound == 0:
            raise ValueError(
                "staleness_bound 0 can't exist with update_at: batch, since get_batch would wait for the update "
                "and the update for get_batch; use update_at: publish, where 0 is exactly on-policy"
            )
        fixed = _FIXED_BY_SCHEDULE[self.schedule]
        for name, wanted in fixed.items():
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"schedule {self.schedule} is defined with {name}: {wanted}; it is {getattr(self, name)} here"
                )
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"min_group ({self.min_group}) must be at most group_size ({self.group_size})")
        if self.max_filtered_groups is not None and not self.filter_groups:
            raise ValueError("max_filtered_groups does nothing without filter_groups: true")

    @property
    def most_open_members(self) -> int:
        """Trajectories of one batch, the redundant ones included."""
        return (self.groups_per_batch + self.redundant_groups) * (self.group_size + self.redundant_members)

    @property
    def smallest_group(self) -> int:
        """Members a group needs to be trained on."""
        return self.min_group or self.group_size


_FIXED_BY_SCHEDULE: dict[Schedule, dict[str, object]] = {
    Schedule.ROLLART: {},
    Schedule.SYNC: {"update_at": UpdateAt.PUBLISH, "staleness_bound": 0},
    Schedule.ONE_OFF: {"update_at": UpdateAt.BATCH, "staleness_bound": 1},
    Schedule.AREAL: {"update_at": UpdateAt.PUBLISH},
}


class DType(enum.StrEnum):
    """Floating-point type of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Decay(enum.StrEnum):
    """What the learning rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """It falls to 0 over the run's optimiser steps."""


class Recompute(enum.StrEnum):
    """What the backward pass computes again instead of having kept it."""

    NONE = "none"
    ATTENTION = "attention"
    """The core attention of each layer."""
    LAYERS = "layers"
    """Every layer, from its input."""


class Trainer(Section, frozen=True, kw_only=True):
    """The Megatron-core trainer."""

    learning_rate: PositiveFloat = 1e-6
    warmup_optimizer_steps: NonNegativeInt = 0
    """The rate rises linearly over so many optimiser steps."""
    learning_rate_decay: Decay = Decay.CONSTANT
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad_norm: PositiveFloat = 1.0
    minibatches: PositiveInt = 1
    """Optimiser steps a train_step makes, each on a share of the groups."""
    stream_batch: bool = False
    """Compute the gradients of groups as they arrive, and make the step when the batch is whole, instead of waiting
    for it: the same gradient, within rounding."""
    micro_batch_sequences: PositiveInt | None = None
    """Trajectories side by side in a forward pass, padded to the longest; by default 16."""
    micro_batch_tokens: PositiveInt | None = None
    """Instead: trajectories are packed one after the other, without padding, up to so many tokens a forward pass; a
    longer trajectory has one of its own."""
    recompute: Recompute = Recompute.NONE
    dtype: DType = DType.FLOAT32
    tensor_parallel: PositiveInt = 1
    """Processes that hold a share of each layer.  The trainer is a group of tensor × pipeline × context × data
    processes."""
    pipeline_parallel: PositiveInt = 1
    """Processes that hold a share of the layers."""
    data_parallel: PositiveInt = 1
    """Processes that hold the same weights and compute a share of the batch."""
    expert_parallel: PositiveInt = 1
    """Of the data-parallel processes, so many hold a share of the experts each."""
    context_parallel: PositiveInt = 1
    """Processes that compute a share of each trajectory's tokens."""
    distributed_optimizer: bool = False
    """Each data-parallel process holds a share of the optimiser's state."""
    threads: PositiveInt = 1
    """CPU threads of torch."""
    verify_share: Share = 1.0
    """Share of the trajectories whose log-probabilities are recomputed under the weights that sampled them."""
    step_timeout_s: PositiveFloat = 3600.0
    """For one request; a trainer that takes longer is ended, and started again."""
    restarts: NonNegativeInt = 8
    """As of ``inference``; what was trained since its last checkpoint is trained again."""
    checkpoint_every: NonNegativeInt = 0
    """train_steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: PositiveInt | None = None
    """Older ones are removed; by default 2 stay."""
    keep_best: bool = False
    """Besides them the best one stays: by the last held-out success where evaluations are made during the run
    (``evaluation.every``), else by the success of the batch."""

    def __post_init__(self) -> None:
        if self.keep_checkpoints is not None and not self.checkpoint_every:
            raise ValueError("keep_checkpoints does nothing while checkpoint_every is 0")
        if self.keep_best and not self.checkpoint_every:
            raise ValueError("keep_best does nothing while checkpoint_every is 0")
        if self.stream_batch and self.minibatches > 1:
            raise ValueError(
                "stream_batch makes one optimiser step of the whole batch: it needs minibatches: 1"
            )
        if self.micro_batch_tokens is not None and self.micro_batch_sequences is not None:
            raise ValueError("give either micro_batch_sequences (padded) or micro_batch_tokens (packed)")
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel ({self.expert_parallel}) must divide data_parallel ({self.data_parallel}): "
                "the experts are divided among data-parallel processes"
            )
        if self.distributed_optimizer and self.data_parallel * self.context_parallel == 1:
            raise ValueError("distributed_optimizer does nothing while data_parallel is 1")
        if self.context_parallel > 1 and self.micro_batch_tokens is not None:
            raise ValueError(
                "context_parallel divides padded trajectories: use micro_batch_sequences with it"
            )

    @property
    def processes(self) -> int:
        """Of the trainer's group."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def sequences(self) -> int:
        """``micro_batch_sequences``."""
        return self.micro_batch_sequences or 16


class Inference(Section, frozen=True, kw_only=True):
    """The vLLM inference workers."""

    workers: PositiveInt = 1
    """Those of all ``pools`` where there are any."""
    pools: list[Pool] = []
    """Workers by hardware class; by default ``workers`` of class CPU."""
    hw_affinity: HwAffinity = {}
    """The hardware class of each task by name, ``default`` for the others: a class, a list of them with the preferred
    one first, or ``prefill`` and ``decode`` apart.  Classes that are not named come after, in the order of the pools.
    ``auto``: proposed from what the tasks turn out to be like, and followed."""
    disaggregation: Disaggregation | None = None
    """For prefill and decode on different workers."""
    dtype: DType = DType.FLOAT32
    max_model_len: PositiveInt = 512
    """Tokens of prompt and answers together; a trajectory that would pass it is cut, and scored as it is."""
    max_num_seqs: PositiveInt = 128
    """Sequences an engine decodes at once."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of an engine; by default 1 on CPU, and on GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Only on GPU engines; vLLM's default otherwise."""
    threads: PositiveInt = 1
    """CPU threads of an engine, or of each of its processes."""
    tensor_parallel: PositiveInt = 1
    """Processes that an engine's model is divided over; each loads only its slices of new weights."""
    max_requests: PositiveInt | None = None
    """Requests a worker is given at once, those that wait in its engine included; others wait in the controller, each
    trajectory with its own.  By default four times max_num_seqs."""
    max_tokens_in_flight: PositiveInt | None = None
    """Tokens, of prompts and of answers to come, that a worker is given at once: below its KV cache it never has to
    preempt.  By default not bounded."""
    progress_every_s: PositiveFloat = 2.0
    """Answers that take longer are reported as far as they are: what a lost worker had reported is kept, and another
    goes on from there."""
    generate_timeout_s: PositiveFloat = 600.0
    """For one answer, queueing in the engine included."""
    update_timeout_s: PositiveFloat = 120.0
    """For each of pull, suspend, update and resume; a worker that takes longer is taken out of routing."""
    restarts: NonNegativeInt = 8
    """Times in a row that a worker that ended, hung or was taken out is started again: after 1 s, then 2 s, and so on,
    up to 60.  One that served for two minutes begins anew; one that has no try left is removed from the run."""
    canary_tolerance: PositiveFloat | None = None
    """Largest log-probability difference to the trainer; by default 1e-3 in float32 and 0.25 in bfloat16."""

    def __post_init__(self) -> None:
        if not self.pools:
            return
        if self.tensor_parallel > 1 and any(pool.slowdown > 1 for pool in self.pools):
            raise ValueError(
                "pools.slowdown does nothing for an engine of several processes (tensor_parallel)"
            )
        if self.tensor_parallel > 1 and any(pool.devices for pool in self.pools):
            raise ValueError(
                f"pools.devices gives each engine one GPU, and tensor_parallel divides it over {self.tensor_parallel}"
            )
        total = sum(pool.workers for pool in self.pools)
        if self.workers not in (1, total):
            raise ValueError(f"workers is {self.workers} and the pools have {total}: leave workers out")
        msgspec.structs.force_setattr(self, "workers", total)

    @property
    def all_pools(self) -> list[Pool]:
        """``pools``, or what ``workers`` stands for."""
        return self.pools or [Pool(hardware="CPU", workers=self.workers)]

    def pool_of(self, number: int | None, hardware: str) -> Pool:
        """The pool of worker ``number`` if it is of that class; else the first of that class, or one like it."""
        first = 0
        for pool in self.all_pools:
            if number is not None and first <= number < first + pool.workers and pool.hardware == hardware:
                return pool
            first += pool.workers
        same = [pool for pool in self.all_pools if pool.hardware == hardware]
        return same[0] if same else Pool(hardware=hardware)

    @property
    def splits(self) -> bool:
        """Whether any request may be prefilled by one worker and decoded by another."""
        return splits(self.all_pools, self.hw_affinity)

    @property
    def most_requests(self) -> int:
        """What ``max_requests`` comes to."""
        return self.max_requests or 4 * self.max_num_seqs

    @property
    def tolerance(self) -> float:
        """The canary's tolerance in nats."""
        if self.canary_tolerance is not None:
            return self.canary_tolerance
        return 1e-3 if self.dtype is DType.FLOAT32 else 0.25


class StoreKind(enum.StrEnum):
    """Where weights travel."""

    LOCAL = "local"
    """Shared memory: all workers are on one machine."""
    MOONCAKE = "mooncake"
    """The memory of Mooncake's storage nodes."""


class Weights(Section, frozen=True, kw_only=True):
    """The weight store between the trainer and the inference workers."""

    store: StoreKind = StoreKind.LOCAL
    bucket_mib: PositiveFloat = 64.0
    """Tensors travel in pieces of this size; a larger tensor has one of its own."""
    pulls_at_once: PositiveInt = 8
    """Inference workers that pull at the same time; the others wait for their turn."""
    pull_jitter_s: NonNegativeFloat = 0.0
    """Each pull begins up to so much later, by chance, so that many workers don't ask the store at the same moment."""
    master: str | None = None
    """HOST:PORT of a Mooncake master that runs already; by default the run starts one, and its storage nodes."""
    nodes: PositiveInt | None = None
    """Storage nodes that the run starts; by default 1."""
    node_gib: PositiveFloat | None = None
    """Memory of each node; about four versions must fit into all. By default 1."""
    replicas: PositiveInt | None = None
    """Nodes that hold each bucket; by default 1."""
    delta: bool | None = None
    """Store what changed beside what is, and pull only that where the version before is at hand; by default false.
    It pays where the network is slower than the comparison, about 1 GB/s; the trainer's host keeps one version more."""

    def __post_init__(self) -> None:
        own = {"nodes": self.nodes, "node_gib": self.node_gib}
        mooncake = {"master": self.master, "replicas": self.replicas, "delta": self.delta, **own}
        idle = [name for name, value in mooncake.items() if value is not None]
        if self.store is StoreKind.LOCAL and idle:
            raise ValueError(
                f"{idle[0]} does nothing while store is local: it is a setting of store mooncake"
            )
        idle = [name for name, value in own.items() if value is not None]
        if self.master is not None and idle:
            raise ValueError(f"{idle[0]} does nothing where master names a Mooncake that runs already")
        if self.master is not None and not _is_address(self.master):
            raise ValueError(f"master is {self.master!r}, not HOST:PORT")
        if self.master is None and (self.replicas or 1) > (self.nodes or 1):
            raise ValueError(f"replicas ({self.replicas}) needs as many nodes, there are {self.nodes or 1}")

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mib`` in bytes."""
        return int(self.bucket_mib * 2**20)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536


class Environments(Section, frozen=True, kw_only=True):
    """The environment workers."""

    workers: PositiveInt = 1
    threads: PositiveInt = 8
    """Environments of one worker that act at the same time."""
    max_sessions: PositiveInt = 4096
    """Episodes a worker holds at once."""
    warm_groups: NonNegativeInt = 0
    """Groups whose environments are reset before the staleness bound admits them, so that nobody waits for it."""
    backoff_s: NonNegativeFloat = 0.2
    """An episode that begins again after an infrastructure failure waits so long, then twice as long, and so on."""
    restarts: NonNegativeInt = 8
    """As of ``inference``."""
    max_output_mib: PositiveFloat = 16.0
    """What one episode may print; more fails it.  It goes to the worker's log."""


class Endpoint(Section, frozen=True, kw_only=True):
    """The OpenAI-compatible endpoint that tasks with an agent call; there is none without such a task.

    It speaks plain HTTP.  Every request wants the API key of a trajectory that is live, wherever it is bound.
    """

    host: str = "127.0.0.1"
    """The address it listens on; agents on other machines need another than loopback."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: one that is free."""
    url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    """Where agents reach it, if not at its own host and port: behind a proxy, or listening on 0.0.0.0."""
    model: str = "policy"
    """The model's name in requests."""

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::") and self.url is None:
            raise ValueError(
                f"endpoint.host {self.host} is every address of the machine and none that an agent could call: "
                "give endpoint.url as well"
            )


class Evaluation(Section, frozen=True, kw_only=True):
    """Greedy episodes on the held-out split, before the first update and after the last at least."""

    episodes: NonNegativeInt = 0
    """0: no evaluation."""
    every: NonNegativeInt = 0
    """train_steps between further evaluations; 0: none between."""

    def __post_init__(self) -> None:
        if self.every and not self.episodes:
            raise ValueError("every does nothing while episodes is 0")


_OF_THE_BATCH = {"loss_mean", "loss_mean_tokens"}
"""What of ``algorithm`` counts for all tasks."""


class Config(Section, frozen=True, kw_only=True):
    """A run."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
    """Names the run folder, ``runs/NAME``."""
    run_dir: str | None = None
    """The run folder, instead of ``runs/NAME``."""
    seed: NonNegativeInt = 0
    """Seeds the order of tasks and the environments."""
    steps: PositiveInt
    """train_steps the run makes."""
    model: Model
    tasks: Annotated[list[Task], Meta(min_length=1)]
    sampling: Sampling = Sampling()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    health: Health = Health()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    weights: Weights = Weights()
    environments: Environments = Environments()
    evaluation: Evaluation = Evaluation()
    endpoint: Endpoint = Endpoint()
    start_timeout_s: PositiveFloat = 600.0
    """For a worker from its start to its readiness."""
    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 30.0
    """A worker, or the controller, that is silent for so long counts as lost."""

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"task names must differ: {', '.join(sorted(repeated))} is there twice")
        for step in sorted({step for task in self.tasks for step in task.curriculum}):
            if not any(task.weight_at(step) for task in self.tasks):
                raise ValueError(f"at step {step} the curriculum gives every task the weight 0")
        if len(self.tasks) == 1 and (self.tasks[0].curriculum or self.tasks[0].weight != 1.0):
            name = "curriculum" if self.tasks[0].curriculum else "weight"
            raise ValueError(f"task {self.tasks[0].name}: {name} does nothing, since there is no other task")
        for task in self.tasks:
            if (task.context_tokens or 0) > self.inference.max_model_len:
                raise ValueError(
                    f"task {task.name}: context_tokens ({task.context_tokens}) is beyond inference.max_model_len "
                    f"({self.inference.max_model_len})"
                )
            if (task.sampling.max_tokens or 0) >= (task.context_tokens or self.inference.max_model_len):
                raise ValueError(
                    f"task {task.name}: sampling.max_tokens ({task.sampling.max_tokens}) leaves no room for a prompt"
                )
        if self.heartbeat_timeout_s <= 2 * self.heartbeat_s:
            raise ValueError("heartbeat_timeout_s must be more than twice heartbeat_s")
        if self.model.random and self.inference.max_model_len > self.model.random.max_position_embeddings:
            raise ValueError(
                f"inference.max_model_len ({self.inference.max_model_len}) is beyond "
                f"model.random.max_position_embeddings ({self.model.random.max_position_embeddings})"
            )
        agents = [task.name for task in self.tasks if task.is_agent]
        if not agents and self.endpoint != Endpoint():
            raise ValueError("endpoint does nothing: no task has an agent")
        if agents and self.rollout.schedule is Schedule.SYNC:
            raise ValueError(
                f"rollout.schedule sync takes every turn of all trajectories together, which task {agents[0]} can't: "
                "its agent decides by itself when it calls"
            )
        if self.sampling.max_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"inference.max_model_len ({self.inference.max_model_len})"
            )

        for each in [self.algorithm, *(task.algorithm for task in self.tasks if task.algorithm)]:
            if self.trainer.stream_batch and each.needs_whole_batch:
                raise ValueError(
                    f"trainer.stream_batch can't be with algorithm.advantage: {each.advantage}, which is normalised "
                    "over the whole batch"
                )
            if self.trainer.context_parallel > 1 and each.loss in (Loss.GSPO, Loss.TOPR):
                raise ValueError(
                    f"algorithm.loss: {each.loss} needs the ratio of whole trajectories, which "
                    "trainer.context_parallel divides"
                )
        for task in self.tasks:
            own = task.algorithm
            if own is not None and (own.loss_mean, own.loss_mean_tokens) != (
                self.algorithm.loss_mean,
                self.algorithm.loss_mean_tokens,
            ):
                raise ValueError(
                    f"task {task.name} has algorithm.loss_mean: {own.loss_mean}, but the run has "
                    f"{self.algorithm.loss_mean}: a batch has one mean, so write the run's into the task's section too"
                )
        if all(task.algorithm for task in self.tasks) and self.algorithm.given().keys() - _OF_THE_BATCH:
            raise ValueError(
                "algorithm does nothing where every task has its own: leave only loss_mean and loss_mean_tokens in it"
            )
        if agents and len(agents) == len(self.tasks) and self.environments.warm_groups:
            raise ValueError(
                "environments.warm_groups does nothing: every task has an agent, which resets nothing"
            )
        self._check_split_limits()
        self._check_measured()
        check_routing(
            self.inference.all_pools, self.inference.hw_affinity, self.inference.disaggregation, names
        )
        if self.trainer.minibatches > self.rollout.groups_per_batch:
            raise ValueError(
                f"trainer.minibatches ({self.trainer.minibatches}) must be at most rollout.groups_per_batch "
                f"({self.rollout.groups_per_batch}): a minibatch is a share of the groups"
            )
        places = self.environments.workers * self.environments.max_sessions
        if self.rollout.schedule is Schedule.SYNC and places < self.rollout.most_open_members:
            raise ValueError(
                f"rollout.schedule sync takes every turn together, so all {self.rollout.most_open_members} "
                f"trajectories of a batch need a place: environments.workers × max_sessions is {places}"
            )
        grouped = [task.name for task in self.tasks for reward in task.rewards if reward.scope is Scope.GROUP]
        if self.rollout.schedule is Schedule.SYNC and grouped:
            raise ValueError(
                f"task {grouped[0]}: a reward of scope group waits for the group's members, and rollout.schedule sync "
                "for the reward"
            )
        if self.evaluation.episodes and self.environments.max_sessions < 2:
            raise ValueError(
                "environments.max_sessions (1) leaves no place for evaluations beside training: make it at least 2"
            )
        if self.trainer.warmup_optimizer_steps >= self.optimizer_steps:
            raise ValueError(
                f"trainer.warmup_optimizer_steps ({self.trainer.warmup_optimizer_steps}) must be below the run's "
                f"{self.optimizer_steps} optimiser steps (steps × trainer.minibatches)"
            )

    def _check_split_limits(self) -> None:
        """``ValueError`` where no request could ever be long enough to be split."""
        limits = self.inference.disaggregation
        if limits is None:
            return
        longest = max(self.sampling_of(task).max_tokens for task in self.tasks)
        if limits.min_prompt_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"inference.disaggregation.min_prompt_tokens ({limits.min_prompt_tokens}) is never reached: "
                f"inference.max_model_len is {self.inference.max_model_len}"
            )
        if limits.min_answer_tokens > longest:
            raise ValueError(
                f"inference.disaggregation.min_answer_tokens ({limits.min_answer_tokens}) is never reached: "
                f"sampling.max_tokens is {longest}"
            )

    def _check_measured(self) -> None:
        """``ValueError`` where ``health`` limits a number that this run never has."""
        algorithms = [self.algorithm_of(task.name) for task in self.tasks]
        needs = {
            "kl_reference": ("algorithm.kl_coefficient", any(a.kl_coefficient for a in algorithms)),
            "correction_mean": ("algorithm.correction", any(a.corrects for a in algorithms)),
            "correction_zero_share": ("algorithm.correction", any(a.corrects for a in algorithms)),
            "logprob_gap_mean": ("trainer.verify_share above 0", self.trainer.verify_share > 0),
            "logprob_gap_max": ("trainer.verify_share above 0", self.trainer.verify_share > 0),
        }
        for name, _ in self.health.limits():
            setting, measured = needs.get(name, ("", True))
            if not measured:
                raise ValueError(f"health.{name} does nothing: it is only measured with {setting}")

    def sampling_of(self, task: Task) -> Sampling:
        """``sampling`` with what ``task`` has otherwise."""
        own = {field: getattr(task.sampling, field) for field in task.sampling.__struct_fields__}
        changed = {field: value for field, value in own.items() if value is not None}
        return msgspec.structs.replace(self.sampling, **changed) if changed else self.sampling

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, at most: a batch of few groups makes fewer."""
        return self.steps * self.trainer.minibatches

    def algorithm_of(self, task: str) -> Algorithm:
        """The algorithm that trains on ``task``'s trajectories; ``KeyError`` when there is no such task."""
        return self.task(task).algorithm or self.algorithm

    def task(self, name: str) -> Task:
        """The task of that name; ``KeyError`` when there is none."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(name)
