"""The symbols of Megatron that this package replaces; docs/architecture.md says by what, when, and why these.

A path is MODULE:NAME or MODULE:CLASS.NAME. patching.py refuses to replace a symbol that is not listed here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

TESTED = ("0.17", "0.21")
"""The tests run on releases of megatron-core from the first of these up to, but without, the second."""

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_CHECKPOINTING = "megatron.training.checkpointing"
_TRAINING = "megatron.training.training"

INIT = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
BASE_INIT = "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__"
TORCH_FSDP2_INIT = (
    "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.__init__"
)
INITS = (INIT, TORCH_FSDP2_INIT)
START_GRAD_SYNC = f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync"
START_PARAM_SYNC = f"{_BUFFER}:_ParamAndGradBucketGroup.start_param_sync"
FINISHES = tuple(f"{_BUFFER}:_ParamAndGradBucketGroup.finish_{what}_sync" for what in ("grad", "param"))
REDUCE_SCATTER = f"{_BUFFER}:dist_reduce_scatter_func"
TORCH = f"{_BUFFER}:torch"
ALL_GATHER = f"{_BUFFER}:dist_all_gather_func"
_FSDP = "megatron.core.distributed.fsdp"
_FSDP_BUFFER = f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer"
FSDP_REDUCE = f"{_FSDP_BUFFER}:GradReducePipeline._bucket_group_gradient_reduce"
FSDP_TORCH = f"{_FSDP_BUFFER}:torch"
FSDP_COALESCING = f"{_FSDP_BUFFER}:_coalescing_manager"
FSDP_SCALING = f"{_FSDP_BUFFER}:gradient_reduce_preprocessing"
FSDP_GATHERS = tuple(
    f"{_FSDP_BUFFER}:AllGatherPipeline.{name}"
    for name in ("all_gather_params", "async_bucket_gather", "wait_bucket_ready")
)
FSDP_DEVICES = (f"{_FSDP}.mcore_fsdp_adapter:torch", f"{_FSDP}.src.megatron_fsdp.megatron_fsdp:torch")
_OPTIMIZERS = tuple(f"{_OPTIMIZER}:{name}Optimizer" for name in ("Chained", "MixedPrecision", "FP32"))
STEPS = tuple(f"{path}.step" for path in _OPTIMIZERS)
PREPARES = tuple(f"{path}.prepare_grads" for path in _OPTIMIZERS)
UPDATES = tuple(f"{path}.step_with_ready_grads" for path in (*_OPTIMIZERS, _DISTRIBUTED_OPTIMIZER))
SAVE_CHECKPOINT = f"{_CHECKPOINTING}:save_checkpoint"
LOAD_CHECKPOINT = f"{_CHECKPOINTING}:load_checkpoint"
READ_CHECKPOINT = f"{_CHECKPOINTING}:_load_base_checkpoint"
CORE_SAVE, CORE_LOAD = (f"megatron.core.dist_checkpointing:{name}" for name in ("save", "load"))
SHARDED_METADATA = "megatron.core.dist_checkpointing.serialization:load_sharded_metadata"
SHARDED_STATES = tuple(
    f"{path}.sharded_state_dict"
    for path in (
        f"{_OPTIMIZER}:ChainedOptimizer",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params",
        f"{_OPTIMIZER}:FP32Optimizer",
        _DISTRIBUTED_OPTIMIZER,
    )
)
TRAIN_STEP = f"{_TRAINING}:train_step"
TRAINING_LOG = f"{_TRAINING}:training_log"
EVALUATE_AND_PRINT = f"{_TRAINING}:evaluate_and_print_results"
EVALUATE = f"{_TRAINING}:evaluate"
ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
STATE_DICT = f"{_DISTRIBUTED_OPTIMIZER}.state_dict"
LOAD_STATE_DICT = f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict"
NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"
COMPILE_HELPERS = "megatron.core.datasets.utils:compile_helpers"
RESULTS_QUEUE = "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue"
TE_GEMM = "megatron.core.transformer.moe.moe_utils:te_general_gemm"


BOUND_IN = {SAVE_CHECKPOINT: (_TRAINING,), LOAD_CHECKPOINT: (_TRAINING,)}
"""The modules of Megatron that import a symbol by name, so that the replacement must be set there too."""

SYMBOLS = {
    **dict.fromkeys(
        (*INITS, BASE_INIT, TORCH, SHARDED_METADATA, *STEPS, *PREPARES, *UPDATES, *SHARDED_STATES), ""
    ),
    START_GRAD_SYNC: "force_all_reduce",
    START_PARAM_SYNC: "force_sync",
    FSDP_REDUCE: "bucket_group",
    FSDP_SCALING: "grad_data scaling_factor ddp_config",
    **dict.fromkeys((*FINISHES, FSDP_TORCH, FSDP_COALESCING), ""),
    **dict(zip(FSDP_GATHERS, ("params", "bucket_id", "bucket_id bwd"), strict=True)),
    REDUCE_SCATTER: "op group async_op",
    ALL_GATHER: "group async_op",
    CORE_SAVE: "sharded_state_dict",
    CORE_LOAD: "sharded_state_dict checkpoint_dir",
    SAVE_CHECKPOINT: "iteration model optimizer non_persistent_ckpt release",
    LOAD_CHECKPOINT: "ddp_model optimizer load_arg",
    READ_CHECKPOINT: "",
    **dict.fromkeys((TRAIN_STEP, TRAINING_LOG, EVALUATE_AND_PRINT, EVALUATE, ADD_ARGUMENTS), ""),
    **dict.fromkeys(
        (STATE_DICT, LOAD_STATE_DICT, NORM, COMPILE_HELPERS, RESULTS_QUEUE, TE_GEMM, *FSDP_DEVICES), ""
    ),
}
"""Every symbol of Megatron that this package replaces, with the parameters that its replacement reads."""


def unmet() -> Iterator[str]:
    """Yield one line for each symbol, or parameter of it, that the installed Megatron lacks."""
    for path, takes in SYMBOLS.items():
        module, _, names = path.partition(":")
        if importlib.util.find_spec(module.rpartition(".")[0]) is None:
            continue  # megatron.training is in the wheel, but in no other distribution of megatron-core.
        shown = path.replace(":", ".")
        try:
            symbol: Any = importlib.import_module(module)
            for name in names.split("."):
                symbol = getattr(symbol, name)
        except (ImportError, AttributeError):
            yield f"{shown} is missing"
            continue
        gone = set(takes.split()) - set(inspect.signature(symbol).parameters if takes else ())
        if gone:
            yield f"{shown} has no parameter {', '.join(sorted(gone))}"
