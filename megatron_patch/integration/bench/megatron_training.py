"""A LLaMA trained by Megatron's own parts, with a stopwatch on the steps' exchange: what benchmarks run.

Megatron's GPTModel, DistributedDataParallel, distributed optimizer and schedule, on random tokens, in bf16.
There is no data set, no checkpoint, no logging: a step is what every Megatron step has in common.

    forward and backward of every microbatch | start_grad_sync of all buckets, finish_grad_sync | optimizer,
                                               `exchange`          all-gather of the weights (`gather`)

1-bit Adam exchanges momentum within the optimizer's step, once its warm-up is over: that is its `exchange`.

Without overlap the exchange stands alone: all buckets start when backward is through, and a barrier before it
takes out what ranks wait for each other's arithmetic. With `overlap_grad_reduce` off Megatron would make one
bucket of everything; so it is on, for the sake of its buckets, and backward runs within `no_sync`. With
overlap, buckets start during backward as usual, and `exchange` is only the part that was not hidden.

The same model under PyTorch's DDP is in ddp_training.py.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_patch.collectives.topology import time_limit
from megatron_patch.config import CompressionConfig
from megatron_patch.integration.attach import attach, chunk_state_of, disable, onebit_of
from megatron_patch.integration.seams import stock_traffic

LEARNING_RATE = 1e-4
_MEGATRONS_REDUCE_SCATTER = param_and_grad_buffer.dist_reduce_scatter_func


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of the model, and of the data that one microbatch has."""

    layers: int = 4
    hidden: int = 384
    ffn: int = 1024
    heads: int = 6
    vocabulary: int = 4096
    sequence: int = 32
    microbatch: int = 1

    @property
    def parameters(self) -> int:
        """Embedding and output layer are not tied."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass
class Lap:
    """Seconds of one step on one rank; the rest of the step is arithmetic."""

    step: float = 0.0
    exchange: float = 0.0
    gather: float = 0.0
    exchange_sent: int = 0
    """Bytes, by `Training.counters`, while the exchange ran on all ranks; none with overlap."""
    exchange_received: int = 0


def initialize() -> None:
    """Megatron's groups, data-parallel only, with the default group's time limit. Idempotent."""
    if not parallel_state.model_parallel_is_initialized():
        world = dist.group.WORLD
        assert world is not None
        minutes: Any = time_limit(world).total_seconds() / 60  # Megatron says int; what it makes of it is not
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=minutes)


class Training:
    """A model and its step; subclasses wrap the model and say how gradients travel."""

    def __init__(self, llama: Llama, overlap: bool, seed: int = 1234) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.llama = llama
        self.overlap = overlap
        self.lap = Lap()
        self.ranks = dist.get_world_size()
        self._batches = _random_batches(llama, seed + 1 + dist.get_rank())
        self.config = TransformerConfig(
            num_layers=llama.layers,
            hidden_size=llama.hidden,
            ffn_hidden_size=llama.ffn,
            num_attention_heads=llama.heads,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=llama.vocabulary,
            max_sequence_length=llama.sequence,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.module = Float16Module(self.config, model)
        self.model: Any = None
        self.counters: Callable[[], Sequence[int]] | None = None
        """(bytes sent, bytes received, ...) of an interface, where an exchange's bytes are asked for."""
        self._counted: Sequence[int] = (0, 0)

    @property
    def gradient_bytes(self) -> float:
        """Payload bytes of gradients that this rank sent in the last step."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> float:
        """Payload bytes of weights that this rank sends in every step."""
        raise NotImplementedError

    def zero_gradients(self) -> None:
        raise NotImplementedError

    def update(self) -> None:
        """The optimizer's step."""
        raise NotImplementedError

    def step(self, microbatches: int) -> Lap:
        """One step of all ranks, from barrier to barrier."""
        self.lap = Lap()
        dist.barrier()
        start = time.perf_counter()
        self.zero_gradients()
        with self.around_backward():
            get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=self._batches,
                model=self.model,
                num_microbatches=microbatches,
                seq_length=self.llama.sequence,
                micro_batch_size=self.llama.microbatch,
                forward_only=False,
            )
        self.backward_ended()
        self.update()
        dist.barrier()
        self.lap.step = time.perf_counter() - start
        return self.lap

    def around_backward(self) -> AbstractContextManager[Any]:
        """What the schedule runs in."""
        return nullcontext()

    def backward_ended(self) -> None:
        """Called when the schedule is through."""

    def together(self) -> None:
        """Without overlap: wait until every rank is here, so that what follows is timed alone."""
        if not self.overlap:
            dist.barrier()

    def exchange_begins(self) -> None:
        """All ranks are ready for the exchange; not with overlap."""
        self.together()
        if self.counters is not None:
            self._counted = self.counters()

    def exchange_ended(self) -> None:
        """The exchange is over on this rank: wait for the others, and count its bytes; not with overlap."""
        self.together()
        if self.counters is not None and not self.overlap:
            sent, received, *_ = self.counters()
            self.lap.exchange_sent += sent - self._counted[0]
            self.lap.exchange_received += received - self._counted[1]

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`call`, its time added to a field of the lap."""
        exchange = name == "exchange"
        before = self.exchange_begins if exchange else self.together
        after = self.exchange_ended if exchange else self.together

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            start = time.perf_counter()
            result = call(*args, **kwargs)
            setattr(self.lap, name, getattr(self.lap, name) + time.perf_counter() - start)
            after()
            return result

        return wrapped

    def close(self) -> None:
        """Let go of the model: Megatron's hooks, its caches and the autograd graph would keep it."""
        self.config.grad_scale_func = self.config.finalize_model_grads_func = self.config.no_sync_func = None
        RotaryEmbedding.forward.cache_clear()
        self.model = self.module = None
        gc.collect()


class MegatronTraining(Training):
    """Under Megatron's DDP and distributed optimizer, or its replicated one.

    Args:
        llama: the model.
        gradients: dtype of the gradient buffer, and on stock Megatron's wire: "fp32" or "bf16".
        fp32_accumulation: Megatron's all-to-all with a sum in fp32, instead of a reduce-scatter.
        replicated: every rank holds all of the optimizer's state: gradients are all-reduced, and no weight
            is gathered.
        compression: attach with these options; None: the seam is not touched.
        buckets: about how many Megatron cuts the gradients into.
        overlap: exchange buckets while backward computes.
    """

    def __init__(
        self,
        llama: Llama,
        *,
        gradients: str = "bf16",
        fp32_accumulation: bool = False,
        replicated: bool = False,
        compression: CompressionConfig | None = None,
        buckets: int = 8,
        overlap: bool = False,
    ) -> None:
        super().__init__(llama, overlap)
        # With fp32 accumulation Megatron replaces a global of its module, for all models built later too.
        param_and_grad_buffer.dist_reduce_scatter_func = _MEGATRONS_REDUCE_SCATTER
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=not replicated,
            grad_reduce_in_fp32=gradients == "fp32",
            reduce_scatter_with_fp32_accumulation=fp32_accumulation,
            overlap_grad_reduce=True,
            bucket_size=max(1, llama.parameters // buckets),
        )
        self.model = DistributedDataParallel(self.config, ddp_config, self.module)
        if compression is not None:
            attach([self.model], compression)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=LEARNING_RATE,
                clip_grad=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=not replicated,
            ),
            [self.model],
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            self.config.no_sync_func = self.model.no_sync
        self._onebit: Any = None
        self._finish = self.model.finish_grad_sync
        self.model.finish_grad_sync = self.timed(self._exchange, "exchange")
        for group in self.model.bucket_groups:
            group.start_param_sync = self.timed(group.start_param_sync, "gather")

    def around_backward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.overlap else self.model.no_sync()

    def _exchange(self, *args: Any, **kwargs: Any) -> None:
        if not self.overlap:
            self.model.start_grad_sync()
        self._finish(*args, **kwargs)

    @property
    def gradient_bytes(self) -> float:
        state = chunk_state_of(self.model)
        if state is not None:
            return state.report.traffic.nbytes
        return sum(stock_traffic.stock_gradients(group).nbytes for group in self.model.bucket_groups)

    @property
    def weight_bytes(self) -> float:
        return sum(stock_traffic.weights(group).nbytes for group in self.model.bucket_groups)

    def zero_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> None:
        successful, *_ = self.optimizer.step()
        if not successful:  # 1-bit Adam would have exchanged nothing
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")
        if self._onebit is None:
            self._onebit = onebit_of(self.optimizer)  # made by the first step, which is in the warm-up
            if self._onebit is not None:
                self._onebit._exchange = self.timed(self._onebit._exchange, "exchange")

    def close(self) -> None:
        disable()
        self.optimizer = self._finish = self._onebit = None
        super().close()


def _random_batches(llama: Llama, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(llama.vocabulary, (llama.microbatch, llama.sequence + 1), generator=generator)


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length).expand(rows, -1)
    causal = torch.ones(1, 1, length, length).triu(1).bool()
    return model(tokens[:, :-1], positions, causal, labels=tokens[:, 1:]), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}
