"""Environments that do to their worker what users' code does, by the option ``how``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rollart.environments import Environment, Turn


class Misbehaving(Environment):
    """One turn, and the worst of it."""

    def __init__(self, how: str = "good", mark: str = "") -> None:
        self.how = how
        self.mark = mark

    def reset(self, seed: int, split: str) -> str:
        if self.how == "dies" and not Path(self.mark).exists():
            Path(self.mark).touch()
            os._exit(7)
        return "go"

    def step(self, action: str) -> Turn:
        return getattr(self, self.how)()

    def good(self) -> Turn:
        return Turn("well", 1.0, True, {"success": 1.0})

    dies = good

    def raises(self) -> Turn:
        raise ValueError("the map has no goal")

    def exits(self) -> Turn:
        sys.exit(3)

    def hangs(self) -> Turn:
        time.sleep(1000)
        return Turn()

    def floods(self) -> Turn:
        try:
            for _ in range(100_000):
                print("x" * 1000)  # noqa: T201
        except Exception:
            pass  # it does not even notice
        return self.good()

    def floods_from_a_process(self) -> Turn:
        subprocess.run(["head", "-c", "300000000", "/dev/zero"], check=True)
        return self.good()

    def returns_nothing(self) -> Any:
        return None

    def returns_megabytes(self) -> Turn:
        return Turn("y" * 50_000_000)

    def forks(self) -> Turn:
        for _ in range(3):
            os.fork()
        return self.good()

    def leaves_children(self) -> Turn:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        subprocess.run("setsid sleep 1000 & setsid sleep 1000 &", shell=True)
        return self.good()


class Patient(Environment):
    """Answers after a while, without a thread."""

    async def reset(self, seed: int, split: str) -> str:  # type: ignore[override]
        return "go"

    async def step(self, action: str) -> Turn:  # type: ignore[override]
        import asyncio

        await asyncio.sleep(0.2)
        return Turn("on", 1.0)
