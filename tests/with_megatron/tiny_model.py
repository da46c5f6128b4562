"""A tiny Megatron model in a worker: a few odd-sized parameters whose gradients a test chooses.

    tiny = build(seed=3)                      # every rank, in a worker of the pool
    megatron_patch.attach([tiny.ddp], config)
    tiny.step(tiny.random_gradients(0))       # backward pass, exchange, optimizer

Each parameter w enters the loss as sum(w * g): its gradient is exactly g, through autograd and Megatron's
hooks. Everything else is Megatron's own: DistributedDataParallel, buckets, the distributed optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from seeds import seeded

SHAPES = ((13, 17), (129, 1), (40, 11), (5,), (301, 1))
"""1,096 elements, none a multiple of 64: shards end within blocks. Columns of one element are one row; the
vector is sent as it is."""


@dataclass
class Tiny:
    """The DDP-wrapped model and its optimizer on one rank."""

    ddp: Any
    optimizer: Any

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.ddp.module.parameters())

    @property
    def groups(self) -> list[Any]:
        return self.ddp.bucket_groups + self.ddp.expert_parallel_bucket_groups

    @property
    def buckets(self) -> list[Any]:
        return [bucket for group in self.groups for bucket in group.buckets]

    def shards(self) -> list[torch.Tensor]:
        """This rank's part of every bucket's gradients (all of it, if replicated); copies."""
        found = []
        for group in self.groups:
            if not group.ddp_config.use_distributed_optimizer:
                found += [bucket.grad_data.clone() for bucket in group.buckets]
                continue
            ranks = group.intra_distributed_optimizer_instance_size
            rank = group.intra_distributed_optimizer_instance_rank
            for bucket in group.buckets:
                found.append(bucket.grad_data.view(ranks, -1)[rank].clone())
        return found

    def random_gradients(self, step: int, rank: int | None = None) -> list[torch.Tensor]:
        """One gradient per parameter: sizes differ between stretches of 32, some stretches are zero."""
        rank = torch.distributed.get_rank() if rank is None else rank
        generator = torch.Generator().manual_seed(seeded(100_003 * rank + step))
        gradients = []
        for parameter in self.parameters:
            count = parameter.numel()
            stretches = -(-count // 32)
            size = torch.exp(-6 * torch.rand(stretches, generator=generator))
            size[torch.rand(stretches, generator=generator) < 0.2] = 0
            values = torch.randn(count, generator=generator) * size.repeat_interleave(32)[:count]
            gradients.append(values.view(parameter.shape).to(parameter.dtype))
        return gradients

    def in_buckets(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients where Megatron's buckets hold them, in the buckets' dtype, padding zero."""
        of = {id(p): g for p, g in zip(self.parameters, gradients, strict=True)}
        placed = []
        for bucket in self.buckets:
            flat = torch.zeros_like(bucket.grad_data)
            for parameter, (start, end) in bucket.param_to_index.items():
                flat[start:end] = of[id(parameter)].reshape(-1).to(flat.dtype)
            placed.append(flat)
        return placed

    def backward(self, gradients: list[torch.Tensor]) -> None:
        """Add `gradients` by a backward pass; with overlap, all but the first one start the exchange."""
        self.ddp(gradients).backward()

    def exchange(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """One backward pass from clean buffers and its exchange; returns this rank's shards."""
        self.ddp.zero_grad_buffer()
        self.backward(gradients)
        self.ddp.finish_grad_sync()
        return self.shards()

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """`exchange`, then the optimizer's step; returns the shards as they were before it."""
        shards = self.exchange(gradients)
        self.optimizer.step()
        return shards

    def weights(self) -> torch.Tensor:
        """All parameters, flat, fp32; a copy."""
        return torch.cat([p.detach().float().reshape(-1) for p in self.parameters])


def build(
    *,
    dtypes: tuple[str, ...] = ("float32",),
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    experts: tuple[int, ...] = (),
    grad_reduce_in_fp32: bool = True,
    overlap: bool = False,
    average: bool = False,
    bucket_size: int | None = None,
    single_group: bool = False,
    instances: int = 1,
    expert_parallel: int = 1,
    optimizer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    seed: int = 1234,
) -> Tiny:
    """Initialize Megatron's process groups, and build the model, its DDP and its distributed optimizer.

    Args:
        dtypes: parameters take these dtypes in turn.
        experts: indices of parameters that belong to experts.
        single_group: all buckets in one bucket group (as in chunks of an interleaved schedule).
        optimizer, ddp: more fields of OptimizerConfig and DistributedDataParallelConfig.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            num_distributed_optimizer_instances=instances, expert_model_parallel_size=expert_parallel
        )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=2 if expert_parallel > 1 else None,
        expert_model_parallel_size=expert_parallel,
    )
    torch_dtypes = [getattr(torch, name) for name in dtypes]

    class TinyModel(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config=config)
            generator = torch.Generator().manual_seed(seeded(seed))
            for index, shape in enumerate(shapes):
                values = torch.randn(shape, generator=generator)
                parameter = torch.nn.Parameter(values.to(torch_dtypes[index % len(torch_dtypes)]))
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
                if index in experts:
                    parameter.allreduce = False
                self.register_parameter(f"w{index}", parameter)

        def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
            parts = [(w * g).sum().float() for w, g in zip(self.parameters(), gradients, strict=True)]
            return torch.stack(parts).sum()

    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": grad_reduce_in_fp32,
                "overlap_grad_reduce": overlap,
                "use_distributed_optimizer": True,
                "average_in_collective": average,
                "bucket_size": bucket_size,
                "num_distributed_optimizer_instances": instances,
                **(ddp or {}),
            }
        ),
        TinyModel(),
        disable_bucketing=single_group,
    )
    # Float32 parameters beside bf16 ones are allowed in a bf16 run; fp16 asks for a loss scale.
    options = {
        "optimizer": "adam",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "bf16": "bfloat16" in dtypes,
        "fp16": "float16" in dtypes,
        "use_distributed_optimizer": wrapped.ddp_config.use_distributed_optimizer,
        **(optimizer or {}),
    }
    if "float16" in dtypes:
        options["params_dtype"] = torch.float16
    elif "bfloat16" in dtypes:
        options["params_dtype"] = torch.bfloat16
    return Tiny(wrapped, get_megatron_optimizer(OptimizerConfig(**options), [wrapped]))


class TinyTraining:
    """A Tiny as recording.py trains it, with two backward passes a step, of random gradients.

    `written`: gradients are written into main_grad instead.
    """

    loss_scale = 1.0

    def __init__(self, tiny: Tiny, written: bool = False) -> None:
        self.tiny = tiny
        self.chunks = [tiny.ddp]
        self.written = written

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of this rank."""
        return dict(self.tiny.ddp.module.named_parameters())

    def backward(self, step: int) -> None:
        """A step's backward passes and its exchange."""
        ddp: Any = self.tiny.ddp
        ddp.zero_grad_buffer()
        passes = [self.tiny.random_gradients(2 * step + number) for number in range(2)]
        if self.written:
            for parameter, gradient in zip(self.tiny.parameters, passes[0], strict=True):
                parameter.main_grad.copy_(gradient)
        else:
            with ddp.no_sync():
                for gradients in passes[:-1]:
                    self.tiny.backward(gradients)
            self.tiny.backward(passes[-1])
        ddp.finish_grad_sync()

    def update(self) -> bool:
        """The optimizer's step on those gradients."""
        return self.tiny.optimizer.step()[0]

    def gather(self) -> None:
        """Parameters are gathered by `update` already."""

    def tokens(self, step: int) -> int:
        """No loss of tokens here."""
        return 0
