"""What one rank of a recipe allocates, by the code that does it: Megatron's model, DDP and optimizer, and the
package's exchange and weight gather, on meta tensors, in one process over torch's fake process group.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import _device

META = torch.device("meta")
_WITHOUT_TRANSFORMER_ENGINE = {
    **{"transformer_impl": "local", "apply_rope_fusion": False, "cross_entropy_loss_fusion": False},
    **{"gradient_accumulation_fusion": False, "moe_grouped_gemm": False, "moe_permute_fusion": False},
}


def allocated(recipe: Path, stage: int, layers: int | None = None) -> dict[str, float]:
    """In a worker: bytes of the first rank of a pipeline stage, by what they are for; with fewer layers."""
    from workflows.run.recipe_facts import arguments

    args = Namespace(**{**vars(arguments(recipe, [])), **_WITHOUT_TRANSFORMER_ENGINE})
    args.num_layers = layers or args.num_layers
    _join(args, stage)
    with _on_meta(), contextlib.ExitStack() as stack:
        import megatron_patch
        from megatron_patch.megatron.attach import attachment_of
        from megatron_patch.workflows.run import configuration

        ddp, optimizer = _built(args, stage)
        # Compressed from the first step on, so that the exchange takes its buffers.
        options = configuration.load(recipe, ["compression.start_step=0"]).compression
        megatron_patch.attach([ddp], options)
        stack.callback(megatron_patch.disable)
        attached = attachment_of(ddp)
        assert attached is not None
        with _nothing_is_sent():
            for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                group.start_grad_sync()
                group.finish_grad_sync()
        buffers = ddp.buffers + ddp.expert_parallel_buffers
        shards = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
        owned = sum(parameter.numel() for group in shards for parameter in group["params"])
        weights = attached.weights.nbytes
        return {
            "weights": sum(buffer.param_data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": 12.0
            * owned,  # an fp32 copy of the weights, and Adam's two moments in its first step
            "errors": attached.session.error_bytes,
            "tables": sum(
                sender.layout.table.places.nbytes
                for sender in attached.session.senders
                if sender.layout.table is not None
            ),
            "weight gather": 2 * weights,  # old shards; messages of as many bytes at most
            "buffers": attached.session.workspace.nbytes,
        }


def bucket_divisor(ranks: int) -> int:
    """In a worker: what Megatron's buckets are multiples of, padded for NCCL's bandwidth."""
    from megatron.core.optimizer import param_layout

    return param_layout.bucket_end_divisor(ranks, True)


def _join(args: Namespace, stage: int) -> None:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    rank = stage * args.world_size // args.pipeline_model_parallel_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.world_size), LOCAL_WORLD_SIZE="8")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    new_group = dist.new_group
    with mock.patch.object(
        dist, "new_group", lambda *ranks, **options: new_group(*ranks, **options | {"backend": "fake"})
    ):
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
        )


def _built(args: Namespace, stage: int) -> tuple[Any, Any]:
    """The stage's model in DDP, and its optimizer, as Megatron's training makes them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    config.transformer.use_cpu_initialization, config.transformer.perform_initialization = True, False
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    with META:
        model = GPTModel(
            config.transformer,
            spec,
            vocab_size=args.padded_vocab_size or _padded(args),
            max_sequence_length=args.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == args.pipeline_model_parallel_size - 1,
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        ).to(torch.bfloat16)
    ddp = DistributedDataParallel(
        config.transformer,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            use_distributed_optimizer=True,
            pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
        ),
        model,
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=args.overlap_param_gather,
    )
    return ddp, get_megatron_optimizer(options, [ddp], use_gloo_process_groups=False)


def _padded(args: Namespace) -> int:
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-args.vocab_size // multiple) * multiple)


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Within the block the GPU is the meta device, and a tensor's address its storage's."""
    # The workers' stand-ins are around torch's factories, which a default device looks for.
    known = _device._device_constructors()
    factories = known | {getattr(factory, "__wrapped__", factory) for factory in known}
    kind = torch.Tensor.type
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=META),
        mock.patch.object(torch.Tensor, "data_ptr", lambda self: self.untyped_storage()._cdata),
        mock.patch.object(torch.Tensor, "type", lambda self: kind(self).replace("meta.", "")),
        mock.patch.object(_device, "_device_constructors", return_value=factories),
    ):
        yield


@contextlib.contextmanager
def _nothing_is_sent() -> Iterator[None]:
    """Within the block collectives are over at once, and compression has been done."""
    from megatron_patch.collectives import reduce_scatter
    from megatron_patch.collectives.sender import Sender
    from megatron_patch.megatron.cpu.device import Done

    def none(*_: Any, **__: Any) -> None:
        return None

    def done(*_: Any, **__: Any) -> Done:
        return Done()

    with (
        mock.patch.object(Sender, "compress", none),
        mock.patch.object(reduce_scatter, "decompress_reduce", none),
        mock.patch.object(dist, "all_to_all_single", done),
        mock.patch.object(dist, "reduce_scatter_tensor", done),
    ):
        yield
