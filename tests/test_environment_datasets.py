"""Datasets as instances: every format gives the same rows, each epoch has each row once, and no row is in both splits.

``data/datasets/saved`` was written by ``Dataset.save_to_disk`` of Hugging Face's datasets 4.6.1, in two shards.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rollart.config import RandomModel, Task
from rollart.config.tasks import Dataset
from rollart.environments import Environment, Turn
from rollart.environments.dataset import load_rows
from rollart.environments.loading import load_task
from rollart.errors import ConfigError
from rollart.protocol import Observation
from rollart.random_model import write_model_folder
from tests.test_environments import ask, reset, step, text_of, worker_of

ROWS = [{"question": f"What is {i} + {i}?", "answer": 2 * i} for i in range(20)]
SAVED = Path(__file__).parent / "data" / "datasets" / "saved"


class Quiz(Environment):
    """Asks what a row asks."""

    def reset(self, seed: int, split: str, row: dict[str, object]) -> str:  # type: ignore[override]
        self.row = row
        return f"{row['question']} "

    def step(self, action: str) -> Turn:
        return Turn(reward=float(action == str(self.row["answer"])), done=True)


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "saved":
        return SAVED
    if request.param == "jsonl":
        file = tmp_path / "rows.jsonl"
        file.write_text("\n\n".join(json.dumps(row) for row in ROWS))
        return file
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file


def test_epochs_loop_over_each_row_once_in_an_order_of_their_own(path: Path) -> None:
    rows = load_rows("task t", Dataset(path=str(path), eval_share=0.3), 7)
    count, held_out = rows.count("train"), rows.count("eval")
    assert count + held_out == 20 and held_out >= 2
    epochs = [[str(rows.row("train", e * count + i)) for i in range(count)] for e in range(3)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs) and len(set(epochs[0])) == count
    assert epochs[0] != epochs[1] != epochs[2]
    evaluated = {str(rows.row("eval", i)) for i in range(2 * held_out)}
    assert len(evaluated) == held_out and not evaluated & set(epochs[0])
    again = load_rows("task t", Dataset(path=str(path), eval_share=0.3), 7)
    assert [str(again.row("train", count + i)) for i in range(count)] == epochs[1], "from its number alone"
    assert rows.row("train", 0) in ROWS


def test_a_file_of_its_own_for_evaluations_and_no_shuffling(tmp_path: Path) -> None:
    for name, part in (("train", ROWS[:15]), ("eval", ROWS[15:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    dataset = Dataset(
        path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "eval.jsonl"), shuffle=False
    )
    rows = load_rows("task t", dataset, 0)
    assert [rows.row("train", i) for i in range(30)] == ROWS[:15] * 2
    assert [rows.row("eval", i) for i in range(5)] == ROWS[15:]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", None, "there is no dataset"),
        ("rows.csv", "a,b", r"no \.jsonl file, no \.parquet file"),
        ("rows.jsonl", '{"a": 1}\n[2]\n', "line 2 is no JSON object"),
        ("rows.jsonl", "{", "line 1 is no JSON"),
        ("rows.jsonl", "", "no rows for the train split"),
        ("rows.parquet", "PAR", "can't read the dataset"),
    ],
)
def test_a_dataset_that_can_not_be_read_is_one_line(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_rows("task t", Dataset(path=str(file)), 0)
    assert str(caught.value).startswith("task t: ") and "\n" not in str(caught.value)


def test_a_dataset_and_its_environment_must_fit() -> None:
    quiz, other = f"{__name__}:Quiz", "rollart.environments.letters:Letters"
    with pytest.raises(ConfigError, match=r"Letters\.reset has no parameter row"):
        load_task(Task(name="t", environment=other, dataset=Dataset(path=str(SAVED))), 0)
    with pytest.raises(ConfigError, match="wants a row, but the task names no dataset"):
        load_task(Task(name="t", environment=quiz), 0)


async def test_a_worker_plays_rows(tmp_path: Path) -> None:
    import msgspec

    write_model_folder(RandomModel(), tmp_path)
    async with worker_of(tmp_path, ("rollart.environments.letters:Letters", {})) as worker:
        task = Task(name="t0", environment=f"{__name__}:Quiz", dataset=Dataset(path=str(SAVED)))
        worker.config = msgspec.structs.replace(worker.config, tasks=[task])
        await worker.teardown()
        await worker.setup()
        expected = load_rows("t", Dataset(path=str(SAVED)), 0)
        for number in (0, 5, 100):
            row = expected.row("train", number)
            assert text_of(await ask(worker, reset(str(number), seed=number))) == f"{row['question']} "
            answer = await ask(worker, step(str(row["answer"]), str(number)))
            assert answer == Observation(2, b"", 1.0, True, {})
