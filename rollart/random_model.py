"""A model folder in Hugging Face's layout for a random model: its shape and its tokenizer, without weights.

The control plane writes it, so this is plain JSON and imports no engine.  Inference engines and the trainer
read it like any other folder; the trainer draws the weights from the config's seed.  The tokenizer has one
token per character, and those that ``tokens`` adds, so that for any text of known characters
``decode(encode(text)) == text``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollart.config import RandomModel

__all__ = ["SPECIAL_TOKENS", "random_vocabulary", "vocabulary", "vocabulary_size", "write_model_folder"]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Tokens 0 to 3; the characters follow."""
DEFAULT_CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
PAD, BOS, EOS, UNKNOWN = range(4)
CHAT_TEMPLATE = """\
{%- if tools %}<bos>f
    {%- for tool in tools %}{{ tool.function.name }}{% if not loop.last %},{% endif %}{% endfor %}<eos>
{%- endif %}
{%- for message in messages %}<bos>{{ message.role[0] }}{{ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<bos>a{% endif %}
"""
"""As short as can be, for models that begin with random weights: a turn is its role's first letter and its text, the
tools are named (``f``)."""


def write_model_folder(spec: RandomModel, folder: Path) -> None:
    """Write the config, generation config and tokenizer of ``spec`` into ``folder``, which is made if needed.

    ``ValueError`` when the tokenizer would have no characters.
    """
    files = {
        "config.json": _config(spec),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer.json": _tokenizer(spec),
        "tokenizer_config.json": _tokenizer_config(spec),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def random_vocabulary(spec: RandomModel) -> dict[str, int]:
    """Token → id of the tokenizer that ``write_model_folder`` writes for ``spec``."""
    characters = DEFAULT_CHARACTERS if spec.characters is None else spec.characters
    if not characters:
        raise ValueError("model.random.characters is empty: name at least one character, or leave it out")
    return {token: id for id, token in enumerate((*SPECIAL_TOKENS, *characters, *spec.tokens))}


def vocabulary(folder: Path) -> dict[str, int]:
    """Token → id of the tokenizer in a Hugging Face ``folder``, added and special tokens included.

    ``OSError`` when its tokenizer.json can't be read, ``ValueError`` when it isn't one.
    """
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        tokens = content["model"]["vocab"]
        # A Unigram model lists [token, score] by id, the others map tokens to ids.
        found = (
            {token: id for id, (token, _) in enumerate(tokens)} if isinstance(tokens, list) else dict(tokens)
        )
        found |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has no vocabulary where a tokenizer.json has one (model.vocab): {error!r}"
        ) from None
    if not found:
        raise ValueError(f"{path} has an empty vocabulary")
    return found


def vocabulary_size(folder: Path) -> int:
    """Rows of the embedding of the model in a Hugging Face ``folder``."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(content["vocab_size"])


def _config(spec: RandomModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(random_vocabulary(spec)),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * spec.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _tokenizer(spec: RandomModel) -> dict[str, Any]:
    known = random_vocabulary(spec)
    # Byte-pair encoding without merges leaves every character a token of its own.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token, id in known.items()
            if token in SPECIAL_TOKENS or token in spec.tokens
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL_TOKENS[UNKNOWN],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for token, id in known.items() if token not in spec.tokens},
            "merges": [],
        },
    }


def _tokenizer_config(spec: RandomModel) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "unk_token": SPECIAL_TOKENS[UNKNOWN],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
