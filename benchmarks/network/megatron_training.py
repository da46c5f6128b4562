"""Trains the LLaMA under Megatron's DDP and optimizer, with or without compression.

`exchange` is the time of start_grad_sync of all buckets and of finish_grad_sync. `overlap_grad_reduce` is
always on, because Megatron would make one bucket of all gradients without it; to overlap nothing, the
backward pass runs within `no_sync`. After its warm-up, 1-bit Adam exchanges momentum within the optimizer's
step, and that is its `exchange`.

`gather` begins with the first start_param_sync, which Megatron calls when its optimizer has updated the
weights, and ends with the step, an outer step's exchange included. Megatron's own gathers run within those
calls. The exact gather encodes, sends and decodes after them (seams/weights.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from benchmarks.network.llama import Llama
from benchmarks.network.training import Training, initialize
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.attach import attachment_of, onebit_of, session_of
from megatron_patch.megatron.doors import attach, disable
from megatron_patch.megatron.seams import traffic

_MEGATRONS_REDUCE_SCATTER = param_and_grad_buffer.dist_reduce_scatter_func


class MegatronTraining(Training):
    """The training under Megatron's DDP and distributed optimizer, or its replicated one.

    Args:
        llama: the shape of the model.
        gradients: the dtype of the gradient buffer, and of stock Megatron's exchange: "fp32" or "bf16".
        fp32_accumulation: whether Megatron uses an all-to-all with a sum in fp32, not a reduce-scatter.
        replicated: whether every rank holds all of the optimizer's state, so that gradients are all-reduced
            and no weight is gathered.
        compression: the options to attach with; None attaches nothing.
        learning_rate: Adam's learning rate, the same in every step.
        buckets: about how many buckets Megatron makes of the gradients.
        overlap: whether buckets are exchanged while the backward pass computes.
        instances: the number of optimizer instances.
        overlap_param_gather: whether the forward pass gathers weights bucket by bucket.
        clip_grad: the gradient's largest norm; 0 leaves it as it is.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        gradients: str = "bf16",
        fp32_accumulation: bool = False,
        replicated: bool = False,
        compression: CompressionConfig | None = None,
        learning_rate: float = 3e-4,
        buckets: int = 8,
        overlap: bool = False,
        instances: int = 1,
        overlap_param_gather: bool = False,
        clip_grad: float = 0.0,
    ) -> None:
        initialize(instances)
        super().__init__(llama, overlap)
        # With fp32 accumulation Megatron replaces a global of its module, for all models built later too.
        param_and_grad_buffer.dist_reduce_scatter_func = _MEGATRONS_REDUCE_SCATTER
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=not replicated,
            grad_reduce_in_fp32=gradients == "fp32",
            reduce_scatter_with_fp32_accumulation=fp32_accumulation,
            overlap_grad_reduce=True,
            overlap_param_gather=overlap_param_gather,
            num_distributed_optimizer_instances=instances,
            bucket_size=max(1, llama.parameters // buckets),
        )
        self.model = DistributedDataParallel(self.config, ddp_config, self.module)
        if instances > 1:  # A barrier over all ranks would queue behind an exchange in the background.
            self.peers = self.model.intra_dp_cp_group
        if compression is not None:
            attach([self.model], compression)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=learning_rate,
                clip_grad=clip_grad,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=not replicated,
                overlap_param_gather=overlap_param_gather,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            self.config.no_sync_func = self.model.no_sync
        self._onebit: Any = None
        self._finish = self.model.finish_grad_sync
        self.model.finish_grad_sync = self.timed_exchange(self._exchange)
        self._gather_began: float | None = None
        for group in self.model.bucket_groups:
            group.start_param_sync = self._beginning_the_gather(group.start_param_sync)

    def around_backward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.overlap else self.model.no_sync()

    def _exchange(self, *args: Any, **kwargs: Any) -> None:
        if not self.overlap:
            self.model.start_grad_sync()
        self._finish(*args, **kwargs)

    def _beginning_the_gather(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `start_param_sync` of a bucket group; the first call within a step begins the gather."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._gather_began is None:
                self.together()
                self._gather_began = time.perf_counter()
            return call(*args, **kwargs)

        return wrapped

    @property
    def gradient_bytes(self) -> float:
        state = session_of(self.model)
        if state is not None:
            return state.report.traffic.nbytes
        return sum(traffic.stock_gradients(group).nbytes for group in self.model.bucket_groups)

    @property
    def weight_bytes(self) -> float:
        attachment = attachment_of(self.model)
        if attachment is not None and attachment.weights.seams:
            return sum(bucket.traffic.nbytes for bucket in attachment.weights.report)
        return sum(traffic.stock_weights(group).nbytes for group in self.model.bucket_groups)

    @property
    def weights_sent(self) -> float:
        return sum(traffic.stock_weights(group).elements for group in self.model.bucket_groups)

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> None:
        self._gather_began = None
        successful, *_ = self.optimizer.step()
        if self._gather_began is not None:
            self.lap.gather = time.perf_counter() - self._gather_began
            self.together()
        if not successful:  # In such a step 1-bit Adam exchanges nothing.
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")
        if self._onebit is None:
            self._onebit = onebit_of(self.optimizer)  # The first step, in the warm-up, creates it.
            if self._onebit is not None:
                self._onebit._exchange = self.timed_exchange(self._onebit._exchange)

    def close(self) -> None:
        disable()
        self.optimizer = self._finish = self._onebit = None
        super().close()
