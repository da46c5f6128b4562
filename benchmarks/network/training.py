"""Trains a LLaMA with Megatron's GPTModel and schedule, and times the parts of a step.

The model is in bf16, and its tokens are random. Subclasses wrap the model and update the weights. There is no
data set, checkpoint or logging, so that a step has only the parts of every Megatron step.

    forward and backward of every microbatch | exchange of the gradients | optimizer, gather of the weights
                                               `exchange`                              `gather`

Without overlap all buckets start after the backward pass, and a barrier before the exchange excludes the time
in which ranks wait for each other. With overlap buckets start during the backward pass, and `exchange` is
only the part that was not hidden. megatron_training.py and ddp_training.py wrap the model.
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
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from benchmarks.network.llama import Llama
from megatron_patch.collectives.topology import time_limit


@dataclass
class Lap:
    """The seconds of one step on one rank, and of its parts; the rest of the step is arithmetic."""

    step: float = 0.0
    exchange: float = 0.0
    gather: float = 0.0
    exchange_sent: int = 0
    """Bytes by `Training.counters` while the exchange ran on all ranks; 0 with overlap."""
    exchange_received: int = 0
    gradient_bytes: float = 0.0
    """Payload bytes of gradients that this rank sent."""
    weight_bytes: float = 0.0
    """Payload bytes of weights that this rank sent."""


def initialize(instances: int = 1) -> None:
    """Create Megatron's groups for `instances` optimizer instances, with the default group's time limit.

    If they exist for as many instances, this does nothing.
    """
    if parallel_state.model_parallel_is_initialized() and _instances() != instances:
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        world = dist.group.WORLD
        assert world is not None
        minutes: Any = time_limit(world).total_seconds() / 60  # Annotated as int, but fractions work too.
        parallel_state.initialize_model_parallel(
            distributed_timeout_minutes=minutes, num_distributed_optimizer_instances=instances
        )


def _instances() -> int:
    inside = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    return dist.get_world_size() // inside.size()


class Training:
    """A model and its step; subclasses wrap the model and choose how gradients are exchanged."""

    device = torch.device("cpu")

    def __init__(self, llama: Llama, overlap: bool, seed: int = 1234) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.llama = llama
        self.overlap = overlap
        self.lap = Lap()
        self.ranks = dist.get_world_size()
        self._batches = _random_batches(llama, seed + 1 + dist.get_rank(), self.device)
        self.losses: list[dict[str, torch.Tensor]] = []
        """Of the last step's microbatches."""
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
            self.layer_spec(),
            vocab_size=llama.vocabulary,
            max_sequence_length=llama.sequence,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.module = Float16Module(self.config, model.to(self.device))
        self.model: Any = None
        self.peers: dist.ProcessGroup | None = None
        """The ranks that wait for one another within a step; None: all."""
        self.counters: Callable[[], Sequence[int]] | None = None
        """Returns (bytes sent, bytes received, ...) of an interface; None: bytes are not counted."""
        self._counted: Sequence[int] = (0, 0)

    def layer_spec(self) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm")

    @property
    def gradient_bytes(self) -> float:
        """Payload bytes of gradients that this rank sent in the last step."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> float:
        """Payload bytes of weights that this rank sent in the last step."""
        raise NotImplementedError

    @property
    def weights_sent(self) -> float:
        """How many weights these bytes encode, counted once for every rank that receives them."""
        raise NotImplementedError

    def zero_gradients(self) -> None:
        raise NotImplementedError

    def update(self) -> None:
        """Make the optimizer's step."""
        raise NotImplementedError

    def step(self, microbatches: int) -> Lap:
        """Make one step, and time it from barrier to barrier."""
        self.lap = Lap()
        dist.barrier(self.peers)
        start = time.perf_counter()
        self.zero_gradients()
        with self.around_backward():
            self.losses = get_forward_backward_func()(
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
        dist.barrier(self.peers)
        self.lap.step = time.perf_counter() - start
        self.lap.gradient_bytes, self.lap.weight_bytes = self.gradient_bytes, self.weight_bytes
        return self.lap

    def around_backward(self) -> AbstractContextManager[Any]:
        """The context in which the schedule runs."""
        return nullcontext()

    def backward_ended(self) -> None:
        """Called when the schedule has ended."""

    def together(self) -> None:
        """Without overlap, wait for the other ranks, so that the next part is timed alone."""
        if not self.overlap:
            dist.barrier(self.peers)

    def exchange_begins(self) -> None:
        """Begin the exchange: without overlap, wait until all ranks are ready, and read the counters."""
        self.together()
        if self.counters is not None:
            self._counted = self.counters()

    def exchange_ended(self) -> None:
        """End the exchange on this rank: without overlap, wait for the other ranks, and count its bytes."""
        self.together()
        if self.counters is not None and not self.overlap:
            sent, received, *_ = self.counters()
            self.lap.exchange_sent += sent - self._counted[0]
            self.lap.exchange_received += received - self._counted[1]

    def timed_exchange(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` so that its time is added to the lap's exchange."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.exchange_begins()
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.lap.exchange += time.perf_counter() - start
            self.exchange_ended()
            return result

        return wrapped

    def close(self) -> None:
        """Release the model, which Megatron's hooks, its caches and the autograd graph would keep alive."""
        self.config.grad_scale_func = self.config.finalize_model_grads_func = self.config.no_sync_func = None
        RotaryEmbedding.forward.cache_clear()
        self.model = self.module = None
        gc.collect()


def _random_batches(llama: Llama, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    generator, shape = torch.Generator(device).manual_seed(seed), (llama.microbatch, llama.sequence + 1)
    while True:
        yield torch.randint(llama.vocabulary, shape, generator=generator, device=device)


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(rows, -1)
    causal = torch.ones(1, 1, length, length, device=tokens.device).triu(1).bool()
    return model(tokens[:, :-1], positions, causal, labels=tokens[:, 1:]), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}
