"""The built-in tasks: every instance can be solved as its generator says, and by nothing less."""

from __future__ import annotations

import pytest

from rollart.environments import Turn
from rollart.environments.maths import KINDS, Maths
from rollart.environments.repair import Repair
from rollart.environments.shop import Shop, catalogue
from rollart.environments.sokoban import Sokoban
from rollart.environments.splits import split_of


def test_every_sokoban_has_the_solution_it_was_made_by() -> None:
    for seed in range(60):
        game = Sokoban(size=5, boxes=1 + seed % 2)
        first = game.reset(seed, "train")
        assert split_of(first) == "train" and first == game.reset(seed, "train")
        turn, moves = Turn(), game.solution
        for letter in moves:
            turn = game.step(letter)
            if turn.done:
                break
        assert turn.reward == 1.0 and turn.info == {"success": 1.0}, (seed, first, moves)


def test_sokoban_moves_pushes_and_a_lost_box() -> None:
    game = Sokoban(size=3, boxes=1)
    game.walls, game.goals, game.boxes, game.player = frozenset(), frozenset({(0, 0)}), {(1, 1)}, (2, 1)
    assert game._board() == "#####\n#_..#\n#.$.#\n#.@.#\n#####\n"
    assert game.step("say nothing").text == game._board(), "small letters are no moves"
    turn = game.step("U")
    assert game.boxes == {(0, 1)} and not turn.done
    assert game.step("U").text == turn.text, "a wall is behind the box"
    assert game.step("RU").text.splitlines()[1] == "#_$@#"
    assert game.step("L") == Turn("#####\n#*@.#\n#...#\n#...#\n#####\n", 1.0, True, {"success": 1.0})
    game.boxes, game.player = {(1, 2)}, (2, 2)
    assert game.step("U").done and game.boxes == {(0, 2)}, "in a corner that is no goal"
    for options in ({"size": 2}, {"boxes": 9}, {"walls": 0.9}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sokoban(**options)  # type: ignore[arg-type]


def test_the_shop_sells_what_it_asks_for() -> None:
    assert len(catalogue(1200, 0).products) == 1200
    for seed in range(80):
        shop = Shop()
        first = shop.reset(seed, "eval")
        assert first.startswith("Instruction: Find me ") and first.endswith("[Search]\n")
        turn = Turn()
        for action in shop.solution():
            assert not turn.done
            turn = shop.step(action)
            assert "There is no" not in turn.text
        assert turn == Turn("Bought.", 1.0, True, {"success": 1.0})


def test_the_shop_grades_a_purchase_and_shows_pages() -> None:
    shop = Shop()
    shop.reset(1, "train")
    right = shop._catalogue.products[shop.goal.product]
    rest = len(shop.goal.attributes) + 1
    assert shop.reward(right, []) == pytest.approx(rest / (rest + 2))
    other = next(p for p in shop._catalogue.products.values() if p.group != right.group)
    assert shop.reward(other, right.options) == 0.0
    assert "No action" in shop.step("buy it").text
    assert "There is no 'Buy Now' to click" in shop.step("click[Buy Now]").text
    page = shop.step(f"search[{right.kind}]").text
    assert "Page 1 of" in page and page.count("[B") == 11 and "[Next >]" in page and "[< Prev]" not in page
    assert "Page 2 of" in shop.step("I think click[next >] is right").text
    assert "Page 1 of" in shop.step("click[< Prev]").text
    product = shop._results[0]
    assert "Chosen: nothing" in shop.step(f"click[{product.lower()}]").text
    colour = shop._catalogue.products[product].colours[0]
    assert f"Chosen: colour {colour}" in shop.step(f"click[{colour}]").text
    assert "[Search]" in shop.step("click[Back to Search]").text


def test_maths_runs_code_and_judges_the_number() -> None:
    task = Maths()
    try:
        assert "Answer: 42" in task.reset(3, "train")
        assert task.step("Let me see.\n```python\nprint(6 * 7)\n```").text == "42\n"
        assert "ZeroDivisionError" in task.step("```python\n1 / 0\n```").text
        assert task.step(f"So Answer: {task.answer}").reward == 1.0
        assert task.step(f"Answer: {task.answer + 1}") == Turn(reward=0.0, done=True, info={"success": 0.0})
        assert task.step("Answer: none").done is False
        assert task.step(f"```python\n# Answer: {task.answer}\n```").done is False, "code is no answer"
    finally:
        task.close()
    with pytest.raises(ValueError, match="kinds has 'sums'"):
        Maths(["sums"])


def test_the_answers_of_all_kinds_of_problems() -> None:
    import random

    for kind, make in KINDS.items():
        texts = {make(random.Random(seed)) for seed in range(40)}
        assert len(texts) > 30, kind
    divisors = next(number for words, number in [KINDS["divisors"](random.Random(0))])
    words = KINDS["divisors"](random.Random(0))[0]
    number = int("".join(filter(str.isdigit, words)))
    assert divisors == sum(number % n == 0 for n in range(1, number + 1))


def test_every_broken_repository_fails_and_can_be_repaired() -> None:
    for seed in range(25):
        task = Repair()
        try:
            task.reset(seed, "train")
            assert task._right.passes() and not task._right.passes({task.module: task._broken})
            assert task._right.test_count >= 6
        finally:
            task.close()


def test_pytest_decides_about_a_repair() -> None:
    task = Repair()
    try:
        task.reset(5, "train")
        turn = task.step("```bash\npython3 -m pytest -q -x 2>&1 | tail -3\n```")
        assert "1 failed" in turn.text and "[exit code 0]" in turn.text
        assert task.step("").text == "There was no command.\n$ "
        task.step("rm -r tests; printf 'import os; os._exit(0)' > conftest.py")
        assert task.step("submit") == Turn(reward=0.0, done=True, info={"success": 0.0}), (
            "nothing is repaired"
        )
        assert "[exit code 0]" in task.step(task.solution).text
        assert task.step("I am done.\nsubmit") == Turn(reward=1.0, done=True, info={"success": 1.0})
    finally:
        task.close()
