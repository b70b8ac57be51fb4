"""The figures that the simulation starts from, its trainer's costs, and the page that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.simulation.hardware import (
    ETHERNET_200,
    GIB,
    H20,
    H800,
    INFINIBAND_400,
    MODELS,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_32B,
    ModelShape,
    tables,
)
from rollart.simulation.training import Parallelism, TrainingCosts, publish_s

PAGE = Path(__file__).parent.parent / "docs" / "simulation-models.md"


def test_the_page_has_the_tables_that_the_code_prints() -> None:
    assert tables() in PAGE.read_text()


@pytest.mark.parametrize(
    ("model", "gib"), [(QWEN3_8B, 15.26), (QWEN3_14B, 27.51), (QWEN3_32B, 61.02)], ids=list(MODELS)
)
def test_weights_are_as_large_as_in_the_paper(model: ModelShape, gib: float) -> None:
    assert model.weight_bytes / GIB == pytest.approx(gib, abs=0.005)


def test_flops_and_bytes_of_a_token() -> None:
    assert QWEN3_8B.flops_per_token(0) == pytest.approx(2 * 7.568e9, rel=1e-3)
    assert QWEN3_8B.flops_per_token(1000) - QWEN3_8B.flops_per_token(0) == 4 * 36 * 32 * 128 * 1000
    assert QWEN3_8B.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert QWEN3_8B.streamed_bytes == QWEN3_8B.weight_bytes - 2 * QWEN3_8B.table_parameters


def test_a_link_carries_its_share_of_the_line_rate() -> None:
    assert INFINIBAND_400.seconds(40e9) == pytest.approx(1)
    assert ETHERNET_200.seconds(17.5e9) == pytest.approx(1)
    assert publish_s(QWEN3_32B, ETHERNET_200, streams=2) == pytest.approx(65.524e9 / 35e9, rel=1e-3)


def test_a_train_step_has_three_forward_passes_and_one_more_to_recompute() -> None:
    plan = Parallelism(tensor=2, data=4)
    forward = TrainingCosts(H20, QWEN3_8B, plan).forward_s(1e6, 8000)
    for recompute, passes in [(False, 3), (True, 4)]:
        costs = TrainingCosts(H20, QWEN3_8B, plan, recompute_activations=recompute)
        assert costs.train_step_s(1e6, 8000) - costs.update_s() == pytest.approx(passes * forward)


def test_the_published_utilisation_comes_out() -> None:
    """Without what it doesn't contain: a pipeline's bubble, a slower link, recomputed passes."""
    plan = Parallelism(tensor=2, data=16)
    costs = TrainingCosts(H20, QWEN3_8B, plan, recompute_activations=False)
    seconds = costs.train_step_s(1e6, 0) - costs.update_s()
    assert 3 * 1e6 * QWEN3_8B.flops_per_token(0) / seconds == pytest.approx(0.41 * 32 * 148e12)


def test_what_slows_a_trainer_down() -> None:
    def step_s(tensor: int, pipeline: int, tokens: float = 8e6) -> float:
        plan = Parallelism(tensor=tensor, pipeline=pipeline, data=32 // tensor // pipeline)
        return TrainingCosts(H800, QWEN3_8B, plan).train_step_s(tokens, 16000)

    assert step_s(1, 1) < step_s(2, 1) < step_s(4, 1), "the H800's link is slower than the reference's"
    assert step_s(1, 1) < step_s(1, 2) < step_s(1, 4), "a pipeline has a bubble"
    bubble = step_s(1, 4, 1e6) / step_s(1, 1, 1e6)
    assert bubble > step_s(1, 4) / step_s(1, 1), "which is larger with fewer microbatches"
    assert step_s(1, 1, 16e6) == pytest.approx(2 * step_s(1, 1), rel=0.1)


def test_a_model_whose_states_are_too_large_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Qwen3-32B doesn't fit: .* take 147\.4 GB per device, and a H800 has"
    ):
        TrainingCosts(H800, QWEN3_32B, Parallelism(tensor=2, data=4))
    assert TrainingCosts(H800, QWEN3_32B, Parallelism(tensor=8, data=4)).state_bytes < 40e9
