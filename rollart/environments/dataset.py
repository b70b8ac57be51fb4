"""Rows of a dataset as a task's instances: which row the n-th instance is, and how files are read.

Instances are numbered from 0 without end.  Training number n is row ``order(epoch)[n mod N]`` of epoch ``n div N``, N
being the rows of the split, so that a source only has to remember one number to go on exactly where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollart.config.tasks import Dataset
from rollart.environments.splits import EVAL_SHARE, share_of
from rollart.errors import ConfigError

__all__ = ["Rows", "load_rows"]

Row = dict[str, Any]


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


class Rows:
    """The rows of a task, by split."""

    def __init__(
        self, splits: Mapping[str, tuple[Table, Sequence[int]]], *, shuffle: bool, seed: int
    ) -> None:
        """``splits`` gives each split's table, and which of its rows it may use."""
        self._splits = splits
        self._shuffle = shuffle
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def count(self, split: str) -> int:
        """Rows of ``split``."""
        return len(self._splits[split][1])

    def row(self, split: str, number: int) -> Row:
        """The row of instance ``number`` of ``split``; evaluations have the file's order."""
        table, chosen = self._splits[split]
        if split == "eval" or not self._shuffle:
            return table[chosen[number % len(chosen)]]
        epoch, at = divmod(number, len(chosen))
        return table[chosen[self._order(epoch)[at]]]

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(self.count("train")))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            while len(self._orders) > 1:  # groups of two epochs may be under way
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order


def load_rows(where: str, dataset: Dataset, seed: int) -> Rows:
    """The rows that ``dataset`` names; ``ConfigError`` that begins with ``where`` when there are none to use."""
    table = _table(where, dataset.path)
    everything = range(len(table))
    if dataset.eval_path is not None:
        held_out = _table(where, dataset.eval_path)
        splits: dict[str, tuple[Table, Sequence[int]]] = {
            "train": (table, everything),
            "eval": (held_out, range(len(held_out))),
        }
    else:
        share = dataset.eval_share or EVAL_SHARE
        is_eval = [share_of(json.dumps(table[i], sort_keys=True, default=str)) < share for i in everything]
        splits = {
            split: (table, [i for i in everything if is_eval[i] == (split == "eval")])
            for split in ("train", "eval")
        }
    for split, (_, chosen) in splits.items():
        if not chosen:
            raise ConfigError(f"{where}: dataset {dataset.path} has no rows for the {split} split")
    return Rows(splits, shuffle=dataset.shuffle, seed=seed)


def _table(where: str, name: str) -> Table:
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"{where}: there is no dataset {path}")
    try:
        if path.is_dir():
            return _Arrow(_open_folder(path))
        if path.suffix in (".jsonl", ".ndjson"):
            return _JsonLines(path)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return _Arrow(pyarrow.parquet.read_table(path, memory_map=True))
    except ImportError:
        raise ConfigError(
            f"{where}: reading {path} needs the package pyarrow, which is not installed"
        ) from None
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ConfigError(f"{where}: can't read the dataset {path}: {error}") from None
    raise ConfigError(
        f"{where}: dataset {path} is no .jsonl file, no .parquet file and no folder that datasets saved"
    )


class _JsonLines:
    """Lines of a file; only where each begins is kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[int] = []
        with path.open("rb") as file:
            at = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._check(line, number)
                    self._starts.append(at)
                at += len(line)

    def _check(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no JSON object")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            row: Row = json.loads(file.readline())
        return row


class _Arrow:
    """An Arrow table, mapped into memory where its file allows it."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        row: Row = self._table.slice(number, 1).to_pylist()[0]
        return row


def _open_folder(folder: Path) -> Any:
    """What ``Dataset.save_to_disk`` wrote: ``state.json`` names files in Arrow's stream format."""
    import pyarrow

    state = folder / "state.json"
    if not state.is_file():
        splits = [each.name for each in folder.iterdir() if (each / "state.json").is_file()]
        hint = f"; name one of its splits: {', '.join(sorted(splits))}" if splits else ""
        raise ValueError(f"it has no state.json, which datasets' save_to_disk writes{hint}")
    said = json.loads(state.read_text(encoding="utf-8"))
    if said.get("_indices_data_files"):
        raise ValueError("it was saved with an indices mapping: flatten_indices() before save_to_disk()")
    tables = [
        pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / each["filename"]))).read_all()
        for each in said["_data_files"]
    ]
    return pyarrow.concat_tables(tables)
