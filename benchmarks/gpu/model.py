"""The network benchmark's LLaMA on a GPU: Megatron's step as recipes have it, and FSDP2's."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.part import DEVICE, ON_GPU

if not ON_GPU:  # The package's replacements of Megatron's CUDA calls, before Megatron binds them.
    from megatron_patch.megatron.cpu import device

    device.install()

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from benchmarks.gpu import twin_group
from benchmarks.network.fsdp2_training import Fsdp2Training
from benchmarks.network.llama import Llama
from benchmarks.network.megatron_training import MegatronTraining
from benchmarks.network.training import Training
from megatron_patch.config import CompressionConfig

SHAPES = {
    "tiny": Llama(layers=2, hidden=64, ffn=176, heads=4, vocabulary=512, sequence=32, microbatch=2),
    "small": Llama(layers=4, hidden=256, ffn=688, heads=4, vocabulary=2048, sequence=128, microbatch=4),
    "30m": Llama(layers=6, hidden=512, ffn=1376, heads=8, vocabulary=8192, sequence=512, microbatch=4),
    "350m": Llama(layers=24, hidden=1024, ffn=2736, heads=16, vocabulary=32000, sequence=2048, microbatch=4),
    "1.3b": Llama(layers=24, hidden=2048, ffn=5461, heads=16, vocabulary=32000, sequence=2048, microbatch=4),
}
BUCKET = 40_000_000
"""Elements of a bucket, as Megatron's default has it."""
METHODS: dict[str, CompressionConfig | None] = {
    "stock": None,
    "stock_bf16": None,
    "loco": CompressionConfig(method="loco", bits=4, start_step=0, weight_gather="stock"),
    "loco+exact": CompressionConfig(method="loco", bits=4, start_step=0, weight_gather="exact"),
    "loco2+exact": CompressionConfig(method="loco", bits=2, start_step=0, weight_gather="exact"),
    "none": CompressionConfig(method="none", weight_gather="stock"),
    "none+exact": CompressionConfig(method="none", weight_gather="exact"),
}
"""Of all but one Megatron accumulates and reduces gradients in fp32, its default. The first matter most."""


class _FusedAttention(torch.nn.Module):
    """Causal attention by torch; Megatron's own, without Transformer Engine, writes all scores to memory."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))  # [s, b, h, d] -> [b, h, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class _OnDevice(Training):
    device = DEVICE

    def layer_spec(self) -> Any:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _FusedAttention
        return spec


class _Megatron(_OnDevice, MegatronTraining):
    pass


class _Fsdp2(_OnDevice, Fsdp2Training):
    pass


def one_of(ranks: int) -> None:
    """Become one of that many ranks, whose others are its twins, with Megatron's groups."""
    twin_group.initialize(ranks)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def megatron(llama: Llama, method: str, bucket: int = BUCKET) -> MegatronTraining:
    """Return a training under Megatron's DDP and distributed optimizer, all overlapped."""
    return _Megatron(
        llama,
        gradients="bf16" if method == "stock_bf16" else "fp32",
        compression=METHODS[method],
        buckets=max(1, llama.parameters // bucket),
        overlap=True,
        overlap_param_gather=True,
        clip_grad=1.0,
    )


def fsdp2(llama: Llama, method: str) -> Fsdp2Training:
    return _Fsdp2(llama, shards=torch.distributed.get_world_size(), compression=METHODS[method])
