"""Config files and the command line: a person's mistakes are sentences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollart.config import Config, UpdateAt
from rollart.controller.command_line import main
from rollart.controller.configuration import REFUSED_SAMPLING, load_config
from rollart.controller.run_folder import RunFolder, to_yaml
from rollart.errors import ConfigError

GOOD = """
name: good
steps: 2
model: {random: {hidden_size: 32}}
tasks:
  - {name: FrozenLake, environment: "rollart.environments.frozen_lake:FrozenLake", options: {size: 3}}
sampling: {allowed_token_ids: [L, D, R, U]}
trainer: {learning_rate: 1e-3}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_numbers_words_and_tokens_are_what_they_look_like(good: Path) -> None:
    config = load_config(good)
    assert config.trainer.learning_rate == 1e-3
    assert len(config.sampling.allowed_token_ids) == 4
    assert all(isinstance(token, int) for token in config.sampling.allowed_token_ids)
    words = load_config(good, ["sampling.allowed_token_ids=[y, n, N, Y]", "name=on"])
    assert words.name == "on" and len(set(words.sampling.allowed_token_ids)) == 4


def test_overrides_reach_every_depth(good: Path) -> None:
    overrides = [
        "rollout.group_size=16",
        "tasks.0.options.size=4",
        "tasks.0.max_turns=9",
        "rollout.update_at=publish",
    ]
    config = load_config(good, overrides)
    assert config.rollout.group_size == 16 and config.rollout.update_at is UpdateAt.PUBLISH
    assert config.tasks[0].options == {"size": 4} and config.tasks[0].max_turns == 9


def test_the_resolved_config_loads_to_the_same(good: Path, tmp_path: Path) -> None:
    config = load_config(good, ["rollout.staleness_bound=2", "trainer.learning_rate=1e-7"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


MISTAKES = [
    ("rollot.group_size=2", "rollot: there is no such setting; did you mean rollout?"),
    ("rollout.groupsize=2", "rollout.groupsize: there is no such setting; did you mean rollout.group_size?"),
    ("group_size=2", "group_size: there is no such setting; did you mean rollout.group_size?"),
    ("tasks.0.turns=2", "tasks.0.turns: there is no such setting; did you mean tasks.0.max_turns?"),
    ("rollout.group_size=two", "rollout.group_size: expected `int`, got `str` (it is 'two')"),
    ("rollout.group_size=1", "rollout.group_size: expected `int` >= 2 (it is 1)"),
    ("rollout.staleness_bound=-1", "rollout.staleness_bound: expected `int` >= 0 (it is -1)"),
    ("rollout.staleness_bound=0", "rollout: staleness_bound 0 can't exist with update_at: batch"),
    ("rollout.update_at=never", "rollout.update_at: 'never' is not one of batch, publish"),
    ("rollout.schedule=one_of", "'one_of' is not one of rollart, sync, one_off, areal; did you mean one_off?"),
    ("rollout.schedule=sync", "rollout: schedule sync is defined with update_at: publish; it is batch here"),
    ("sampling.temperature=0.005", "sampling.temperature: expected `float` >= 0.01"),
    ("sampling.temperature=3", "sampling.temperature: expected `float` <= 2"),
    ("inference.canary_tolerance=.inf", "inference.canary_tolerance: must be a finite number"),
    ("tasks.0.options.hole_probability=.nan", "tasks.0.options.hole_probability: must be a finite number"),
    ("seed=99999999999999999999999999", "seed: expected `int`"),
    ("model.random.seed=-1", "model.random.seed: expected `int` >= 0"),
    ("steps=99999999999999999999", "steps: expected `int`"),
    ("trainer.minibatches=1000", "trainer.minibatches (1000) must be at most rollout.groups_per_batch (8)"),
    ("rollout.min_group=9", "min_group (9) must be at most group_size (8)"),
    ("rollout.max_filtered_groups=9", "max_filtered_groups does nothing without filter_groups: true"),
    ("evaluation.every=9", "evaluation: every does nothing while episodes is 0"),
    ("trainer.keep_checkpoints=3", "trainer: keep_checkpoints does nothing while checkpoint_every is 0"),
    ("trainer.warmup_optimizer_steps=2", "must be below the run's 2 optimiser steps"),
    ("sampling.temperature=0", "sampling.temperature: expected `float` >= 0.01 (it is 0)"),
    ("sampling.max_tokens=512", "sampling.max_tokens (512) leaves no room"),
    ("sampling.allowed_token_ids=[Left]", "vocabulary has no token 'Left'"),
    ("sampling.allowed_token_ids=[12345]", "sampling.allowed_token_ids.0: token id 12345 is outside the vocabulary"),
    ("sampling.stop_token_ids=[L, L]", "sampling.stop_token_ids: a token is there twice"),
    ("steps=null", "steps: expected `int`, got `null`"),
    ("model.path=/nowhere", "model: give either path (a Hugging Face folder) or random"),
    ("name=a/b", "name: expected `str` matching regex"),
    ("tasks=[]", "tasks: expected `array` of length >= 1"),
    ("rollout", "'rollout' is no override: write key=value"),
    ("rollout.group_size.x=1", "override rollout.group_size.x: rollout.group_size is"),
    ("tasks.7.name=x", "'7' is no position in a list of 1"),
    ("steps=[1", "override steps"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "sentence"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence_with_its_place(good: Path, override: str, sentence: str) -> None:
    overrides = (
        [override] if not override.startswith("rollout.group_size.x") else ["rollout.group_size=8", override]
    )
    with pytest.raises(ConfigError) as caught:
        load_config(good, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


POOLS = "inference.pools=[{hardware: H800}, {hardware: H20}]"
SPLIT = "inference.pools=[{hardware: H800, phase: prefill}, {hardware: H20, phase: decode}]"
TOGETHER = [
    # keys of mappings, and enums that may be null
    ([POOLS, "inference.hw_affinity={default: H800, FrozenLake: {prefill: H800, decode: H20, x: 1}}"],
     "inference.hw_affinity.FrozenLake.x: there is no such setting; inference.hw_affinity.FrozenLake has prefill"),
    ([POOLS, "inference.hw_affinity={default: H800, FrozenLake: 3}"],
     "inference.hw_affinity.FrozenLake: expected `str | object | array`, got `int` (it is 3)"),
    (["tasks.0.curriculum={0: 1, 3: -1}"], "tasks.0.curriculum.3: expected `float` >= 0.0 (it is -1)"),
    (["tasks.0.curriculum={a: 1}"], "tasks.0.curriculum: of each key, expected `int`, got `str`"),
    (["tasks.0.reward={function: 'a:b', scope: grop}"],
     "tasks.0.reward.scope: 'grop' is not one of trajectory, group; did you mean group?"),
    (["algorithm.kl_estimator=k9"], "algorithm.kl_estimator: 'k9' is not one of k1, k2, k3"),
    # what would do nothing
    ([SPLIT, "inference.disaggregation={min_prompt_tokens: 512}"], "min_prompt_tokens (512) is never reached"),
    ([SPLIT, "inference.disaggregation={min_answer_tokens: 2}"], "min_answer_tokens (2) is never reached"),
    ([SPLIT, "inference.disaggregation={adapt: true}"], "adapt does nothing"),
    ([POOLS, "tasks.0.name=default", "inference.hw_affinity={default: H20}"], "a task has that name"),
    (["inference.pools=[{hardware: H800, devices: [0]}]", "inference.tensor_parallel=2"],
     "inference: pools.devices gives each engine one GPU"),
    (["tasks.0.weight=2"], "task FrozenLake: weight does nothing, since there is no other task"),
    (["tasks.0.curriculum={0: 1}"], "task FrozenLake: curriculum does nothing, since there is no other task"),
    (["tasks.0.curriculum={0: 0, 5: 0}"], "tasks.0: curriculum gives it the weight 0 at every step"),
    (["health.kl_reference={warn_above: 1}"], "health.kl_reference does nothing: it is only measured with"),
    (["health.correction_mean={warn_above: 1}"], "health.correction_mean does nothing"),
    (["health.logprob_gap_mean={warn_above: 1}", "trainer.verify_share=0"], "trainer.verify_share above 0"),
    (["health.ess={stop_below: 0.9, stop_above: 0.5}"], "stop_below (0.9) is over stop_above (0.5)"),
    (["tasks.0.reward={function: 'a:b', hedge_after_s: 9, timeout_s: 9}"], "hedge_after_s (9) does nothing"),
    (["sampling.stop_token_ids=[Z]"], "sampling.stop_token_ids: 'Z' is not among sampling.allowed_token_ids"),
    (["tasks.0.sampling.stop_token_ids=[L]", "tasks.0.sampling.allowed_token_ids=[D]"], "'L' is not among"),
    (["tasks=[{name: A, agent: 'a:b'}]", "environments.warm_groups=1"], "warm_groups does nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), TOGETHER, ids=[" ".join(t[0]) for t in TOGETHER])
def test_mistakes_of_several_settings_are_one_sentence(
    good: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_built_in_function_of_groups_gets_groups(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(good), "tasks.0.reward.function=rollart.rewards:group_rank", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["tasks"][0]["reward"]["scope"] == "group"


def test_an_override_reaches_a_step_of_a_curriculum() -> None:
    mixed = Path(__file__).parents[1] / "examples" / "mixed_tasks.yaml"
    assert load_config(mixed, ["tasks.1.curriculum.6=5"]).tasks[1].curriculum == {0: 0.5, 6: 5}


LAYOUTS = [
    ("inference.tensor_parallel=3", "inference.tensor_parallel (3) must divide the model's attention heads"),
    ("trainer.tensor_parallel=4", "trainer.tensor_parallel (4) must divide the model's key-value heads: it has 2"),
    ("trainer.pipeline_parallel=3", "trainer.pipeline_parallel (3) must divide the model's layers"),
    ("tasks.0.interpreter=/bin/true", "interpreter /bin/true: it is no Python; rollart must be importable there"),
    ("model.chat_template=/nowhere", "model.chat_template: there is no file /nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "sentence"), LAYOUTS, ids=[m[0] for m in LAYOUTS])
def test_what_the_machine_or_the_model_refuses_is_said_before_anything_starts(
    good: Path, override: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(good), override, "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(REFUSED_SAMPLING))
def test_sampling_that_the_trainer_cannot_reproduce_is_refused(good: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"sampling.{name} is not supported: .* distribution that was sampled"
    ):
        load_config(good, [f"sampling.{name}=1"])


FILES = [
    ("- a\n- b\n", "must hold a mapping of settings, not list"),
    ("", "must hold a mapping"),
    ("name: [\n", "line"),
    ("name: a\nname: b\n", "the key 'name' is there twice"),
    ("rollout:\n  group_size: 2\n  group_size: 3\n", "line 3: the key 'group_size' is there twice"),
    ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
    ("? [a, b]\n: c\n", "line"),
    ("name: x\n", "steps: this setting is required"),
    ("\ttabs: 1\n", "line 1"),
    ('{model: {"\\n": 1}, name: x, steps: 1}', "model.\\n: there is no such setting"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*Config.__struct_fields__, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
@example({"name": {"\n": float("inf")}})
@example({"model": {"a\nb": 1}})
@example({"tasks": [{"options": {"a\nb": float("nan")}}]})
def test_any_mapping_is_a_config_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, raw: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(raw))
    try:
        load_config(path)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_missing_file_names_its_neighbour(good: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config file .*god.yaml; did you mean .*good.yaml"):
        load_config(good.with_name("god.yaml"))


def test_the_run_folder_is_new_or_refused(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(good)
    assert RunFolder.choose(config).path == tmp_path / "runs" / "good"
    (tmp_path / "runs" / "good").mkdir(parents=True)
    assert RunFolder.choose(config).path == tmp_path / "runs" / "good-2"
    with pytest.raises(ConfigError, match="exists already"):
        RunFolder.choose(load_config(good, [f"run_dir={good}"]))


def test_dry_run_prints_config_and_placement_and_starts_nothing(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["run", str(good), "--dry-run"],
        [str(good), "inference.workers=2", "--dry-run"],
        [str(good), "inference.workers=3", "--dry-run", "inference.workers=2"],
    ):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed)["name"] == "good"
        assert "# placement:" in printed and "trainer-0" in printed
    assert "inference-1" in printed
    assert not (tmp_path / "runs").exists()


def test_mistakes_exit_with_2_before_anything_starts(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        [str(good), "rollout.group_size=1"],
        [str(good), "inference.gpu_memory_utilization=0.5"],
        [str(good), "tasks.0.environment=nowhere:Nothing"],
        [str(tmp_path / "none.yaml")],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_control_plane_starts_without_torch_and_fast() -> None:
    """``import rollart`` and ``--help``: no package of the data plane, and few modules at all."""
    heavy = "{'torch', 'vllm', 'megatron', 'mooncake', 'transformers', 'numpy'}"
    for code in (
        "import rollart, sys",
        "import rollart.endpoint.server, sys",
        "import rollart, sys; rollart.load_config; rollart.run; rollart.Config",
        "import sys, rollart.controller.command_line as c\ntry: c.main(['--help'])\nexcept SystemExit: pass",
    ):
        script = f"{code}\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_evaluations_need_a_place_beside_training(good: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no place for evaluations beside training"):
        load_config(good, ["environments.max_sessions=1", "evaluation.episodes=3"])
