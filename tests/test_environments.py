"""Environments and their worker: what a user's code may do, and what its failures may not."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollart.config import Config, RandomModel
from rollart.controller.configuration import load_config
from rollart.controller.preflight import check_environments
from rollart.environments import Environment, Turn, Unavailable
from rollart.environments.frozen_lake import MOVES, FrozenLake, solvable
from rollart.environments.letters import Letters
from rollart.environments.rendering import PlainRenderer
from rollart.environments.splits import split_of
from rollart.environments.threads import Threads
from rollart.errors import ConfigError
from rollart.packing import pack_ids, unpack_ids
from rollart.peer import Peer
from rollart.protocol import Close, Failure, FailureKind, Message, Observation, Reset, Step, Welcome
from rollart.random_model import random_vocabulary, write_model_folder
from rollart.workers.dialer import ZmqDialer
from rollart.workers.environment import EnvironmentWorker
from rollart.workers.worker import Deterministic

EXAMPLES = Path(__file__).parent.parent / "examples"
VOCABULARY = random_vocabulary(RandomModel())


def ids_of(text: str) -> bytes:
    return pack_ids(VOCABULARY[character] for character in text)


def text_of(observation: Message | None) -> str:
    assert isinstance(observation, Observation), observation
    names = {id: token for token, id in VOCABULARY.items()}
    return "".join(names[id] for id in unpack_ids(observation.ids))


# --- FrozenLake -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 8])
def test_maps_can_be_crossed_and_show_all_but_what_the_player_covers(size: int) -> None:
    for seed in range(50):
        lake = FrozenLake(size=size)
        seen = lake.reset(seed, "train")
        assert len(seen) == size * size
        assert seen == "P" + lake.cells[1:] and lake.cells[0] == "S" and lake.cells[-1] == "G"
        assert solvable(lake.cells, size)


@pytest.mark.parametrize("size", [3, 4])
def test_training_and_evaluation_share_no_map(size: int) -> None:
    maps = {
        split: {FrozenLake(size=size).reset(seed, split) for seed in range(500)}
        for split in ("train", "eval")
    }
    assert not maps["train"] & maps["eval"]
    assert all(split_of("S" + cells[1:]) == split for split, found in maps.items() for cells in found)
    assert len(maps["eval"]) >= 8


def test_a_split_is_the_same_on_every_machine() -> None:
    assert [i for i in range(30) if split_of(f"map {i}") == "eval"] == [
        3,
        4,
        5,
        10,
        11,
        13,
        22,
        24,
        25,
        27,
        28,
    ]


def test_equal_seeds_give_equal_episodes() -> None:
    def episode(seed: int) -> list[Turn | str]:
        lake = FrozenLake(size=4, slippery=True)
        return [lake.reset(seed, "train"), *(lake.step(action) for action in "RDRDLU")]

    assert episode(7) == episode(7)
    assert len({str(episode(seed)) for seed in range(20)}) > 10


def test_moves_walls_goal_and_invalid_actions() -> None:
    lake = FrozenLake(size=3, hole_probability=0)
    lake.reset(0, split_of("SFFFFFFFG"))
    assert lake.step("R") == Turn("SPFFFFFFG")
    assert lake.step("U") == Turn("SPFFFFFFG"), "a wall"
    assert lake.step("X") == lake.step("RR") == lake.step("") == lake.step("r") == Turn("SPFFFFFFG")
    assert lake.step("L") == Turn("PFFFFFFFG")
    for action in "DDR":
        assert lake.step(action).reward == 0
    assert lake.step("R") == Turn("SFFFFFFFP", reward=1.0, done=True, info={"success": 1.0})


def test_a_hole_ends_the_episode_without_reward() -> None:
    for seed in range(100):
        lake = FrozenLake(size=3)
        if lake.reset(seed, "train")[1] == "H":
            assert lake.step("R") == Turn("SP" + lake.cells[2:], done=True, info={"success": 0.0})
            return
    raise AssertionError("no map with a hole beside the start")


def test_slipping_goes_to_either_side_but_never_back() -> None:
    reached = set()
    for seed in range(60):
        lake = FrozenLake(size=3, hole_probability=0, slippery=True)
        lake.reset(seed, split_of("SFFFFFFFG"))
        lake.player = 4
        lake.step("R")
        reached.add(lake.player)
    assert reached == {1, 5, 7}


@pytest.mark.parametrize("options", [{"size": 1}, {"hole_probability": 1.0}, {"hole_probability": -0.1}])
def test_impossible_lakes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FrozenLake(**options)


def test_a_split_without_maps_is_an_error_and_no_endless_search() -> None:
    empty = {"train": "eval", "eval": "train"}[split_of("SFFFFFFFG")]
    with pytest.raises(ValueError, match=f"no instance of the {empty} split"):
        FrozenLake(size=3, hole_probability=0).reset(0, empty)
    with pytest.raises(ValueError, match="split is 'test'"):
        FrozenLake().reset(0, "test")


def best_blind_success(options: dict[str, Any], turns: int, seeds: range) -> float:
    """The best success on the evaluation maps of one fixed sequence of actions, found by trying them all."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts[FrozenLake(**options).reset(seed, "eval")] += 1
    lakes = [FrozenLake(**options) for _ in counts]
    for lake, cells in zip(lakes, counts, strict=True):
        lake.cells = cells
    weight = dict(zip(lakes, counts.values(), strict=True))

    @cache
    def best(alive: tuple[tuple[FrozenLake, int], ...], left: int) -> int:
        if not alive or not left:
            return 0
        found = 0
        for action in MOVES:
            won, going = 0, []
            for lake, player in alive:
                lake.player = player
                turn = lake.step(action)
                won += weight[lake] if turn.reward else 0
                if not turn.done:
                    going.append((lake, lake.player))
            found = max(found, won + best(tuple(going), left - 1))
        return found

    return best(tuple((lake, 0) for lake in lakes), turns) / len(seeds)


def test_the_demo_is_not_solved_without_looking() -> None:
    config = load_config(EXAMPLES / "frozen_lake.yaml")
    (task,) = config.tasks
    blind = best_blind_success(task.options, task.max_turns, range(config.evaluation.episodes))
    assert 0.2 < blind < 0.6


# --- Letters ----------------------------------------------------------------------------------------------


def test_letters_rewards_the_share_of_the_named_letter() -> None:
    task = Letters()
    prompt = task.reset(3, "train")
    assert len(prompt) == 5 and prompt[3] == task.letter and split_of(prompt) == "train"
    other = "a" if task.letter != "a" else "b"
    assert task.step(task.letter * 3 + other) == Turn(reward=0.75, done=True)
    assert task.step("").reward == 0
    assert {Letters("xy").reset(seed, "eval")[3] for seed in range(30)} == {"x", "y"}


# --- rendering --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(RandomModel(), folder)
    return folder


def test_text_is_never_control_and_special_tokens_are_no_text(model: Path) -> None:
    renderer = PlainRenderer(model)
    assert unpack_ids(renderer.next("<eos>")) == unpack_ids(ids_of("<eos>"))
    assert renderer.answer(pack_ids([1, VOCABULARY["L"], 2, 0])) == "L"
    assert renderer.answer(b"") == ""
    for broken in (b"\0\0\0", pack_ids([-1])):
        with pytest.raises(ValueError):
            renderer.answer(broken)


def test_a_beginning_of_sequence_token_where_the_folder_asks_for_it(tmp_path: Path) -> None:
    write_model_folder(RandomModel(), tmp_path)
    assert PlainRenderer(tmp_path).first("a") == ids_of("a")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"add_bos_token": true, "bos_token": {"content": "<bos>"}}')
    renderer = PlainRenderer(tmp_path)
    assert unpack_ids(renderer.first("a")) == [1, VOCABULARY["a"]]
    assert renderer.next("a") == ids_of("a")
    settings.write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    with pytest.raises(ValueError, match="bos_token '<s>' is not in the vocabulary"):
        PlainRenderer(tmp_path)


def test_characters_without_a_token_are_warned_of_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    renderer = PlainRenderer(model)
    with caplog.at_level(logging.WARNING):
        assert unpack_ids(renderer.next("aé")) == [VOCABULARY["a"], 3]
        renderer.next("é")
    assert len(caplog.records) == 1 and "'é'" in caplog.text


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        PlainRenderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="can't read the tokenizer"):
        PlainRenderer(tmp_path)


# --- threads ----------------------------------------------------------------------------------------------


async def test_a_hanging_call_does_not_occupy_the_pool() -> None:
    threads, release, ended = Threads(1, "test"), threading.Event(), []
    before = threading.active_count()
    for i in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run(release.wait, lambda i=i: ended.append(i)), 0.05)
    assert await asyncio.wait_for(threads.run(lambda: 5, lambda: None), 5) == 5
    assert ended == []
    release.set()
    await until(lambda: len(ended) == 3 and threading.active_count() == before)
    threads.stop()


async def test_a_call_that_was_given_up_before_it_began_never_begins() -> None:
    threads, release, calls = Threads(1, "test"), threading.Event(), []
    first = asyncio.ensure_future(threads.run(release.wait, lambda: None))
    second = asyncio.ensure_future(threads.run(lambda: calls.append("began"), lambda: calls.append("ended")))
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.sleep(0)
    release.set()
    await first
    await until(lambda: calls == ["ended"])
    threads.stop()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
async def test_a_thread_hands_on_whatever_is_raised(error: BaseException) -> None:
    def call() -> None:
        raise error

    threads = Threads(1, "test")
    try:
        await threads.run(call, lambda: None)
    except BaseException as raised:
        assert raised is error
    else:
        raise AssertionError("nothing was raised")
    assert await threads.run(lambda: "alive", lambda: None) == "alive"
    threads.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


# --- the worker -------------------------------------------------------------------------------------------


class Echo(Environment):
    """Does what its action says."""

    closed: list[str] = []
    release = threading.Event()

    def __init__(self, first: str = "go", bad: object = None) -> None:
        if bad:
            raise ValueError(f"bad is {bad!r}")
        self.first = first

    def reset(self, seed: int, split: str) -> str:
        self.split = split
        if self.first == "number":
            return seed  # type: ignore[return-value]
        return self.first

    def step(self, action: str) -> Turn:
        return play(self, action)

    def close(self) -> None:
        Echo.closed.append(self.split)


class AsyncEcho(Environment):
    async def reset(self, seed: int, split: str) -> str:
        await asyncio.sleep(0)
        return "async"

    async def step(self, action: str) -> Turn:
        if action == "w":
            await asyncio.sleep(60)
        await asyncio.sleep(0)
        return play(self, action)

    async def close(self) -> None:
        Echo.closed.append("async")


class Plain:
    """No subclass, and no close."""

    def reset(self, seed: int, split: str) -> str:
        return f"{seed}{split}"

    def step(self, action: str) -> Turn:
        return Turn(action, 0.5)


def play(environment: Environment, action: str) -> Turn:
    if action == "w":
        Echo.release.wait(30)
    raised: dict[str, BaseException] = {
        "v": ValueError("two\nlines"), "s": SystemExit(0), "k": KeyboardInterrupt(), "t": TimeoutError("late"),
        "u": Unavailable("the sandbox is gone"), "c": asyncio.CancelledError(), "i": StopIteration(1),
    }  # fmt: skip
    if action in raised:
        raise raised[action]
    answers: dict[str, Any] = {
        "T": ("text", 0.0, False), "N": None, "1": Turn(5), "2": Turn("x", reward=float("nan")),  # type: ignore[arg-type]
        "3": Turn("x", done=1), "4": Turn("x", info={"a": "b"}), "5": Turn("x", reward="1"),  # type: ignore[arg-type, dict-item]
        "6": Turn("x", info=[1]),  # type: ignore[arg-type]
        "d": Turn("end", 1.0, True, {"success": True}),  # type: ignore[dict-item]
    }  # fmt: skip
    return answers.get(action, Turn(action, 0.25))


HERE = __name__


@asynccontextmanager
async def worker_of(
    model: Path, *tasks: tuple[str, dict[str, Any]], **environments: int
) -> AsyncIterator[EnvironmentWorker]:
    config = {
        "name": "test", "steps": 1, "model": {"path": str(model)}, "environments": environments,
        "tasks": [{"name": f"t{i}", "environment": e, "options": o} for i, (e, o) in enumerate(tasks)],
    }  # fmt: skip
    worker = EnvironmentWorker(ZmqDialer(Peer("", "", "", "")), name="env-0")
    worker.config = msgspec.convert(config, Config)
    worker.welcome = Welcome(b"", "", str(model), "", "", "", 1.0, 30.0)
    Echo.closed.clear()
    Echo.release.clear()
    try:
        await worker.setup()
        yield worker
    finally:
        Echo.release.set()
        await worker.teardown()


async def ask(worker: EnvironmentWorker, message: Reset | Step) -> Message:
    answer = await asyncio.wait_for(worker.serve(message, []), 5)
    assert answer is not None and getattr(answer, "seq") == message.seq  # noqa: B009
    return answer


def reset(session: str = "0.0", task: str = "t0", seed: int = 0, split: str = "train") -> Reset:
    return Reset(1, session, task, seed, split)


def step(action: str, session: str = "0.0") -> Step:
    return Step(2, session, ids_of(action))


async def test_episodes_of_all_kinds_side_by_side(model: Path) -> None:
    tasks = [(f"{HERE}:Echo", {"first": "hello"}), (f"{HERE}:AsyncEcho", {}), (f"{HERE}:Plain", {})]
    async with worker_of(model, *tasks) as worker:
        assert text_of(await ask(worker, reset("a"))) == "hello"
        assert text_of(await ask(worker, reset("b", "t1"))) == "async"
        assert text_of(await ask(worker, reset("c", "t2", 12, "eval"))) == "12eval"
        assert await ask(worker, step("Z", "a")) == Observation(2, ids_of("Z"), 0.25, False, {})
        assert await ask(worker, step("Z", "b")) == Observation(2, ids_of("Z"), 0.25, False, {})
        assert await ask(worker, step("Z", "c")) == Observation(2, ids_of("Z"), 0.5, False, {})
        assert await ask(worker, step("d", "a")) == Observation(2, ids_of("end"), 1.0, True, {"success": 1.0})
        await until(lambda: Echo.closed == ["train"])
        assert await worker.serve(Close("b"), []) is None
        await until(lambda: Echo.closed == ["train", "async"])
        assert await worker.serve(Close("b"), []) is None, "an unknown session is ignored"
        assert isinstance(await ask(worker, step("Z", "c")), Observation)


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("v", FailureKind.DETERMINISTIC, "raised ValueError: two lines ("),
        ("s", FailureKind.DETERMINISTIC, "raised SystemExit: 0 ("),
        ("k", FailureKind.DETERMINISTIC, "raised KeyboardInterrupt ("),
        ("t", FailureKind.DETERMINISTIC, "raised TimeoutError: late ("),
        ("c", FailureKind.DETERMINISTIC, "raised asyncio.exceptions.CancelledError ("),
        ("i", FailureKind.DETERMINISTIC, "StopIteration"),
        ("u", FailureKind.INFRASTRUCTURE, "Unavailable: the sandbox is gone ("),
        ("T", FailureKind.DETERMINISTIC, "returned tuple ('text', 0.0, False); it must return rollart.env"),
        ("N", FailureKind.DETERMINISTIC, "returned NoneType None; it must return"),
        ("1", FailureKind.DETERMINISTIC, "returned a Turn whose text is int 5; it must be a str"),
        ("2", FailureKind.DETERMINISTIC, "whose reward is float nan; it must be a finite number"),
        ("3", FailureKind.DETERMINISTIC, "whose done is int 1; it must be a bool"),
        ("4", FailureKind.DETERMINISTIC, "whose info['a'] is str 'b'; it must be a finite number"),
        ("5", FailureKind.DETERMINISTIC, "whose reward is str '1'; it must be a finite number"),
        ("6", FailureKind.DETERMINISTIC, "whose info is list [1]; it must map names to numbers"),
    ],
)
async def test_a_failing_environment_costs_its_session_only(
    model: Path, name: str, action: str, kind: FailureKind, message: str
) -> None:
    async with worker_of(model, (f"{HERE}:{name}", {})) as worker:
        await ask(worker, reset("a"))
        await ask(worker, reset("b"))
        failure = await ask(worker, step(action, "a"))
        assert isinstance(failure, Failure) and failure.kind is kind
        assert message in failure.message and "\n" not in failure.message
        assert failure.message.startswith(f"{name}.step ")
        if "(" in message[-2:]:
            assert f"{Path(__file__).name}, line " in failure.message and "in play)" in failure.message
        await until(lambda: len(Echo.closed) == 1)
        gone = await ask(worker, step("Z", "a"))
        assert isinstance(gone, Failure) and gone.kind is FailureKind.INFRASTRUCTURE
        assert "no session 'a'" in gone.message
        assert text_of(await ask(worker, step("Z", "b"))) == "Z"


async def test_failures_of_a_reset(model: Path) -> None:
    tasks = [(f"{HERE}:Echo", {"first": "number"}), (f"{HERE}:Echo", {"first": ""})]
    async with worker_of(model, *tasks) as worker:
        wrong = await ask(worker, reset("a", "t0", 7))
        assert isinstance(wrong, Failure) and wrong.kind is FailureKind.DETERMINISTIC
        assert (
            wrong.message
            == "Echo.reset returned int 7; it must return the first observation, a str or a list of messages"
        )
        empty = await ask(worker, reset("a", "t1"))
        assert isinstance(empty, Failure) and "returned an empty text" in empty.message
        with pytest.raises(Deterministic, match="no task 't9'"):
            await worker.serve(reset("a", "t9"), [])
        with pytest.raises(Deterministic, match="not Welcome"):
            await worker.serve(worker.welcome, [])


async def test_sessions_are_bounded_and_their_names_are_theirs(model: Path) -> None:
    async with worker_of(model, (f"{HERE}:Echo", {}), max_sessions=2) as worker:
        await ask(worker, reset("a"))
        await ask(worker, reset("b"))
        for request, why in ((reset("c"), "2 sessions already"), (reset("b"), "'b' is under way")):
            failure = await ask(worker, request)
            assert isinstance(failure, Failure) and failure.kind is FailureKind.INFRASTRUCTURE
            assert why in failure.message and failure.message.startswith("env-0 can't: ")
        await worker.serve(Close("a"), [])
        assert text_of(await ask(worker, reset("c"))) == "go"
        assert text_of(await ask(worker, step("Z", "b"))) == "Z"


@pytest.mark.parametrize("name", ["Echo", "AsyncEcho"])
async def test_a_cancelled_step_drops_its_session_and_blocks_nobody(model: Path, name: str) -> None:
    async with worker_of(model, (f"{HERE}:{name}", {}), threads=1) as worker:
        await ask(worker, reset("a"))
        await ask(worker, reset("b"))
        hanging = asyncio.ensure_future(worker.serve(step("w", "a"), []))
        await asyncio.sleep(0.05)
        busy = await ask(worker, step("Z", "a"))
        assert isinstance(busy, Failure) and "busy with another request" in busy.message
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert isinstance(await ask(worker, step("Z", "a")), Failure)
        assert text_of(await ask(worker, step("Z", "b"))) == "Z"
        if name == "Echo":
            assert Echo.closed == [], "its call is under way still"
        Echo.release.set()
        await until(lambda: len(Echo.closed) == 1)


async def test_a_session_that_is_closed_while_it_acts_ends_with_its_call(model: Path) -> None:
    async with worker_of(model, (f"{HERE}:Echo", {})) as worker:
        await ask(worker, reset("a"))
        acting = asyncio.ensure_future(worker.serve(step("w", "a"), []))
        await asyncio.sleep(0.02)
        await worker.serve(Close("a"), [])
        assert text_of(await ask(worker, reset("a"))) == "go", "the name is free again"
        Echo.release.set()
        await acting
        await until(lambda: len(Echo.closed) == 1)
        assert text_of(await ask(worker, step("Z", "a"))) == "Z", "the new session is untouched"


async def test_the_worker_ends_though_environments_hang(model: Path) -> None:
    async with worker_of(model, (f"{HERE}:Echo", {}), threads=2) as worker:
        for session in ("a", "b", "c"):
            await ask(worker, reset(session))
        hanging = asyncio.ensure_future(worker.serve(step("w", "a"), []))
        await asyncio.sleep(0.02)
        hanging.cancel()
        await asyncio.wait({hanging})
        started = time.monotonic()
        await worker.teardown()
        assert time.monotonic() - started < 2
        assert Echo.closed == ["train", "train"]


async def test_steps_wait_for_no_other_environment(model: Path) -> None:
    async with worker_of(model, (f"{HERE}:Echo", {}), threads=2) as worker:
        await ask(worker, reset("slow"))
        await ask(worker, reset("quick"))
        slow = asyncio.ensure_future(worker.serve(step("w", "slow"), []))
        for _ in range(20):
            assert text_of(await ask(worker, step("Z", "quick"))) == "Z"
        assert not slow.done()
        Echo.release.set()
        assert text_of(await slow) == "w"


# --- import paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("rollart.environments.frozen_lak:FrozenLake", {}, "there is no module rollart.environments.frozen_lak; did "),
        ("rollart.environmints.x:X", {}, "there is no module rollart.environmints; did you mean rollart.environments"),
        ("rollart.environments.frozen_lake.deep:X", {}, "there is no module rollart.environments.frozen_lake.deep"),
        ("rollart.environments.frozen_lake:FrozenLike", {}, "has no FrozenLike; did you mean FrozenLake?"),
        ("rollart.environments.letters:Nothing", {}, "has no Nothing; its environments are Letters"),
        ("rollart.environments.frozen_lake:solvable", {}, "solvable is a function, it must be a class"),
        ("rollart.config:Task", {}, "Task has no method reset and no step"),
        ("rollart.environments.frozen_lake:FrozenLake", {"sise": 3}, "no option 'sise'; did you mean size?"),
        ("rollart.environments.frozen_lake:FrozenLake", {"size": 1}, "raised ValueError: size is 1 and columns 1"),
        ("users_broken:X", {}, "importing users_broken failed: ModuleNotFoundError: No module named 'not_there'"),
        ("users_exit:X", {}, "importing users_exit failed: SystemExit: 3"),
    ],
)  # fmt: skip
async def test_a_wrong_import_path_is_one_clear_line(
    model: Path, user_files: Path, path: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with worker_of(model, (path, options)):
            pass
    text = str(caught.value)
    assert message in text and text.startswith(f"task t0: environment '{path}': ") and "\n" not in text


async def test_a_file_in_the_working_directory_can_be_imported(model: Path, user_files: Path) -> None:
    async with worker_of(model, ("users_coin:Coin", {})) as worker:
        seen = text_of(await ask(worker, reset()))
        assert seen.startswith("The coin shows ")
        assert await ask(worker, step(seen[15])) == Observation(2, b"", 1.0, True, {})


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules of a user's."""
    import rollart.environments.environment as interface

    assert interface.__doc__ is not None
    lines = interface.__doc__.splitlines()
    example = [line[4:] for line in lines[lines.index("    import random") :] if line[:1] in (" ", "")]
    (tmp_path / "users_coin.py").write_text("\n".join(example))
    (tmp_path / "users_broken.py").write_text("import not_there\n")
    (tmp_path / "users_exit.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("users_coin", "users_broken", "users_exit"):
        sys.modules.pop(name, None)


# --- the check before a run -----------------------------------------------------------------------------------


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, **settings: object) -> None:
    (tmp_path / "checked_task.py").write_text(
        f"import os, time\nfrom rollart.environments import Environment\n{body}"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    raw = {
        "name": "checked",
        "steps": 1,
        "model": {"random": {}},
        "tasks": [{"name": "t", "environment": "checked_task:Task"}],
        **settings,
    }
    check_environments(msgspec.convert(raw, Config))


def test_an_environment_may_print_while_it_is_imported_and_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "print('noise')\nclass Task(Environment):\n    def __init__(self): os.write(1, b'more noise')\n"
    checked(tmp_path, monkeypatch, body)


def test_an_environment_that_ends_the_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="exit code 9"):
        checked(tmp_path, monkeypatch, "os._exit(9)")


def test_an_environment_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="longer than start_timeout_s=2"):
        checked(tmp_path, monkeypatch, "time.sleep(100)", start_timeout_s=2.0)
