"""Trains the LLaMA under PyTorch's DDP, as a user without Megatron would.

A communication hook all-reduces the gradients: PyTorch's in bf16, or its PowerSGD (Vogels et al., NeurIPS
2019), which sends two thin matrices in place of each gradient matrix, or LoCo's. Every rank holds all of the
weights and all of Adam's state, in fp32 as in Megatron, so that there is no gather.

Without overlap all gradients are one bucket, which DDP sends after the backward pass. The exchange is then
timed from the hook's call, after a barrier, to the end of the backward pass, which waits for it. With overlap
DDP's own bucket size is used, and the time of the exchange, which cannot be separated from the backward pass,
is 0.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import megatron_patch
from benchmarks.network.llama import Llama
from benchmarks.network.training import Training

POWERSGD_START = 2
"""PowerSGD begins after this many steps, because DDP rebuilds its buckets after the first one."""
_ONE_BUCKET_MB = 1 << 20


class DdpTraining(Training):
    """The training under PyTorch's DDP.

    Args:
        llama: the shape of the model.
        powersgd_rank: the rank of the matrices that PowerSGD sends; None uses the bf16 hook.
        compression: the options to attach with, in place of both hooks.
        learning_rate: Adam's learning rate, the same in every step.
        overlap: whether buckets are exchanged while the backward pass computes.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        powersgd_rank: int | None = None,
        compression: megatron_patch.CompressionConfig | None = None,
        learning_rate: float = 3e-4,
        overlap: bool = False,
    ) -> None:
        super().__init__(llama, overlap)
        self.model = DistributedDataParallel(
            self.module,
            bucket_cap_mb=None if overlap else _ONE_BUCKET_MB,
            init_sync=False,  # All ranks have the same weights, from the same seed.
            gradient_as_bucket_view=True,
        )
        self.config.no_sync_func = self.model.no_sync
        self._powersgd: Any = None
        self._hook: Any = default_hooks.bf16_compress_hook
        if powersgd_rank is not None:
            self._hook = powerSGD_hook.powerSGD_hook
            self._powersgd = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=POWERSGD_START
            )
        self._compression = compression
        if compression is not None:
            megatron_patch.attach(self.model, compression)
            self._steps = torch.optim.SGD(self.module.parameters(), lr=0.0)  # Compression counts its steps.
        else:
            # DDP checks a hook's annotations and refuses the strings that they are in this file.
            self.model.register_comm_hook(self._powersgd, lambda state, bucket: self._exchange(state, bucket))
        self._started: float | None = None
        self._elements_before = 0
        self._elements = 0
        self._parameters = list(self.module.parameters())
        self._copies = [parameter.detach().float() for parameter in self._parameters]
        self._adam = torch.optim.AdamW(self._copies, lr=learning_rate)

    def _exchange(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self.overlap:
            self.exchange_begins()
            self._started = time.perf_counter()
        return self._hook(state, bucket)

    @property
    def gradient_bytes(self) -> float:
        if self._compression is not None:
            return megatron_patch.report(self.model).gradient_bytes
        return 2 * (self.ranks - 1) / self.ranks * 2 * self._elements

    @property
    def weight_bytes(self) -> float:
        return 0.0

    @property
    def weights_sent(self) -> float:
        return 0.0

    def zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def backward_ended(self) -> None:
        if self._started is not None:
            self.lap.exchange = time.perf_counter() - self._started
            self._started = None
            self.exchange_ended()
        self._elements = sum(parameter.numel() for parameter in self._parameters)
        if self._powersgd is not None:
            total = self._powersgd.total_numel_after_compression
            if total > self._elements_before:
                self._elements, self._elements_before = total - self._elements_before, total

    @torch.no_grad()
    def update(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
        self._adam.step()
        if self._compression is not None:
            self._steps.step()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.copy_(copy)

    def close(self) -> None:
        if self._compression is not None:
            megatron_patch.disable()
        self._parameters, self._copies = [], []
        self._powersgd = None
        super().close()
