"""Adapters, each against the real package.

Gymnasium and its parts are in requirements/dev.lock.  The others are larger or clash with the lock: their tests run
where the package is importable, as ``make adapters`` has it, and are told as skipped elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import types
from typing import Any

import pytest

from rollart.environments import Turn, Unavailable


def test_gymnasium_by_names_and_by_numbers() -> None:
    from rollart.environments.adapters.gymnasium import Gymnasium

    lake = Gymnasium(
        "FrozenLake-v1", {"is_slippery": False}, ["left", "down", "right", "up"], introduction="Go.\n"
    )
    assert lake.reset(0, "train") == "Go.\n0\n"
    assert lake.step("jump").text == "An action is one of left, down, right, up.\n"
    for action in ("down", "down", "right", "down", "right"):
        assert not lake.step(action).done
    turn = lake.step("right")
    assert turn.reward == 1.0 and turn.done and turn.text == "15\n"
    lake.close()
    drawn = Gymnasium("FrozenLake-v1", render=True)
    assert "FHFH" in drawn.reset(0, "eval")
    assert drawn.step("7").text == "An action is a number from 0 to 3.\n"
    with pytest.raises(ValueError, match="actions names 1 actions"):
        Gymnasium("FrozenLake-v1", actions=["left"])
    pendulum = Gymnasium("Pendulum-v1")
    first = pendulum.reset(1, "train")
    assert len(first.split()) == 3 and first == pendulum.reset(1, "train") != pendulum.reset(1, "eval")
    assert pendulum.step("left").text == "An action is 1 numbers.\n"
    assert pendulum.step("0.5").reward < 0


def test_reasoning_gym_scores_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    from rollart.environments.adapters.reasoning_gym import ReasoningGym

    task = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 3})
    asked = {split: {task.reset(seed, split) for seed in range(60)} for split in ("train", "eval")}
    assert not asked["train"] & asked["eval"] and task.reset(5, "train") == task.reset(5, "train")
    right = task._entry["answer"]
    assert task.step(f"<answer>{right}</answer>") == Turn(reward=1.0, done=True, info={"success": 1.0})
    assert task.step("It is <answer>x</answer>").reward < 1


def test_textworld_is_won_by_its_walkthrough() -> None:
    pytest.importorskip("textworld")
    from rollart.environments.adapters.textworld import TextWorld

    game = TextWorld({"nb_rooms": 2, "nb_objects": 4})
    try:
        first = game.reset(3, "train")
        assert first.endswith("> ") and "$$" not in first
        turns = [game.step(command) for command in game.walkthrough]
        assert sum(turn.reward for turn in turns) == pytest.approx(1.0)
        assert turns[-1].done and turns[-1].info == {"success": 1.0}
    finally:
        game.close()
    assert game._folder is not None and not game._folder.exists()
    with pytest.raises(ValueError, match="has no 'rooms'"):
        TextWorld({"rooms": 2})


async def test_verifiers_drives_its_own_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    import verifiers as vf  # type: ignore[import-not-found]
    from datasets import Dataset  # type: ignore[import-not-found]

    from rollart.environments.adapters.verifiers import Verifiers

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": f"turn {len(state['trajectory'])}, go on"}]

    def right(completion: Any, answer: str, **_: Any) -> float:
        return float(answer in str(completion[-1]["content"]))

    def load_environment(turns: int) -> Any:
        rows = [{"question": f"say {i}", "answer": str(i)} for i in range(3)]
        data = Dataset.from_list(rows)
        return Guess(dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=turns)

    module = types.ModuleType("guess_env")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guess_env", module)
    task = Verifiers("guess-env", {"turns": 2})
    (first,) = await task.reset(4, "train")
    assert first["role"] == "user" and first["content"] == "say 1"
    turn = await task.step("not yet")
    assert [message["content"] for message in turn.messages] == ["turn 1, go on"] and not turn.done
    turn = await task.step("1")
    assert turn.done and turn.reward == 1.0 and turn.info["success"] == 1.0 and turn.info["num_turns"] == 2
    await task.close()
    left = Verifiers("guess-env", {"turns": 2})
    await left.reset(0, "eval")
    await left.close()
    assert left._rollout is not None and left._rollout.cancelled()


async def test_openenv_speaks_to_a_server() -> None:
    pytest.importorskip("openenv.core.env_server", exc_type=ImportError)
    import uvicorn
    from openenv.core.env_server import create_fastapi_app  # type: ignore[import-not-found]
    from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
    from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

    from rollart.environments.adapters.openenv import OpenEnv

    class Say(Action):  # type: ignore[misc]
        message: str

    class Heard(Observation):  # type: ignore[misc]
        text: str = ""

    class Echo(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
            return Heard(text=f"seed {seed}", done=False, reward=0.0)

        def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
            return Heard(text=action.message, done=action.message == "stop", reward=0.5)

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.05)
    try:
        task = OpenEnv(f"http://127.0.0.1:{port}", observation="text")
        assert await task.reset(3, "eval") == "seed 7\n"
        assert await task.step("hello") == Turn("hello\n", 0.5, False)
        assert await task.step("stop") == Turn("stop\n", 0.5, True)
        await task.close()
    finally:
        server.should_exit = True
        thread.join(10)
    with pytest.raises(Unavailable, match="can't be used"):
        await OpenEnv(f"http://127.0.0.1:{port}").reset(0, "train")
