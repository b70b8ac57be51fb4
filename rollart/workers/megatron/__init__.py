"""The Megatron-core trainer: model, optimiser, checkpoints and the training step, without any networking.

Importing this package makes Megatron-core importable on a machine without CUDA (see ``cpu``); its modules
therefore import ``megatron`` like any other package.
"""

from __future__ import annotations

from rollart.workers.megatron.cpu import answer_for_cuda
from rollart.workers.megatron.fixes import fix_megatron

__all__ = ["ON_CPU"]

ON_CPU = answer_for_cuda()
"""Whether the CPU stands in for CUDA."""
fix_megatron(on_cpu=ON_CPU)
