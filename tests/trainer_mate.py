"""``python -m tests.trainer_mate``: the other process of trainers of two, one after the other, as its stdin says.

Starting a process and importing all that a trainer needs takes far longer than what the tests have it do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from rollart.config import Config
from rollart.workers.megatron.group import follow
from rollart.workers.megatron.parallel import Place


class Mate:
    """The process, for the test."""

    def __init__(self) -> None:
        self._over = True
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_mate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )

    def start(self, place: Place, config: Path, model_dir: Path) -> Mate:
        """Have it follow."""
        assert self._process.stdin is not None
        said = [place.rank, str(place.rendezvous), str(config), str(model_dir)]
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        self._over = False
        return self

    def poll(self) -> int | None:
        """Its exit code."""
        return 0 if self._over else self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Until it no longer follows."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "over\n", f"the mate failed: {self._process.wait(30)}"
        self._over = True
        return 0

    def kill(self) -> None:
        """It stays for the next."""

    def close(self) -> None:
        """End it."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def main() -> None:
    """Follow as long as there are lines."""
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        rank, rendezvous, config, model_dir = json.loads(line)
        known = msgspec.msgpack.decode(Path(config).read_bytes(), type=Config)
        follow(known, Path(model_dir), Place(rank, Path(rendezvous)))
        sys.stdout.write("over\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
