"""The figure of a run's success: ``python -m benchmarks.success_curve RUN_FOLDER FIGURE.svg``.

Draws the batches' success rate (sampled, on training tasks), its mean over the last 20 train_steps, and the
held-out score (greedy), from ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.parts.report import metrics_of

WINDOW = 20


def rolling(values: list[float]) -> list[float]:
    """Means over the last ``WINDOW`` values."""
    return [
        sum(part) / len(part) for part in (values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values)))
    ]


def evaluations(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(train_steps done, held-out success) for each evaluation."""
    points = [(0, rows[0]["eval_success_before"])] if "eval_success_before" in rows[0] else []
    return points + [(row["eval_version"], row["eval_success"]) for row in rows if "eval_success" in row]


def draw(rows: list[dict[str, Any]], figure: Path) -> None:
    """Write the figure; its format is that of the file's ending."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    steps = [row["step"] + 1 for row in rows]
    success = [row["success_rate"] for row in rows]
    plot, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    axes.plot(steps, success, color="0.8", linewidth=0.8, label="a batch")
    axes.plot(steps, rolling(success), color="C0", linewidth=2, label=f"mean of the last {WINDOW} batches")
    held_out = evaluations(rows)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="C3", linewidth=1, label="held-out maps, greedy")
    axes.set(xlabel="train_step", ylabel="success", ylim=(0, 1.02), xlim=(0, steps[-1]))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(figure, metadata={"Date": None} if figure.suffix == ".svg" else None)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.success_curve", description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("figure", type=Path, help="the file to write, .svg or .png")
    options = parser.parse_args()
    rows = metrics_of(options.run)
    draw(rows, options.figure)
    last = rolling([row["success_rate"] for row in rows])[-1]
    minutes = rows[-1]["time"] / 60
    print(f"{len(rows)} train_steps in {minutes:.1f} min; success {last:.2f} over the last {WINDOW}")
    for step, value in evaluations(rows):
        print(f"held-out success after {step} train_steps: {value:.2f}")


if __name__ == "__main__":
    main()
