"""The recipes of the docs are settings that are taken."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from rollart.config import Algorithm
from rollart.environments.word_tasks import Brackets, Sums

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"


@pytest.mark.parametrize("recipe", re.findall(r"^\|.*\| `(\{.*?\})`", PAGE.read_text(), re.MULTILINE))
def test_a_recipe_is_an_algorithm_that_differs_from_the_default(recipe: str) -> None:
    assert msgspec.yaml.decode(recipe, type=Algorithm).given()


def test_a_wrong_sum_may_be_mended_once() -> None:
    sums = Sums()
    prompt = sums.reset(3, "train")
    left, right = (int(each) for each in re.findall(r"\d+", prompt)[-2:])
    assert sums.step(f" {left + right + 1}\n").text.startswith("\nThat is wrong")
    mended = sums.step(f" {left + right}\nand more")
    assert (mended.reward, mended.done, mended.info) == (0.5, True, {"success": 1.0})
    assert sums.reset(3, "train") == prompt
    assert sums.step(f"{left + right}").reward == 1.0
    assert sums.reset(4, "eval") != prompt
    sums.step("no")
    assert sums.step("no idea").done


def test_brackets_and_capitals_are_half_the_reward_each() -> None:
    brackets = Brackets()
    word = brackets.reset(1, "train").rpartition("\n")[2].removesuffix(" ->")
    assert brackets.step(f" [{word.upper()}]\n").reward == 1.0
    assert brackets.step(f"[{word}]").reward == brackets.step(word.upper()).reward == 0.5
    assert brackets.step(word).reward == 0.0
