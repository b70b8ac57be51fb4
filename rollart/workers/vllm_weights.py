"""What vLLM's engine process imports: weights from the store, and an end with the worker.

``StoreExecutor`` is named to vLLM as its executor, so the engine process imports this module when it starts.
It runs the model in the engine process itself (two processes an engine, not three), registers the transfer
backend, and kills the process when the worker that started it is gone, however it went.

An update is whole or it fails: weights that the version lacks are an error, not the old ones kept.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollart.weights.mapped import open_weights
from rollart.weights.tensors import tensors_of
from rollart.workers.vllm_engine import SCRATCH_VARIABLE, SLOWDOWN_VARIABLE

__all__ = ["BACKEND", "StoreExecutor", "StoreRanksExecutor", "StoreTransfer"]

BACKEND = "rollart_store"
"""The backend's name in vLLM's ``WeightTransferConfig``."""


@dataclass
class StoreInit(WeightTransferInitInfo):
    """Nothing: each update says where its version is."""


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):
    """Which version to load."""

    manifest: str = ""


class StoreTransfer(WeightTransferEngine[StoreInit, StoreUpdate]):
    """Loads a version of the local weight store into the engine's model."""

    init_info_cls: ClassVar[type[StoreInit]] = StoreInit  # type: ignore[misc]
    update_info_cls: ClassVar[type[StoreUpdate]] = StoreUpdate  # type: ignore[misc]

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Make the layers take checkpoint weights again: on CPU the ones they compute with are packed."""
        if current_platform.is_cpu():
            for module in self.model.modules():
                if isinstance(module, FusedMoEMethodBase):
                    # With a kernel it takes the experts' weights as they are, and the kernel reads packed ones.
                    module.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version; ``ValueError`` when it can't be read or is not this model's."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Map the version's buckets, which the worker has checked, and load from the mapping."""
        with open_weights(update_info.manifest, verify=False) as weights:
            self.model.load_weights(tensors_of(weights))  # type: ignore[operator]
        missing = self._unloaded()
        if missing:
            raise ValueError(
                f"the weights at {update_info.manifest} lack a part of this model: "
                f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}"
            )

    def finish_weight_update(self) -> None:
        """Let the layers process what they got, and pack again what shares a weight."""
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        head = getattr(self.model, "lm_head", None)
        if self._tied and current_platform.is_cpu() and head is not None:
            # A tied head loads nothing itself, so nothing else refreshes its packed copy of the embedding.
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _unloaded(self) -> list[str]:
        """Layers that did not get all of their weights."""
        names = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            computed = next(layer.parameters(recurse=False), None) is None
            if computed or not info.can_load() or is_deferred_attention_layer(layer):
                continue
            got, needed = info.load_numel, info.load_numel_total or 0
            tied_head = self._tied and isinstance(layer, ParallelLMHead)
            padded = isinstance(layer, VocabParallelEmbedding) and got > 0
            if got < needed and not tied_head and not padded:
                names.append(name)
        return names


class StoreExecutor(UniProcExecutor):
    """Runs the model in the engine process, which ends when the worker does."""

    def _init_executor(self) -> None:
        end_with_parent()
        # It warns of every layer that an update leaves as it is, computed and tied ones too; ``_unloaded`` knows.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._slowdown = float(os.environ.get(SLOWDOWN_VARIABLE, "1"))
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """A step; on a CPU it may have to take longer than it does, to stand for slower hardware."""
        started = time.perf_counter()
        output = super().execute_model(scheduler_output, non_block)
        if self._slowdown > 1:
            time.sleep((self._slowdown - 1) * (time.perf_counter() - started))
        return output


class StoreRanksExecutor(MultiprocExecutor):
    """Runs a part of the model in each of several processes, which end when the engine process does."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


def end_with_parent() -> None:
    """Kill this process as soon as the process that spawned it is gone, and remove its temporary files."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    scratch = os.environ.get(SCRATCH_VARIABLE)

    def wait() -> None:
        parent.join()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StoreTransfer)
