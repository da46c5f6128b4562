"""Trains the LLaMA under PyTorch's FSDP2: sharded over all ranks, or over each host's ranks and replicated.

Weights and gradients are bf16, Adam's copies fp32, as in Megatron. Each transformer layer is a parameter
group, and so is the rest. Exchanges run within the backward pass, from which their time cannot be separated.
With several microbatches only the last one exchanges; with replicas every one is reduced within the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_patch
from benchmarks.network.llama import Llama
from benchmarks.network.training import Training


class Fsdp2Training(Training):
    """The training under FSDP2.

    Args:
        llama: the shape of the model.
        shards: how many ranks the weights are sharded over; the other ranks hold replicas.
        compression: the options to attach with; method none only counts bytes, None attaches nothing.
        learning_rate: Adam's learning rate, the same in every step.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        shards: int,
        compression: megatron_patch.CompressionConfig | None,
        learning_rate: float = 3e-4,
    ) -> None:
        super().__init__(llama, overlap=True)
        self._shards = shards
        if shards < self.ranks:
            sizes, names = (self.ranks // shards, shards), ("replicate", "shard")
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        else:  # Of the group that is there: over gloo with a GPU, init_device_mesh would make one of NCCL.
            assert dist.group.WORLD is not None
            mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        self._parameters_whole = sum(parameter.numel() for parameter in self.module.parameters())
        for layer in self.module.module.decoder.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(self.module, mesh=mesh)
        self._attached = compression is not None
        if self._attached:
            megatron_patch.attach(self.model, compression)
        self.config.no_sync_func = self._no_sync
        self._parameters = list(self.model.parameters())
        local = [parameter.detach().to_local() for parameter in self._parameters]
        self._copies = [weights.float() for weights in local]
        self._adam = torch.optim.AdamW(self._copies, lr=learning_rate)
        # Compression counts the steps of an optimizer of the model's own parameters.
        self._steps = torch.optim.SGD(self._parameters, lr=0.0)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        replicated = self._shards < self.ranks
        switch = self.model.set_requires_all_reduce if replicated else self.model.set_requires_gradient_sync
        switch(False)
        yield
        switch(True)

    @property
    def gradient_bytes(self) -> float:
        return megatron_patch.report(self.model).gradient_bytes if self._attached else math.nan

    @property
    def weight_bytes(self) -> float:
        """A microbatch gathers the weights for the forward pass and again for the backward pass."""
        return 2 * 2 * self.weights_sent

    @property
    def weights_sent(self) -> float:
        return self._parameters_whole / self._shards * (self._shards - 1)

    def zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def update(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.to_local().float()
        self._adam.step()
        self._steps.step()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.to_local().copy_(copy)

    def close(self) -> None:
        megatron_patch.disable()
        self._parameters, self._copies = [], []
        super().close()
