"""Calibration: the latency models of one real run, as a file that people can read, and the simulation they make.

The machine is the run's: engines, trainer and controller share its CPU cores (``Host``).  An engine's step costs
seconds, seconds a sequence and seconds a token of prompt; a train_step costs seconds and seconds a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rollart.config import Config, DType
from rollart.errors import ConfigError
from rollart.launch.local import Placement
from rollart.protocol import Role
from rollart.simulation.engine import BatchingEngine
from rollart.simulation.fitting import Measured, Sample, trained_tokens
from rollart.simulation.hardware import GIB, ModelShape, dense_model
from rollart.simulation.host import Sharing
from rollart.simulation.run import Setup
from rollart.simulation.workload import Distribution, Family
from rollart.simulation.world import Timings

__all__ = ["Calibration", "MeasuredCosts", "calibrated_setup", "load_calibration", "shape_of"]

FORMAT = "RollArt calibration 1"
CPU_CACHE_GIB = 1.0
"""KV cache of an engine on CPU, unless the config says otherwise."""
TOKEN_BUDGET = 2048
"""Of a step: vLLM's default for an engine that isn't its own server, as an inference worker starts it."""
MAX_STEPS = 8
"""Of an engine at once: how long it may go on at a rate that the host no longer has."""


class TaskModel(msgspec.Struct, frozen=True, kw_only=True):
    """What episodes of one task were like.  Seconds and tokens; times are the environments' own."""

    turns: Sample
    turns_shared: Measured
    """Share of the episodes that take their group's number of turns."""
    max_turns: int
    """Of the run's config, which cut them."""
    first_observation_tokens: Sample
    later_observation_tokens: Sample
    answer_tokens: Sample
    reset_s: Sample
    step_s: Sample
    score_s: Sample
    reset_failures: Measured
    """Share."""
    step_failures: Measured
    reward: Measured
    """Of a trajectory, on average over all tasks: a run's metrics don't have it by task."""
    success: Measured
    """As the reward."""


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an engine's step, on cores of its own: ``step_s`` + ``sequence_s`` × sequences that sample a token
    + ``prompt_token_s`` × tokens of prompt that are computed."""

    step_s: Measured
    sequence_s: Measured
    prompt_token_s: Measured
    relative_error: float
    """Of one request's latency by this model: the root mean square."""
    prefix_hit_share: Measured
    """Of the tokens that an earlier turn of the same trajectory had computed: those found in the cache."""
    kv_tokens: int
    """Capacity, from the config."""


class TrainerModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a train_step, on cores of its own: ``step_s`` + ``token_s`` × tokens, prompts, the padding of
    micro-batches and a third of what is only read for verification included."""

    step_s: Measured
    token_s: Measured
    relative_error: float


class WeightModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each part of handing weights to an engine."""

    publish_s: Measured
    pull_s: Measured
    suspend_s: Measured
    update_s: Measured
    resume_s: Measured


class MachineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Who shared what."""

    cores: int
    processes: dict[str, int]
    """Of each kind, those that compute: they shared the cores."""
    engine_threads: int
    trainer_threads: int
    message_s: Measured
    """Of a core, for one message to or from the controller."""
    hop_s: Measured
    """Of no core, for one message to or from an environment: until whom it is for gets a core's attention."""
    start_s: dict[str, Measured]
    """By role, from the run's beginning to a worker's readiness."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The run itself, predicted by its own calibration: what is left of the error after fitting."""

    measured_step_s: Measured
    predicted_step_s: float
    rounds: int
    """Of simulating the run and correcting the models by what came out."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    format: str = FORMAT
    run: str
    """Its name."""
    steps: int
    tasks: dict[str, TaskModel]
    engine: EngineModel
    trainer: TrainerModel
    weights: WeightModel
    machine: MachineModel
    check: Check | None = None

    def save(self, path: Path) -> None:
        """Write the file; ``ConfigError`` when that can't be."""
        text = json.dumps(msgspec.to_builtins(self), indent=1)
        try:
            path.write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror}") from None


def load_calibration(path: Path) -> Calibration:
    """The calibration in ``path``; ``ConfigError`` when it is none."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"can't read the calibration {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no calibration: {error}") from None
    if found.format != FORMAT:
        raise ConfigError(f"{path} has the format {found.format!r}, not {FORMAT!r}")
    return found


def shape_of(config: Config) -> ModelShape:
    """The model's shape; ``ConfigError`` when its folder doesn't say."""
    model, size = config.model, 4.0 if config.inference.dtype is DType.FLOAT32 else 2.0
    if model.random is not None:
        shape: Mapping[str, object] = msgspec.to_builtins(model.random)
        vocabulary = len(model.random.characters) if model.random.characters else 128
        name = "random"
    else:
        path = Path(str(model.path)) / "config.json"
        try:
            shape = json.loads(path.read_text())
            vocabulary = int(str(shape["vocab_size"]))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.path: {path} doesn't give the model's shape: {error!r}") from None
        name = Path(str(model.path)).name

    def number(key: str, default: int | None = None) -> int:
        value = shape.get(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"model: the shape of {name} lacks {key}")
        return value

    heads = number("num_attention_heads")
    return dense_model(
        name,
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        ffn=number("intermediate_size"),
        attention_heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // heads),
        vocabulary=vocabulary,
        max_context=number("max_position_embeddings"),
        tied=bool(shape.get("tie_word_embeddings", False)),
        element_bytes=size,
    )


def kv_tokens_of(config: Config) -> int:
    """Tokens of KV cache that an engine of ``config`` has: what it sets aside on a CPU; at least a request's."""
    gib = config.inference.kv_cache_gib or CPU_CACHE_GIB
    return max(config.inference.max_model_len, int(gib * GIB / shape_of(config).kv_bytes_per_token))


class MeasuredCosts:
    """Of an engine's step, by an ``EngineModel``."""

    def __init__(self, model: EngineModel) -> None:
        self.kv_capacity = model.kv_tokens
        self._fixed_s = model.step_s.value
        self._sequence_s = model.sequence_s.value
        self._token_s = model.prompt_token_s.value

    def step_s(
        self,
        prefill_tokens: float,
        prefill_context: float,
        decodes: float,
        decode_context_tokens: float,
        *,
        prefill_pairs: float | None = None,
        samples: float | None = None,
    ) -> float:
        """As of ``StepCosts``; contexts cost nothing."""
        sampled = decodes if samples is None else samples
        return max(1e-6, self._fixed_s + self._sequence_s * sampled + self._token_s * prefill_tokens)


class _Uncached(BatchingEngine):
    """Finds nothing in its cache: as an engine whose blocks are longer than a turn."""

    def submit(self, now: float, id: int, key: str, prompt_tokens: int, new_tokens: int) -> None:
        """As of ``BatchingEngine``."""
        super().submit(now, id, f"{key}.{id}", prompt_tokens, new_tokens)


def train_step_s(
    calibration: Calibration,
    config: Config,
    replicas: int,
    lengths: Sequence[int],
    scored: Sequence[int] = (),
) -> float:
    """Seconds of a train_step, as of ``StepTime``, divided among ``replicas`` trainers."""
    trainer, tokens = (
        calibration.trainer,
        trained_tokens(lengths, scored, config.trainer.sequences),
    )
    return max(1e-6, trainer.step_s.value + trainer.token_s.value * tokens / replicas)


def calibrated_setup(
    calibration: Calibration,
    config: Config,
    *,
    replicas: int = 1,
    slower: Mapping[str, float] | None = None,
    cores: int | None = None,
) -> Setup:
    """The simulation of ``config`` on the calibrated machine; ``ConfigError`` when the two don't fit together.

    Args:
        calibration: of a run on that machine.
        config: of the run to simulate.
        replicas: trainers that divide a batch; each is as fast as the calibrated one.
        slower: seconds by task that a reset and a step of its environment take beyond what was measured.
        cores: of the machine, if not as many as when it was calibrated.
    """
    unknown = [task.name for task in config.tasks if task.name not in calibration.tasks]
    if unknown:
        raise ConfigError(
            f"the calibration is of a run of {', '.join(calibration.tasks)}: it says nothing of task {unknown[0]!r}"
        )
    machine, weights, engine_model = calibration.machine, calibration.weights, calibration.engine
    costs, hop_s = MeasuredCosts(engine_model), machine.hop_s.value
    seats = config.inference.max_num_seqs
    kind = BatchingEngine if engine_model.prefix_hit_share.value >= 0.5 else _Uncached

    def engine(placement: Placement) -> BatchingEngine:
        return kind(costs, max_requests=seats, token_budget=max(TOKEN_BUDGET, seats), max_steps=MAX_STEPS)

    return Setup(
        config=config,
        families={
            task.name: _family(calibration.tasks[task.name], (slower or {}).get(task.name, 0.0))
            for task in config.tasks
        },
        timings=Timings(
            start_s=machine.start_s["inference"].value if "inference" in machine.start_s else 1.0,
            publish_s=weights.publish_s.value,
            pull_s=weights.pull_s.value,
            # Suspending is part of the engine's own model: it waits for the step that runs.
            load_s=weights.update_s.value + weights.resume_s.value,
            save_s=0.0,
        ),
        engine=engine,
        step_s=partial(train_step_s, calibration, config, replicas),
        delay=lambda worker, size: hop_s if worker.startswith(Role.ENVIRONMENT) else 0.0,
        sharing=Sharing(
            cores=cores or machine.cores,
            engine_threads=config.inference.threads,
            trainer_threads=config.trainer.threads * replicas,
            message_s=machine.message_s.value,
        ),
        environment_threads=config.environments.threads,
    )


def _family(task: TaskModel, slower_s: float) -> Family:
    return Family(
        turns=task.turns.distribution(),
        turns_shared=task.turns_shared.value,
        prompt_tokens=task.first_observation_tokens.distribution(),
        observation_tokens=task.later_observation_tokens.distribution(),
        answer_tokens=task.answer_tokens.distribution(),
        reset_s=_later(task.reset_s, slower_s),
        step_s=_later(task.step_s, slower_s),
        reward_s=task.score_s.distribution(),
        reset_failure=task.reset_failures.value,
        step_failure=task.step_failures.value,
        success=min(1.0, max(0.0, task.success.value)),
    )


def _later(sample: Sample, seconds: float) -> Distribution:
    shifted = [value + seconds for value in sample.quantiles]
    return msgspec.structs.replace(sample, quantiles=shifted).distribution()
