"""Small random models, and an inference worker with a real engine, driven in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollart.config import Config
from rollart.packing import pack_ids, unpack_floats, unpack_ids
from rollart.peer import Peer
from rollart.protocol import (
    Done,
    Generate,
    Generated,
    Message,
    Pull,
    Pulled,
    Resume,
    Suspend,
    ToWorker,
    Update,
    Updated,
    Welcome,
)
from rollart.weights.local import LocalStore
from rollart.weights.tensors import buffers_of
from rollart.workers.dialer import ZmqDialer
from rollart.workers.inference import InferenceWorker

VOCABULARY = 96
EOS = 2
CANARY = list(range(1, 33))
PROMPT = [1, *(5 + (j * 7) % 90 for j in range(20))]
EXACT = 1e-4
"""Nats between vLLM and Hugging Face in float32."""
NOWHERE = ZmqDialer(Peer("tcp://127.0.0.1:1", "", "", ""))


def random_model(seed: int, *, tied: bool = False) -> PreTrainedModel:
    """A Qwen3 of 0.1 M parameters whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model.eval()


def random_mixture(seed: int) -> PreTrainedModel:
    """The same as a mixture of four experts, of which each token takes two."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


def saved_weights(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors under the names that a checkpoint has."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_shape(model: PreTrainedModel, folder: Path) -> Path:
    """What an engine is started from: the model's shape, without weights."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return folder


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a trainer would publish: a tied head is not among them."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def logprobs_under(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    *,
    temperature: float = 1.0,
    allowed: Sequence[int] = (),
) -> list[float]:
    """Log-probabilities of ``ids[start:]`` by Hugging Face, each given the ids before it."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].float()
    if allowed:
        masked = torch.full_like(logits, -torch.inf)
        masked[:, list(allowed)] = logits[:, list(allowed)]
        logits = masked
    logprobs = (logits / temperature).log_softmax(-1)
    return [logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))]


def largest_gap(found: Sequence[float], expected: Sequence[float]) -> float:
    """Of two rows of the same length."""
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def config_for(**inference: object) -> Config:
    """A run's config whose inference section is given."""
    return msgspec.convert(
        {
            "name": "engines",
            "steps": 1,
            "model": {"random": {}},
            "tasks": [{"name": "t", "environment": "tests.engines:None"}],
            "inference": {"kv_cache_gib": 0.25, "max_num_seqs": 64, **inference},
        },
        Config,
    )


async def until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Wait for ``condition``; ``TimeoutError`` when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class DrivenWorker:
    """An inference worker without a controller: the test is its controller."""

    def __init__(
        self,
        model_dir: Path,
        store: Path,
        config: Config | None = None,
        *,
        name: str = "driven",
        hardware: str = "CPU",
    ) -> None:
        self.store = LocalStore(store)
        self.worker = InferenceWorker(NOWHERE, name=f"{name}-{model_dir.name}", hardware_class=hardware)
        self.worker.config = config or config_for()
        self.worker.welcome = Welcome(
            config=msgspec.msgpack.encode(self.worker.config),
            run_dir=str(model_dir),
            model_dir=str(model_dir),
            store_dir=str(store),
            store_master="",
            store_run="",
            heartbeat_s=1.0,
            controller_timeout_s=30.0,
        )
        self._seq = itertools.count(1)
        self._versions = itertools.count()

    async def ask(self, message: ToWorker) -> Message:
        """The worker's answer."""
        answer = await self.worker.serve(message, [])
        assert answer is not None
        return answer

    def publish(self, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
        """A new version and its manifest."""
        version = next(self._versions)
        return version, self.store.publish(version, buffers_of(tensors.items()))

    async def pull(self, version: int, manifest: str) -> None:
        assert isinstance(await self.ask(Pull(next(self._seq), version, manifest)), Pulled)

    async def suspend(self) -> None:
        assert isinstance(await self.ask(Suspend(next(self._seq))), Done)

    async def resume(self) -> None:
        assert isinstance(await self.ask(Resume(next(self._seq))), Done)

    async def update(self, version: int) -> list[float]:
        """The canary's log-probabilities under the new version."""
        answer = await self.ask(Update(next(self._seq), version, pack_ids(CANARY)))
        assert isinstance(answer, Updated)
        assert answer.version == version
        return unpack_floats(answer.canary_logprobs)

    async def serve_weights(self, tensors: dict[str, torch.Tensor]) -> tuple[int, list[float]]:
        """Publish, pull, suspend, update and resume: the version, and the canary under it."""
        version, manifest = self.publish(tensors)
        await self.pull(version, manifest)
        await self.suspend()
        canary = await self.update(version)
        await self.resume()
        return version, canary

    def request(self, prompt: Sequence[int], max_tokens: int, **changes: object) -> Generate:
        """A request for ``max_tokens`` tokens at temperature 1; ``changes`` are fields of ``Generate``."""
        seq = next(self._seq)
        request = Generate(
            seq=seq,
            request_id=f"r{seq}",
            prompt=pack_ids(prompt),
            max_tokens=max_tokens,
            temperature=1.0,
            allowed_token_ids=b"",
            stop_token_ids=b"",
            ignore_eos=True,
            seed=None,
        )
        return msgspec.structs.replace(request, **changes)

    async def generate(self, prompt: Sequence[int], max_tokens: int, **changes: object) -> Generated:
        answer = await self.ask(self.request(prompt, max_tokens, **changes))
        assert isinstance(answer, Generated)
        assert sum(run.count for run in answer.versions) == len(unpack_ids(answer.ids))
        return answer
