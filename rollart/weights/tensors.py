"""Torch tensors to and from a weight store, without copies where the tensor lies in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rollart.weights.store import HostWeights, NamedBuffer, StoreError

__all__ = ["buffers_of", "tensors_of"]


def buffers_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[NamedBuffer]:
    """What ``publish`` takes; each tensor is brought to the host, one at a time, if it isn't there."""
    for name, tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        flat = host.reshape(-1).view(torch.uint8)
        yield name, str(host.dtype).removeprefix("torch."), tuple(host.shape), flat.numpy()


def tensors_of(weights: HostWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a pulled version, on the mapped memory; they keep it mapped as long as they live."""
    for tensor, view in weights:
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise StoreError(f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which torch does not know")
        if tensor.size:
            yield tensor.name, torch.frombuffer(view, dtype=dtype).reshape(tensor.shape)
        else:
            yield tensor.name, torch.empty(tensor.shape, dtype=dtype)
