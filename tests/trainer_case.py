"""Tiny models, batches with true log-probabilities, and GRPO written out in plain torch, to test the trainer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollart.config import Algorithm, Config, Model, Rollout, Sampling, Task
from rollart.config import Trainer as TrainerConfig
from rollart.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from rollart.protocol import TrainGroup, TrainSample, VersionRun, encode_group

VOCABULARY = 48
ALLOWED = [5, 7, 11, 30]
TEMPERATURE = 0.8
KINDS = ("qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe", "mixtral")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def shape_of(kind: str) -> PreTrainedConfig:
    """The config of a tiny model of that kind."""
    match kind:
        case "qwen3":
            return Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False)
        case "qwen3-tied":
            return Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**SHAPE, tie_word_embeddings=False)
        case "llama":
            return LlamaConfig(**SHAPE, tie_word_embeddings=False)
        case "qwen3-moe":
            return Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=24)
        case "mixtral":
            return MixtralConfig(
                **SHAPE, num_experts_per_tok=2, num_local_experts=4, tie_word_embeddings=False
            )
    raise ValueError(kind)


def write_model(folder: Path, kind: str) -> Path:
    """A Hugging Face folder whose weights all matter, norms and biases too."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        shape_of(kind), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    return folder


def reference_model(folder: Path) -> Any:
    """The folder's model in ``transformers``, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def make_config(
    *,
    trainer: TrainerConfig | None = None,
    algorithm: Algorithm | None = None,
    rollout: Rollout | None = None,
    sampling: Sampling | None = None,
) -> Config:
    """A run's config with what the trainer reads."""
    return Config(
        name="test",
        steps=100,
        model=Model(path="given by the welcome"),
        tasks=[Task(name="task", environment="module:Class")],
        sampling=sampling or Sampling(temperature=TEMPERATURE, allowed_token_ids=list(ALLOWED)),
        trainer=trainer or TrainerConfig(learning_rate=1e-3, micro_batch_sequences=3),
        algorithm=algorithm or Algorithm(),
        rollout=rollout or Rollout(staleness_bound=1),
    )


def distribution(model: Any, ids: Sequence[int], config: Config) -> Tensor:
    """Log-probabilities [T, vocabulary] of the token that follows each of ``ids``, as the engine samples it."""
    logits = model(torch.tensor([list(ids)])).logits[0].float() / config.sampling.temperature
    allowed = [int(each) for each in config.sampling.allowed_token_ids] or list(range(VOCABULARY))
    masked = torch.full_like(logits, -math.inf)
    masked[:, allowed] = logits[:, allowed]
    return masked.log_softmax(-1)


def make_groups(
    model: Any,
    config: Config,
    *,
    version: int = 0,
    seed: int = 0,
    groups: int = 3,
    size: int = 4,
    noise: float = 0.0,
) -> list[TrainGroup]:
    """Ragged trajectories with the model's own log-probabilities, moved by up to ``noise`` nats."""
    rng = random.Random(seed)
    return [
        TrainGroup(
            number,
            "task",
            [
                _sample(
                    model,
                    config,
                    rng,
                    number * size + member,
                    version,
                    noise,
                    float(member % 2 == rng.randrange(2)),
                )
                for member in range(size)
            ],
        )
        for number in range(groups)
    ]


def _sample(
    model: Any, config: Config, rng: random.Random, number: int, version: int, noise: float, reward: float
) -> TrainSample:
    ids: list[int] = []
    mask: list[int] = []
    for _ in range(rng.randint(1, 4)):
        seen = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        acted = [rng.choice(ALLOWED) for _ in range(rng.randint(1, 2))]
        ids += seen + acted
        mask += [0] * len(seen) + [1] * len(acted)
    with torch.no_grad():
        known = distribution(model, ids, config)
    sampled = [place for place, mark in enumerate(mask) if mark]
    logprobs = [min(0.0, known[at - 1, ids[at]].item() + rng.uniform(-noise, noise)) for at in sampled]
    return TrainSample(
        number,
        pack_ids(ids),
        bytes(mask),
        pack_floats(logprobs),
        [VersionRun(version, len(sampled))],
        reward,
    )


def frames_of(groups: Sequence[TrainGroup]) -> list[bytes]:
    """As they are on the wire."""
    return [encode_group(group) for group in groups]


def replaced(group: TrainGroup, member: int, **changes: Any) -> TrainGroup:
    """``group`` with one sample changed."""
    samples = list(group.samples)
    samples[member] = msgspec.structs.replace(samples[member], **changes)
    return msgspec.structs.replace(group, samples=samples)


def grpo_loss(model: Any, groups: Sequence[TrainGroup], config: Config) -> Tensor:
    """The loss of one optimiser step, a trajectory and a token at a time."""
    algorithm = config.algorithm
    total, count = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.samples])
        advantages = rewards - rewards.mean()
        if algorithm.divides_by_std:
            advantages = advantages / (rewards.std() + 1e-4)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            ids = unpack_ids(sample.ids)
            known = distribution(model, ids, config)
            behaviour = iter(unpack_floats(sample.logprobs))
            for at, mark in enumerate(sample.mask):
                if not mark:
                    continue
                row = known[at - 1]
                ratio = torch.exp(row[ids[at]] - next(behaviour))
                low, high = algorithm.clip
                bounded = torch.clamp(ratio, 1 - low, 1 + high)
                possible = row[row > -math.inf]
                entropy = -(possible.exp() * possible).sum()
                total = total - torch.minimum(ratio * advantage, bounded * advantage)
                total = total - algorithm.entropy_coefficient * entropy
                count += 1
    return total / count


def grpo_steps(
    model: Any, parts: Sequence[Sequence[TrainGroup]], config: Config
) -> tuple[list[float], list[float]]:
    """Train ``model`` with torch's AdamW, a step a part; the losses and gradient norms."""
    options = config.trainer
    parameters: list[dict[str, Any]] = [
        {"params": [each for each in model.parameters() if each.dim() > 1]},
        {"params": [each for each in model.parameters() if each.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
    )
    losses, norms = [], []
    for number, part in enumerate(parts, start=1):
        for each in optimizer.param_groups:
            each["lr"] = options.learning_rate * min(1.0, number / max(options.warmup_optimizer_steps, 1))
        optimizer.zero_grad()
        loss = grpo_loss(model, part, config)
        torch.autograd.backward(loss)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms
