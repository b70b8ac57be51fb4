"""A random model's folder: plain JSON from the control plane that every engine's loader accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollart.config import RandomModel
from rollart.random_model import (
    DEFAULT_CHARACTERS,
    SPECIAL_TOKENS,
    random_vocabulary,
    vocabulary,
    write_model_folder,
)

TEXTS = st.text(DEFAULT_CHARACTERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "new"
    write_model_folder(RandomModel(), path)
    return path


@settings(deadline=None)
@given(text=TEXTS)
def test_the_tokenizer_gives_a_token_per_character_and_the_text_back(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # "<eos>" in a text is five characters
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_transformers_loads_the_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "  two  spaces\n\n, and < no special > token"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text)
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert len(tokenizer) == 100


def test_transformers_builds_the_model_that_the_spec_describes(tmp_path: Path) -> None:
    spec = RandomModel(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=77, tie_word_embeddings=True,
        characters="ab\n",
    )  # fmt: skip
    write_model_folder(spec, tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert type(model).__name__ == "Qwen3ForCausalLM"
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == (7, 32)
    assert "lm_head.weight" not in shapes
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (48, 32)
    assert model.config.max_position_embeddings == 77
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_vocabulary_is_the_one_in_the_folder(folder: Path) -> None:
    found = vocabulary(folder)
    assert found == random_vocabulary(RandomModel())
    assert found["L"] == Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("L")
    assert [found[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3]


def test_the_vocabulary_of_other_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["ab", -1.5]]}}))
    assert vocabulary(tmp_path) == {"<unk>": 0, "ab": 1}
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<x>", "id": 5}]}))
    assert vocabulary(tmp_path) == {"a": 0, "<x>": 5}


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": {"vocab": {}}}', '{"model": {"vocab": 3}}', "no"])
def test_a_broken_tokenizer_file_is_a_value_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError):
        vocabulary(tmp_path)


def test_a_tokenizer_without_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="characters is empty"):
        write_model_folder(RandomModel(characters=""), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_writing_imports_no_engine() -> None:
    script = (
        "import sys, rollart.random_model as m; "
        "print([n for n in ('torch', 'numpy', 'tokenizers', 'transformers') if n in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"
