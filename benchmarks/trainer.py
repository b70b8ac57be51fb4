"""A train_step beside plain ``transformers``: ``python -m benchmarks.trainer [--short] [--json FILE]``.

The same batch, the same weights, the same number of threads, in one process, one after the other: GRPO's loss over
trajectories of which a third of the tokens were sampled.  Lengths are even (all trajectories alike) or ragged (most
short, a few long, as agents' are); padded micro-batches are sorted by length on both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.parts.measure import median_s
from benchmarks.parts.report import Row, figure, heading, write_report
from rollart.config import Config, Model, Sampling, Task
from rollart.config import Trainer as TrainerConfig
from rollart.packing import pack_floats, pack_ids, unpack_ids
from rollart.protocol import TrainGroup, TrainSample, VersionRun, encode_group

FULL: tuple[str, ...] = ()
PACKAGES = ("torch", "megatron-core", "transformers")
SHAPES: dict[str, dict[str, Any]] = {
    "5M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "135M": {  # SmolLM2's
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
GROUPS, MEMBERS = 2, 8
SEQUENCES, PACKED_TOKENS = 4, 2048
EVEN_TOKENS = 384
REPEATS = {"5M": 5, "135M": 2}
LEARNING_RATE = 1e-5


def lengths_of(kind: str, rng: random.Random) -> list[int]:
    """Tokens of each trajectory."""
    count = GROUPS * MEMBERS
    if kind == "even":
        return [EVEN_TOKENS] * count
    return [max(24, min(1500, int(rng.lognormvariate(5.2, 0.9)))) for _ in range(count)]


def batch_of(lengths: Sequence[int], vocabulary: int, rng: random.Random) -> list[TrainGroup]:
    """Groups with trajectories of these lengths: ten tokens seen, five sampled, again and again."""
    samples = []
    for number, length in enumerate(lengths):
        mask = [int(at % 15 >= 10) for at in range(length)]
        sampled = sum(mask)
        samples.append(
            TrainSample(
                number,
                pack_ids(rng.randrange(vocabulary) for _ in range(length)),
                bytes(mask),
                pack_floats([-8.0] * sampled),
                [VersionRun(0, sampled)],
                float(rng.random() < 0.5),
            )
        )
    return [
        TrainGroup(number, "task", samples[number * MEMBERS : (number + 1) * MEMBERS])
        for number in range(GROUPS)
    ]


def ours(folder: Path, groups: Sequence[TrainGroup], threads: int, repeats: int, **layout: Any) -> Row:
    """Seconds of a step of the trainer."""
    from rollart.workers.megatron.core import Trainer

    config = Config(
        name="benchmark",
        steps=100,
        model=Model(path=str(folder)),
        tasks=[Task(name="task", environment="module:Class")],
        sampling=Sampling(),
        trainer=TrainerConfig(learning_rate=LEARNING_RATE, threads=threads, **layout),
    )
    trainer = Trainer(config, folder)
    frames = [encode_group(group) for group in groups]
    metrics: dict[str, float] = {}

    def step() -> None:
        version = trainer.version
        result = trainer.train_step(step_id=version, version=version, verify_share=0.0, frames=frames)
        metrics.update(result.metrics)

    seconds = median_s(step, repeats)
    trainer.close()
    return {"seconds": seconds, "padding_share": metrics["padding_share"]}


def plain(folder: Path, groups: Sequence[TrainGroup], repeats: int) -> Row:
    """Seconds of the same step with ``transformers`` and torch's AdamW."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    items = []
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        items += list(zip(group.samples, advantages.tolist(), strict=True))
    items.sort(key=lambda item: len(item[0].ids))
    parts = [items[low : low + SEQUENCES] for low in range(0, len(items), SEQUENCES)]
    padded = sum(len(part) * len(part[-1][0].mask) for part in parts)
    real = sum(len(sample.mask) for sample, _ in items)
    tokens = sum(sum(sample.mask) for sample, _ in items)

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            torch.autograd.backward(_grpo(model, part) / tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"seconds": median_s(step, repeats), "padding_share": 1 - real / padded}


def _grpo(model: Any, part: Sequence[tuple[TrainSample, float]]) -> torch.Tensor:
    longest = len(part[-1][0].mask)
    ids = torch.zeros(len(part), longest, dtype=torch.int64)
    sampled = torch.zeros(len(part), longest, dtype=torch.bool)
    for row, (sample, _) in enumerate(part):
        ids[row, : len(sample.mask)] = torch.tensor(unpack_ids(sample.ids))
        sampled[row, : len(sample.mask)] = torch.tensor(list(sample.mask), dtype=torch.bool)
    rows = sampled[:, 1:]
    logits = model(ids).logits[:, :-1][rows]
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:][rows][:, None])[:, 0]
    advantages = torch.tensor([advantage for _, advantage in part])[:, None].expand_as(rows)[rows]
    ratio = torch.exp(logprobs + 8.0)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def measure(name: str, kind: str, threads: int) -> Row:
    """One model and one kind of lengths."""
    rng = random.Random(7)
    shape = SHAPES[name]
    lengths = lengths_of(kind, rng)
    groups = batch_of(lengths, shape["vocab_size"], rng)
    with tempfile.TemporaryDirectory(prefix="rollart-benchmark-") as scratch:
        folder = Path(scratch) / "model"
        torch.manual_seed(0)
        config = LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=True)
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        made.save_pretrained(folder)
        del made
        repeats = REPEATS[name]
        found = {
            "padded": ours(folder, groups, threads, repeats, micro_batch_sequences=SEQUENCES),
            "packed": ours(folder, groups, threads, repeats, micro_batch_tokens=PACKED_TOKENS),
            "transformers": plain(folder, groups, repeats),
        }
    row: Row = {"model": name, "lengths": kind, "tokens": sum(lengths), "longest": max(lengths), **found}
    sys.stderr.write(
        f"{name} {kind}: { ({key: round(each['seconds'], 3) for key, each in found.items()}) }\n"
    )
    return row


def tables(report: Row) -> dict[str, str]:
    """Markdown by name, for the docs."""
    columns = ["model", "lengths", "tokens/s padded", "packed", "transformers", "padded ×", "packed ×"]
    lines = [heading([*columns, "padding", "packed"], text=2)]
    for row in report["rows"]:
        rates = {name: row["tokens"] / row[name]["seconds"] for name in ("padded", "packed", "transformers")}
        ratios = [rates[name] / rates["transformers"] for name in ("padded", "packed")]
        lines.append(
            f"| {row['model']} | {row['lengths']} | {' | '.join(figure(rate) for rate in rates.values())} "
            f"| {' | '.join(f'{ratio:.2f}' for ratio in ratios)} "
            f"| {row['padded']['padding_share']:.0%} | {row['packed']['padding_share']:.0%} |"
        )
    return {"step": "\n".join(lines)}


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the smaller model only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    names = ["5M"] if options.short else list(SHAPES)
    rows = [measure(name, kind, threads) for name in names for kind in ("even", "ragged")]
    report = write_report(
        options.json, PACKAGES, form="short" if options.short else "full", threads=threads, rows=rows
    )
    sys.stdout.write(tables(report)["step"] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
