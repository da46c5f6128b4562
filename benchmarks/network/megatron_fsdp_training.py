"""Trains the LLaMA under Megatron-FSDP with `optim_grads`: whole weights, sharded gradients.

Its reduce-scatter is torch's, which over gloo moves twice the ideal bytes. Exchanges run within the backward
pass, once a microbatch, and weights are gathered within the optimizer's step: neither can be timed alone.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import megatron_patch
from benchmarks.network.llama import Llama
from benchmarks.network.training import Training


class MegatronFsdpTraining(Training):
    """The training under Megatron-FSDP.

    Args:
        llama: the shape of the model.
        compression: the options to attach with; method none only counts bytes.
        learning_rate: Adam's learning rate, the same in every step.
        buckets: about how many buckets Megatron makes of the gradients.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        compression: megatron_patch.CompressionConfig,
        learning_rate: float = 3e-4,
        buckets: int = 8,
    ) -> None:
        super().__init__(llama, overlap=True)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads",
            overlap_grad_reduce=True,
            bucket_size=max(1, llama.parameters // buckets),
        )
        self._parameters_whole = sum(parameter.numel() for parameter in self.module.parameters())
        self.model = FullyShardedDataParallel(self.config, settings, self.module)
        megatron_patch.attach([self.model], compression)
        options = OptimizerConfig(
            lr=learning_rate,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync

    @property
    def gradient_bytes(self) -> float:
        return megatron_patch.report([self.model]).gradient_bytes

    @property
    def weight_bytes(self) -> float:
        return megatron_patch.report([self.model]).weight_bytes

    @property
    def weights_sent(self) -> float:
        return self._parameters_whole / self.ranks * (self.ranks - 1)

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> None:
        successful, *_ = self.optimizer.step()
        if not successful:
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")

    def close(self) -> None:
        megatron_patch.disable()
        self.optimizer = None
        super().close()
