"""Seconds of one step of a simulated inference engine: a roofline, its efficiencies from published measurements.

The efficiencies come from one public data set, measured with vLLM 0.30 on one H100 SXM (the H800's compute and memory)
serving Qwen3-8B, closed loop, fixed lengths: github.com/tgarg01/silybench-data, runs 20260924T125045Z (bf16) and
20260924T225750Z (fp8), CC BY 4.0.  They come from times to the first token and between tokens; the test holds the whole
engine against throughputs of the same run.
What follows from it is used for all hardware; nothing here was measured on an H800 or an H20.
"""

from __future__ import annotations

from typing import Protocol

from rollart.simulation.hardware import HardwareClass, ModelShape

__all__ = ["EngineCosts", "StepCosts"]

COMPUTE_EFFICIENCY = 0.55
"""Of the bf16 peak in prefill.  One prompt of 1,024 / 2,048 / 8,192 tokens has its first token after 34 / 61 / 254 ms,
7 ms of which are not its step (a prompt of 128 tokens: 14 ms, where a step takes 7): 537 / 550 / 542 of 989.5 TFLOP/s.
"""
BANDWIDTH_EFFICIENCY = 0.94
"""Of the memory's peak.  fp8 saves 6.95 GB of the weights and 2.21 ms of the step at batch 1: 3.15 of 3.35 TB/s.  Keys
and values go as fast: 256 requests at 640 against 192 tokens of context are 16.9 GB and 5.25 ms more, 3.2 TB/s."""
STEP_OVERHEAD_S = 2.0e-3
"""A step at batch 1 takes 6.83 ms, 4.81 of them for its 15.1 GB of weights at that rate.  (Qwen's own benchmark, SGLang
on an H20, has the 0.6B model at 414 tokens/s: 2.4 ms a step, of which its 1.2 GB explain 0.3.)"""
SEQUENCE_OVERHEAD_S = 12e-6
"""For each request that samples a token.  64 / 128 requests take 0.8 / 1.4 ms a step more than roofline and overhead.
"""
LINK_EFFICIENCY = 0.8
"""Of NVLink's rate one way: 160 of 200 GB/s on an H800 (arXiv:2505.09343, section 4.3)."""
ALLREDUCE_LATENCY_S = 10e-6
"""Of one all-reduce of few bytes.  An assumption: the order of magnitude of a kernel and a barrier over NVLink."""
MEMORY_UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization."""
WORKSPACE_BYTES = 5.3e9
"""Per GPU, within that share, for activations and graphs: the run above reports 377,024 tokens of KV cache."""


class StepCosts(Protocol):
    """What a simulated engine asks of its hardware."""

    kv_capacity: int
    """Tokens of KV cache."""

    def step_s(
        self,
        prefill_tokens: float,
        prefill_context: float,
        decodes: float,
        decode_context_tokens: float,
        *,
        prefill_pairs: float | None = None,
        samples: float | None = None,
    ) -> float:
        """Seconds of one step; arguments as of ``EngineCosts.step_s``."""


class EngineCosts:
    """Of one engine: ``model`` in bf16 on ``tensor_parallel`` devices of one class in one node.

    Tensor parallelism divides compute, weights and KV evenly and adds two all-reduces a layer, which nothing overlaps.
    """

    def __init__(
        self,
        hardware: HardwareClass,
        model: ModelShape,
        *,
        tensor_parallel: int = 1,
        compute_efficiency: float = COMPUTE_EFFICIENCY,
        bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
        step_overhead_s: float = STEP_OVERHEAD_S,
        sequence_overhead_s: float = SEQUENCE_OVERHEAD_S,
        link_efficiency: float = LINK_EFFICIENCY,
        allreduce_latency_s: float = ALLREDUCE_LATENCY_S,
        memory_utilization: float = MEMORY_UTILIZATION,
        workspace_bytes: float = WORKSPACE_BYTES,
    ) -> None:
        if tensor_parallel < 1 or model.attention_heads % tensor_parallel:
            raise ValueError(
                f"{model.name} has {model.attention_heads} attention heads: they can't be divided among"
                f" {tensor_parallel} devices"
            )
        self.hardware = hardware
        self.model = model
        self.tensor_parallel = tensor_parallel
        usable = (hardware.memory * memory_utilization - workspace_bytes) * tensor_parallel
        self.kv_capacity = int((usable - model.weight_bytes) / model.kv_bytes_per_token)
        """Tokens of KV cache."""
        if self.kv_capacity < 1:
            raise ValueError(
                f"{model.name} doesn't fit: {model.weight_bytes / 1e9:.1f} GB of weights, and {tensor_parallel} "
                f"{hardware.name} have {usable / 1e9:.1f} GB for weights and KV cache"
            )
        flops = hardware.flops * compute_efficiency * tensor_parallel
        bandwidth = hardware.memory_bandwidth * bandwidth_efficiency * tensor_parallel
        self._body_s = 2 * model.body_parameters / flops
        self._table_s = 2 * model.table_parameters / flops
        self._attention_s = model.attention_flops_per_position / flops
        self._weights_s = model.streamed_bytes / bandwidth
        self._kv_s = model.kv_bytes_per_token / bandwidth
        self._sequence_s = sequence_overhead_s
        self._fixed_s = step_overhead_s
        self._token_s = 0.0
        if tensor_parallel > 1:
            # A ring moves 2(n-1)/n of each activation through every device's link.
            reduced = 2 * model.layers * model.hidden * model.weight_element_bytes
            share = 2 * (tensor_parallel - 1) / tensor_parallel
            self._token_s = reduced * share / (hardware.interconnect * link_efficiency)
            self._fixed_s += 2 * model.layers * allreduce_latency_s

    def step_s(
        self,
        prefill_tokens: float,
        prefill_context: float,
        decodes: float,
        decode_context_tokens: float,
        *,
        prefill_pairs: float | None = None,
        samples: float | None = None,
    ) -> float:
        """One step of continuous batching: ``max(compute, memory traffic)``, all-reduces and overheads.

        Args:
            prefill_tokens: of prompts, in this step.
            prefill_context: tokens already in the KV cache before them, summed over the requests they belong to.
            decodes: requests that sample their next token.
            decode_context_tokens: of those, summed.
            prefill_pairs: (token, position it attends to) among the prompts; as for one request if not given.
            samples: tokens that are sampled; as many as ``decodes`` if not given.
        """
        if prefill_pairs is None:
            prefill_pairs = prefill_tokens * prefill_context + prefill_tokens * (prefill_tokens + 1) / 2
        if samples is None:
            samples = decodes
        tokens = prefill_tokens + decodes
        compute = (
            tokens * self._body_s
            + samples * self._table_s
            + (prefill_pairs + decode_context_tokens) * self._attention_s
        )
        # Written: a token each; read: all that is attended to, once for the whole chunk of a prompt.
        traffic = self._weights_s + (tokens + prefill_context + decode_context_tokens) * self._kv_s
        return (
            (compute if compute > traffic else traffic)
            + tokens * self._token_s
            + samples * self._sequence_s
            + self._fixed_s
        )
