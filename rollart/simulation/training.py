"""Seconds of a trainer's work: a train_step, the log-probabilities before it, and handing its weights out.

FLOPs over the peak times a published utilisation, plus what the utilisation doesn't contain.  Memory for activations
isn't modelled; that the states fit is checked.
"""

from __future__ import annotations

import msgspec

from rollart.simulation.hardware import INFINIBAND_400, ClusterLink, HardwareClass, ModelShape

__all__ = ["MODEL_FLOPS_UTILIZATION", "Parallelism", "TrainingCosts", "publish_s"]

MODEL_FLOPS_UTILIZATION = 0.41
"""Of the bf16 peak, for the model's FLOPs (a recomputed forward pass doesn't count).  Megatron-LM's README, "Training
Speed and Scalability": 41% for the smallest model (2B) to 47-48% for the largest, end to end on H100, with optimizer,
communication and loading.  The lower end: our models are small, and sequences of agents are uneven."""
REFERENCE_LINK = 450e9
"""Bytes/s one way of the H100's NVLink, which that figure contains (H100 SXM datasheet: 900 GB/s, both directions)."""
LINK_EFFICIENCY = 0.8
"""As in ``engine_costs``."""
MEMORY_EFFICIENCY = 0.8
"""Of the memory's peak, for the optimizer's element-wise update.  An assumption."""
GRADIENT_BYTES = 4
STATE_BYTES = 12
"""Per parameter: Megatron's distributed optimizer keeps 6 + 12/d bytes for bf16 weights with fp32 gradients, d the data
parallel size: weights 2, gradients 4; fp32 weights and Adam's two moments 12, divided."""
UPDATE_BYTES = 30
"""Per parameter that the update reads and writes: gradient 4 and states 12 in, states 12 and the bf16 weight 2 out."""


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How a trainer's devices divide the model and the batch."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data


class TrainingCosts:
    """Of one trainer: ``model`` on ``parallelism.devices`` devices of one class, tensor parallel within a node."""

    def __init__(
        self,
        hardware: HardwareClass,
        model: ModelShape,
        parallelism: Parallelism,
        *,
        link: ClusterLink = INFINIBAND_400,
        utilization: float = MODEL_FLOPS_UTILIZATION,
        microbatch_tokens: int = 32768,
        recompute_activations: bool = True,
    ) -> None:
        """``microbatch_tokens`` are packed into one microbatch: the paper's context length.

        ``recompute_activations`` adds a forward pass to the backward one, as contexts of 32k need.
        """
        states = (
            model.parameters
            / (parallelism.tensor * parallelism.pipeline)
            * (model.weight_element_bytes + GRADIENT_BYTES + STATE_BYTES / parallelism.data)
        )
        if states > hardware.memory:
            raise ValueError(
                f"{model.name} doesn't fit: its weights, gradients and optimizer states take {states / 1e9:.1f} GB per "
                f"device, and a {hardware.name} has {hardware.memory / 1e9:.1f} GB"
            )
        self.hardware = hardware
        self.model = model
        self.parallelism = parallelism
        self.state_bytes = states
        """Per device."""
        self._link = link
        self._rate = hardware.flops * utilization * parallelism.devices
        self._microbatch_tokens = microbatch_tokens
        self._recompute = recompute_activations

    def forward_s(self, tokens: float, mean_length: float) -> float:
        """One forward pass, such as to compute log-probabilities again.

        Args:
            tokens: of all sequences, prompts included.
            mean_length: of a sequence, weighted by tokens (Σ length² / Σ length): attention grows with it.
        """
        return self._passes_s(tokens, mean_length, passes=1, sweeps=1)

    def train_step_s(self, tokens: float, mean_length: float, *, updates: int = 1) -> float:
        """Forward, backward and ``updates`` optimizer steps over the batch; arguments as of ``forward_s``."""
        # A backward pass has twice the FLOPs of a forward one, and as much to reduce.
        passes, sweeps = (4, 3) if self._recompute else (3, 2)
        return self._passes_s(tokens, mean_length, passes=passes, sweeps=sweeps) + updates * self.update_s()

    def update_s(self) -> float:
        """One optimizer step: gradients reduced, states updated, weights gathered; nothing of it overlaps."""
        plan, model = self.parallelism, self.model
        local = model.parameters / plan.devices * UPDATE_BYTES
        seconds = local / (self.hardware.memory_bandwidth * MEMORY_EFFICIENCY)
        exchanged = model.parameters / (plan.tensor * plan.pipeline) * (plan.data - 1) / plan.data
        return seconds + self._link.seconds(exchanged * (GRADIENT_BYTES + model.weight_element_bytes))

    def _passes_s(self, tokens: float, mean_length: float, *, passes: int, sweeps: int) -> float:
        """``passes`` times a forward pass's FLOPs, the activations reduced in ``sweeps`` passes over the layers."""
        plan, model = self.parallelism, self.model
        # A token attends to half of its sequence on average.
        seconds = passes * tokens * model.flops_per_token(mean_length / 2) / self._rate
        if plan.tensor > 1:
            # A ring moves 2(n-1)/n of each activation, twice a layer.  The utilisation contains that for the
            # reference's link; a slower one adds the difference.
            reduced = 2 * model.layers * model.hidden * model.weight_element_bytes
            moved = reduced * 2 * (plan.tensor - 1) / plan.tensor * tokens / (plan.data * plan.pipeline)
            slower = max(0.0, 1 / self.hardware.interconnect - 1 / REFERENCE_LINK)
            seconds += sweeps * moved * slower / LINK_EFFICIENCY
        # The bubble of 1F1B is (p - 1) / m of the time (Narayanan et al., arXiv:2104.04473, section 2.2).
        microbatches = max(1.0, tokens / plan.data / self._microbatch_tokens)
        return seconds * (1 + (plan.pipeline - 1) / microbatches)


def publish_s(model: ModelShape, link: ClusterLink, *, streams: int = 1) -> float:
    """To send all weights over ``streams`` links at once, at the link's rate: a lower bound for a weight store.

    The paper's push of the 8B / 14B / 32B weights takes 32.4 / 67.8 / 127.3 s, which is 0.51 / 0.44 / 0.51 GB/s, and
    its pull 6.2 / 16.3 / 29.7 s, which is 2.6 / 1.8 / 2.2 GB/s.
    """
    return link.seconds(model.weight_bytes) / streams
