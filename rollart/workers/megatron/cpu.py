"""Lets Megatron-core 0.16.1 run on a torch without CUDA.

Megatron asks ``torch.cuda`` for the current device, its random state and synchronisation, and makes a few
tensors on the literal device ``cuda``.  Where CUDA is absent ``answer_for_cuda`` makes those questions answer
with the CPU; where CUDA is present it does nothing at all, so that GPU machines run Megatron untouched.
It must be called before anything of ``megatron`` is imported, whose warnings about missing GPU packages it
silences: they would greet every CPU run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["answer_for_cuda"]

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty")
"""The tensor factories that Megatron calls with ``device="cuda"``."""
LITERAL_DEVICE = (
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)
"""The modules that do so, as far as they are used here."""

_installed = False


class _Stream:
    """Stands for a CUDA stream or event: on the CPU everything has happened when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: object) -> _Stream:
        """An event that has happened."""
        return self

    def query(self) -> bool:
        """Whether all work is done."""
        return True


def answer_for_cuda() -> bool:
    """Answer Megatron's questions to CUDA with the CPU, if there is no CUDA; whether that was done."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    for message in (".*Apex (is|are) not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message, module="megatron")
    _install_device()
    torch.Tensor.type = _type_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    _install_random_state()
    # These modules see torch through a stand-in: patched in torch itself, the factories would no longer be
    # those that ``with torch.device(...)`` knows, which breaks transformers.
    for name in LITERAL_DEVICE:
        module: Any = importlib.import_module(name)
        module.torch = _TorchOnCpu("torch")
    _installed = True
    return True


def _install_device() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _install_random_state() -> None:
    cuda: Any = torch.cuda
    cuda.random.get_rng_state = cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    # Megatron's own setter goes to CUDA's generators directly; importing it here is safe, the device answers.
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _TorchOnCpu(types.ModuleType):
    """``torch``, except that its factories make on the CPU what is asked for on CUDA."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for factory in FACTORIES:
            setattr(self, factory, _on_cpu(getattr(torch, factory)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _type_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimisers compare ``tensor.type()`` with names such as ``torch.cuda.FloatTensor``."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core."):
                return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_
