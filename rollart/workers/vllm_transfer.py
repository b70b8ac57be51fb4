"""How an engine sends keys and values to another, and takes them: vLLM's NixlConnector, by the run's config.

Every engine of a run that splits requests can do both, so that a worker changes its phase without a restart.  On a
machine's own network each engine has a loopback address of its own, made of its worker's process id, so that no two
ever ask for the same port.
"""

from __future__ import annotations

import math
import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["REMOTE_PREFILL", "connector_options", "connector_variables", "handover", "pack_handover"]

HOST_VARIABLE = "ROLLART_KV_HOST"
"""The address at which engines of other machines reach this one's; by default only this machine's do."""
LEASES = 4
"""A prefilled prompt that nobody fetches is dropped after so many times the silence that makes a worker count as lost.
Who fetches it renews the lease; who is so late that it has run out is lost to the controller, and not believed."""
REMOTE_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a request says whose prompt another engine will fetch."""


def connector_variables(*, on_cpu: bool) -> dict[str, str]:
    """Variables of the engine's process."""
    host = os.environ.get(HOST_VARIABLE) or _own_loopback()
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    wanted = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if on_cpu:
        wanted["UCX_TLS"] = os.environ.get("UCX_TLS", "tcp,self,sm")
    if host.startswith("127."):
        wanted["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
    return wanted


def connector_options(*, on_cpu: bool, silence_s: float) -> dict[str, Any]:
    """Arguments of the engine; a worker counts as lost when it is silent for ``silence_s``."""
    from vllm.config import KVTransferConfig

    scheduler = "HoldingScheduler" if on_cpu else "HoldingAsyncScheduler"
    transfer: KVTransferConfig = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu" if on_cpu else "cuda",
        kv_connector_extra_config={"kv_lease_duration": max(12, math.ceil(LEASES * silence_s))},
    )
    return {
        "kv_transfer_config": transfer,
        "scheduler_cls": f"rollart.workers.vllm_scheduler.{scheduler}",
    }


def pack_handover(params: dict[str, Any] | None) -> bytes:
    """What the prefilling engine says of where the keys and values are."""
    return msgspec.msgpack.encode(params) if params else b""


def handover(packed: bytes) -> dict[str, Any]:
    """For the decoding engine; ``msgspec.DecodeError`` when it is none."""
    params = msgspec.msgpack.decode(packed, type=dict[str, Any])
    params.pop("remote_prefill_cached_tokens", None)  # or vLLM tells of the other engine's cache
    # MessagePack knows no tuples; vLLM tells a group's blocks from a block by them.
    params["remote_block_ids"] = tuple(params.get("remote_block_ids") or ())
    return params


def _own_loopback() -> str:
    number = os.getpid()
    return f"127.{1 + (number >> 16) % 254}.{(number >> 8) & 255}.{number & 255}"
