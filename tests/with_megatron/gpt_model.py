"""A tiny GPT in a worker: Megatron's own model, schedule, DDP and optimizer under any parallelism.

    gpt = build(tp=2, sequence_parallel=True)        # every rank, in a worker of the pool
    megatron_patch.attach(gpt.chunks, config)
    gpt.backward(0)                                  # microbatches, exchange, finalize_model_grads
    gpt.update()                                     # the optimizer

What `megatron.training` does around a model is done the same way here, in the same order: virtual chunks,
bucketing, Float16Module, the schedule's hooks, finalize_model_grads, OptimizerParamScheduler. A second
`build` in one run keeps the process groups and starts from the same weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from seeds import seeded

SEQUENCE = 16
VOCABULARY = 64
MICROBATCH = 2

LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-2
"""Adam's eps, as large as gradients are: with 1e-8 a gradient off by a constant factor would train alike."""


BF16 = {"dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False}}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1500}
GATHERED = OVERLAP | {"overlap_param_gather": True}
MOE = {"experts": 4, "ep": 2}
"""Arguments of `build`, and of its `ddp`."""


@dataclass
class GPT:
    """The DDP-wrapped chunks of one rank, their optimizer, and how to train them: one step is `backward`,
    then `update`."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    microbatches: int
    seed: int = 1234
    losses: list[float] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of this rank; names start with the chunk's number."""
        return {
            f"{number}.{_bare(name)}": parameter
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }

    @property
    def loss_scale(self) -> float:
        """fp16's loss scale of the next backward pass; 1.0 without one."""
        return float(self.optimizer.get_loss_scale())

    def gather(self) -> None:
        """Bring the parameters up to date where their all-gather waits for the next forward pass."""
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                chunk.start_param_sync(force_sync=True)

    def tokens(self, step: int) -> int:
        """Tokens of this rank's data that count in the loss of a step."""
        return int(sum(batch["mask"].sum() for batch in self.batches(step)))

    def batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """The microbatches of a step: their own on each data-parallel rank, the same on its peers."""
        from megatron.core import parallel_state

        replica = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(seeded(self.seed + 1009 * step + 100_003 * replica))
        for _ in range(self.microbatches):
            tokens = torch.randint(VOCABULARY, (MICROBATCH, SEQUENCE + 1), generator=generator)
            # Every rank and microbatch masks another number of tokens: their weights in the loss differ.
            mask = torch.rand(MICROBATCH, SEQUENCE, generator=generator) < 0.8
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask.float()}

    def backward(self, step: int) -> None:
        """All microbatches of a step, the gradients' exchange, and finalize_model_grads."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.evaluate(step, forward_only=False)

    def evaluate(self, step: int, forward_only: bool = True) -> None:
        """The forward passes of a step alone; their losses count with the others."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        iterators = [self.batches(step) for _ in self.chunks]
        with self._hooked():
            reduced = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=_one_or_all(iterators),
                model=_one_or_all(self.chunks),
                num_microbatches=self.microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=MICROBATCH,
                forward_only=forward_only,
            )
        self.losses.extend(float(loss / tokens) for loss, tokens in reduced)

    def update(self) -> bool:
        """The optimizer's step on those gradients; returns whether it succeeded."""
        successful, _, _ = self.optimizer.step()
        if successful:
            self.scheduler.step(increment=1)
        return successful

    def step(self, step: int) -> bool:
        """`backward` and `update`."""
        self.backward(step)
        return self.update()

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """The schedule's hooks in the configuration, as megatron.training.train sets them, for one pass.

        What a pass leaves behind is dropped after it: through autograd's graph and DDP's hooks it would keep
        the model, and with it the worker's process groups and their threads, beyond the end of a run.
        """
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        config = self.config
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.chunks[0].ddp_config.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
        if self.chunks[0].ddp_config.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])
        yield
        config.grad_scale_func = config.finalize_model_grads_func = None
        config.no_sync_func = config.param_sync_func = None
        RotaryEmbedding.forward.cache_clear()
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            dispatcher = getattr(module, "token_dispatcher", None)
            for name, value in vars(dispatcher).items() if dispatcher else ():
                if isinstance(value, torch.Tensor):
                    setattr(dispatcher, name, value.detach())


def _one_or_all(items: list[Any]) -> Any:
    """Megatron's way to pass something for each virtual chunk."""
    return items if len(items) > 1 else items[0]


def _bare(name: str) -> str:
    """A parameter's name without the wrappers' `module.`: DDP's, and Float16Module's where there is one."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(SEQUENCE).expand(MICROBATCH, -1)
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(batch["tokens"], positions, causal, labels=batch["labels"])
    return output, functools.partial(_loss, batch["mask"])


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    return loss, tokens, torch.stack([loss.detach(), tokens])


def build(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    expert_tp: int | None = None,
    instances: int = 1,
    layers: int = 2,
    experts: int | None = None,
    shared_experts: int | None = None,
    dispatcher: str = "alltoall",
    sequence_parallel: bool = False,
    tied: bool = False,
    dtype: str = "fp32",
    microbatches: int = 2,
    per_token_loss: bool = False,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    muon: str | None = None,
    learning_rate: float = LEARNING_RATE,
    frozen: tuple[str, ...] = (),
    seed: int = 1234,
) -> GPT:
    """Initialize Megatron's process groups (once a run), and build the model, its DDP and its optimizer.

    Args:
        expert_tp: tensor-parallel size of experts; `tp` unless given.
        instances: `num_distributed_optimizer_instances`.
        experts: number of experts of every layer's MLP; None: dense.
        shared_experts: size of the experts that every token passes.
        tied: one weight for the embedding and the output layer.
        dtype: of the parameters: "fp32", "bf16" or "fp16".
        ddp, optimizer: more fields of DistributedDataParallelConfig, which may ask for Megatron-FSDP, and of
            OptimizerConfig.
        frozen: parts of the names of parameters that are not trained.
        muon: trains matrices by Muon, others by Adam (megatron-core 0.18 and later). "layout": with
            --use-distributed-optimizer, layer-wise; "no_layout": layer-wise with
            --no-use-layer-wise-param-layout; "replicated": without the distributed optimizer.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=expert_tp,
            num_distributed_optimizer_instances=instances,
        )
    torch.manual_seed(seeded(seed))
    tensor_parallel.model_parallel_cuda_manual_seed(seeded(seed), force_reset_rng=True)
    _forget_routers_losses()

    params_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    half = {"bf16": dtype == "bf16", "fp16": dtype == "fp16", "params_dtype": params_dtype}
    ddp_options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True} | (ddp or {})
    if muon is not None:
        ddp_options["use_distributed_optimizer"] = muon == "layout"
    ddp_config = DistributedDataParallelConfig(num_distributed_optimizer_instances=instances, **ddp_options)

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        ffn_hidden_size=40,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=experts is None,  # Megatron's experts have no bias under tensor parallelism
        init_method_std=0.15,  # large enough for the inner layers to have gradients like the outer ones
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        sequence_parallel=sequence_parallel,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_aux_loss_coeff=1e-2 if experts else 0.0,
        moe_token_dispatcher_type=dispatcher,
        moe_shared_expert_intermediate_size=shared_experts,
        moe_ffn_hidden_size=24 if experts else None,
        pipeline_dtype=params_dtype,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=per_token_loss,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **half,
    )
    models = _models(config, vpp, tied)
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)
    chunks = _wrapped(config, ddp_config, models, muon == "layout")
    optimizer_options = {
        "lr": learning_rate,
        "min_lr": learning_rate,
        "weight_decay": WEIGHT_DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_eps": EPSILON,
        "clip_grad": 0.0,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
        **half,
        **(_muon(muon) if muon is not None else {}),
        **(optimizer or {}),
    }
    megatron_optimizer = get_megatron_optimizer(OptimizerConfig(**optimizer_options), chunks)
    return GPT(
        chunks, megatron_optimizer, _constant(megatron_optimizer, learning_rate), config, microbatches, seed
    )


def _forget_routers_losses() -> None:
    """megatron-core 0.17 logs them in a global table, as long as the layers of the process's first model."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def _muon(mode: str) -> dict[str, Any]:
    """Fields of OptimizerConfig, as Megatron's flags for Muon set them."""
    return {
        "optimizer": "muon",
        "use_distributed_optimizer": False,
        "use_layer_wise_distributed_optimizer": mode != "replicated",
        "muon_num_ns_steps": 5,
    }


def _models(config: Any, vpp: int | None, tied: bool) -> list[Any]:
    """This rank's chunks of the model."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    models = []
    for stage in range(vpp or 1):
        stages = {"ignore_virtual": False, "vp_stage": stage if vpp else None}
        models.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm"),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**stages),
                post_process=parallel_state.is_pipeline_last_stage(**stages),
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
                vp_stage=stages["vp_stage"],
            )
        )
    for model in models:
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if config.fp16 or config.bf16:
        models = [Float16Module(config, model) for model in models]
    return models


def _wrapped(config: Any, ddp_config: Any, models: list[Any], layer_wise: bool) -> list[Any]:
    """The chunks in Megatron's DDP, or its FSDP, as megatron.training.get_model wraps them."""
    from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel

    if ddp_config.use_megatron_fsdp:
        return [FullyShardedDataParallel(config, ddp_config, model) for model in models]
    layouts = _layer_wise_layouts(models, ddp_config) if layer_wise else [{}] * len(models)
    return [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0, **layouts[number])
        for number, model in enumerate(models)
    ]


def _layer_wise_layouts(models: list[Any], ddp_config: Any) -> list[dict[str, Any]]:
    """What megatron.training.training.wrap_model_chunks_with_ddp computes for the layer-wise optimizer."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    tag_params_for_buffer_routing(models)
    size = ddp_config.bucket_size if ddp_config.overlap_grad_reduce else None
    return [
        {
            "full_param_layout": LayerWiseDistributedOptimizer.compute_full_param_layout(
                [parameter for parameter in model.parameters() if parameter.requires_grad],
                size if number == 0 else None,
                parallel_state.get_data_parallel_world_size(with_context_parallel=True),
                ddp_config,
                expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
            )
        }
        for number, model in enumerate(models)
    ]


def _constant(optimizer: Any, rate: float) -> Any:
    """Megatron's scheduler at a constant rate: it gives each parameter group its weight decay."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=rate,
        max_lr=rate,
        min_lr=rate,
        lr_warmup_steps=0,
        lr_decay_steps=1_000_000,
        lr_decay_style="constant",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
