"""Pretrain a decoder-only transformer (LLaMA, Mixtral, GPT) with Megatron's own engine.

A thin entry point over `megatron.training.pretrain`: model from Megatron's builders, GPTDataset, the
token-weighted loss. It knows nothing of compression; run it through `python -m megatron_patch.launch`
to get Megatron's flags together with the --compression-* flags:

    torchrun --nproc-per-node 8 -m megatron_patch.launch pretrain_scripts/pretrain_gpt.py \
        --num-layers 32 ... --use-distributed-optimizer --compression-method loco --compression-bits 4

Written for megatron-core 0.19; Megatron-LM's own pretrain_gpt.py of 0.17 to 0.19 can be run in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next micro-batch; every value None on a middle pipeline stage."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {
            key: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in next(data_iterator).items()
        }
        for key in (*BATCH_KEYS, "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"):
            batch.setdefault(key, None)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_function(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses (a scalar), number of tokens (int), and both for Megatron's log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, word in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {word} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Forward one micro-batch; returns the token losses and the function that reduces them."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_function, batch["loss_mask"])


def build_datasets(samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Megatron's train, validation and test GPTDataset with the given numbers of samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage),
        config,
    ).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank takes part in building


def main() -> None:
    """Parse Megatron's flags from the command line and train."""
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
