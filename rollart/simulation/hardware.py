"""What the simulated machines and models are: published figures, each with its source, and nothing measured here.

Units: FLOP/s, bytes, bytes/s, seconds.  ``docs/simulation-models.md`` holds the same figures and what they leave out;
``python -m rollart.simulation.hardware`` prints its tables.
"""

from __future__ import annotations

import sys

import msgspec

__all__ = [
    "CPU",
    "ETHERNET_200",
    "H20",
    "H200",
    "H800",
    "HARDWARE",
    "INFINIBAND_400",
    "MODELS",
    "QWEN3_8B",
    "QWEN3_14B",
    "QWEN3_32B",
    "ClusterLink",
    "HardwareClass",
    "ModelShape",
    "dense_model",
    "tables",
]

GIB = 1 << 30


class HardwareClass(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a kind: a GPU, or a CPU socket."""

    name: str
    flops: float
    """Dense bf16 FLOP/s, at the vendor's peak."""
    memory_bandwidth: float
    """Bytes/s between the device and its own memory, at the vendor's peak."""
    memory: float
    """Bytes of the device's own memory."""
    interconnect: float
    """Bytes/s that the device can send to others in its node (and receive, at the same time), at the peak."""
    cost: float | None
    """Relative to one H20.  None where the paper gives no price."""


# A vendor's GB of GPU memory are GiB (a board of "80 GB" reports 81,559 MiB).  NVLink is sold as the sum of both
# directions; half of it is what a device can send.

H800 = HardwareClass(
    name="H800",
    # NVIDIA H100 SXM datasheet: 1,979 TFLOP/s of bf16 "with sparsity", so 989.5 dense; the H800 keeps the compute and
    # the memory of the H100 SXM (80 GB of HBM3, 3.35 TB/s).
    flops=989.5e12,
    memory_bandwidth=3.35e12,
    memory=80 * GIB,
    # NVLink cut to 400 GB/s, both directions (DeepSeek-V3 hardware paper, arXiv:2505.09343, section 4.1).
    interconnect=200e9,
    # The paper: H20 : H800 = 1 : 2.85.
    cost=2.85,
)
H20 = HardwareClass(
    name="H20",
    # NVIDIA H20 product brief: 148 TFLOP/s of bf16, 96 GB of HBM3, 4.0 TB/s, NVLink 900 GB/s.
    flops=148e12,
    memory_bandwidth=4.0e12,
    memory=96 * GIB,
    interconnect=450e9,
    cost=1.0,
)
H200 = HardwareClass(
    name="H200",
    # NVIDIA H200 SXM datasheet: 1,979 TFLOP/s of bf16 with sparsity, 141 GB of HBM3e, 4.8 TB/s, NVLink 900 GB/s.
    flops=989.5e12,
    memory_bandwidth=4.8e12,
    memory=141 * GIB,
    interconnect=450e9,
    cost=None,
)
CPU = HardwareClass(
    name="CPU",
    # One socket AMD EPYC 9654: 96 cores at 2.4 GHz (base).  A Zen 4 core retires one 512-bit VDPBF16PS a cycle: 32
    # multiply-adds, so 64 FLOP.  12 channels of DDR5-4800: 460.8 GB/s (AMD EPYC 9004 datasheet).  The memory is that
    # of a common node (12 modules of 64 GB); the socket takes up to 6 TB.
    flops=96 * 2.4e9 * 64,
    memory_bandwidth=460.8e9,
    memory=768 * GIB,
    # Four xGMI links of 16 lanes at 32 Gb/s to the other socket.
    interconnect=4 * 16 * 32e9 / 8,
    cost=None,
)
HARDWARE = {hardware.name: hardware for hardware in (H800, H20, H200, CPU)}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder-only transformer with grouped-query attention."""

    name: str
    parameters: int
    table_parameters: int
    """Of a table of vocabulary × hidden: one for the embeddings, another for the output unless ``tied``."""
    tied: bool = False
    layers: int
    hidden: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    """Tokens of prompt and answer together."""
    weight_element_bytes: float = 2
    kv_element_bytes: float = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_element_bytes

    @property
    def body_parameters(self) -> int:
        """What every token is multiplied with, sampled or not: all but the tables."""
        return self.parameters - (1 if self.tied else 2) * self.table_parameters

    @property
    def streamed_bytes(self) -> float:
        """Weights that one step reads: the embedding table is only looked up."""
        return (self.body_parameters + self.table_parameters) * self.weight_element_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Of keys and values, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_element_bytes

    @property
    def attention_flops_per_position(self) -> float:
        """FLOPs for one token to attend to one position: a product with its key and one with its value."""
        return 4 * self.layers * self.attention_heads * self.head_dim

    def flops_per_token(self, context: float) -> float:
        """FLOPs of the forward pass of one token that attends to ``context`` positions, with its logits.

        2 for each parameter but the embedding table's (7.6 / 5.3 / 2.4 % of the 8B / 14B / 32B model).
        """
        return (
            2 * (self.body_parameters + self.table_parameters) + self.attention_flops_per_position * context
        )


def dense_model(
    name: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    attention_heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    max_context: int,
    tied: bool = False,
    element_bytes: float = 2,
) -> ModelShape:
    """A model of Qwen3's architecture: gated FFN, RMS norms, norms of queries and keys, no biases."""
    attention = 2 * hidden * head_dim * (attention_heads + kv_heads)
    layer = attention + 3 * hidden * ffn + 2 * hidden + 2 * head_dim
    table = vocabulary * hidden
    return ModelShape(
        name=name,
        parameters=(1 if tied else 2) * table + layers * layer + hidden,
        table_parameters=table,
        tied=tied,
        layers=layers,
        hidden=hidden,
        attention_heads=attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        weight_element_bytes=element_bytes,
        kv_element_bytes=element_bytes,
    )


# The config.json of Qwen/Qwen3-8B, -14B and -32B.  max_position_embeddings is 40,960: 32,768 tokens of answer and 8,192
# of prompt.  Their bytes in bf16 are the paper's 15.26, 27.51 and 61.02 "GB" (GiB) of weights.
QWEN3_8B = dense_model(
    "Qwen3-8B",
    layers=36,
    hidden=4096,
    ffn=12288,
    attention_heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    max_context=40960,
)
QWEN3_14B = dense_model(
    "Qwen3-14B",
    layers=40,
    hidden=5120,
    ffn=17408,
    attention_heads=40,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    max_context=40960,
)
QWEN3_32B = dense_model(
    "Qwen3-32B",
    layers=64,
    hidden=5120,
    ffn=25600,
    attention_heads=64,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    max_context=40960,
)
MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B)}


class ClusterLink(msgspec.Struct, frozen=True, kw_only=True):
    """What carries bytes between nodes."""

    name: str
    bits_per_s: float
    efficiency: float
    """Share of the line rate that a large transfer gets."""

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8 * self.efficiency

    def seconds(self, size: float) -> float:
        """To send ``size`` bytes with nobody else on the link.  Latency and jitter are the network model's."""
        return size / self.bytes_per_s


# The paper: 400 Gb/s InfiniBand inside a cluster.  Efficiency: 40 of 50 GB/s (arXiv:2505.09343, section 4.3).
INFINIBAND_400 = ClusterLink(name="400 Gb/s InfiniBand", bits_per_s=400e9, efficiency=0.8)
# The paper: 200 Gb/s Ethernet across clusters.  Efficiency: an assumption, below InfiniBand's.
ETHERNET_200 = ClusterLink(name="200 Gb/s Ethernet", bits_per_s=200e9, efficiency=0.7)


def tables() -> str:
    """The tables of ``docs/simulation-models.md``."""
    lines = [
        "| hardware | bf16 TFLOP/s | memory TB/s | memory GiB | in-node GB/s, one way | cost |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for hardware in HARDWARE.values():
        cost = "–" if hardware.cost is None else f"{hardware.cost:g}"
        lines.append(
            f"| {hardware.name} | {hardware.flops / 1e12:.1f} | {hardware.memory_bandwidth / 1e12:.2f} "
            f"| {hardware.memory / GIB:.0f} | {hardware.interconnect / 1e9:.0f} | {cost} |"
        )
    lines += [
        "",
        "| model | parameters | layers | hidden | heads (KV) | weights GiB | KV KiB/token "
        "| GFLOP/token at 0 / 32k context |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in MODELS.values():
        lines.append(
            f"| {model.name} | {model.parameters:,} | {model.layers} | {model.hidden} "
            f"| {model.attention_heads} ({model.kv_heads}) | {model.weight_bytes / GIB:.2f} "
            f"| {model.kv_bytes_per_token / 1024:.0f} "
            f"| {model.flops_per_token(0) / 1e9:.1f} / {model.flops_per_token(32768) / 1e9:.1f} |"
        )
    lines += ["", "| link | Gb/s | efficiency | GB/s |", "|---|---:|---:|---:|"]
    for link in (INFINIBAND_400, ETHERNET_200):
        lines.append(
            f"| {link.name} | {link.bits_per_s / 1e9:.0f} | {link.efficiency:g} | {link.bytes_per_s / 1e9:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
