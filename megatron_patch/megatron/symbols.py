"""Every symbol of Megatron that this package replaces, and why it is that symbol. docs/architecture.md
prints it.

A path is MODULE:NAME or MODULE:CLASS.NAME. What is not listed is not replaced (patching.py sees to it).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TESTED = ("0.17", "0.21")
"""Releases of megatron-core on which the tests run: from the first, below the second."""

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_CHECKPOINTING = "megatron.training.checkpointing"
_TRAINING = "megatron.training.training"

INIT = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__"
BASE_INIT = "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__"
START_GRAD_SYNC = f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync"
START_PARAM_SYNC = f"{_BUFFER}:_ParamAndGradBucketGroup.start_param_sync"
REDUCE_SCATTER = f"{_BUFFER}:dist_reduce_scatter_func"
TORCH = f"{_BUFFER}:torch"
ALL_GATHER = f"{_BUFFER}:dist_all_gather_func"
_OPTIMIZERS = tuple(f"{_OPTIMIZER}:{name}Optimizer" for name in ("Chained", "MixedPrecision", "FP32"))
STEPS = tuple(f"{path}.step" for path in _OPTIMIZERS)
PREPARES = tuple(f"{path}.prepare_grads" for path in _OPTIMIZERS)
UPDATES = tuple(f"{path}.step_with_ready_grads" for path in (*_OPTIMIZERS, _DISTRIBUTED_OPTIMIZER))
SAVE_CHECKPOINT = f"{_CHECKPOINTING}:save_checkpoint"
LOAD_CHECKPOINT = f"{_CHECKPOINTING}:load_checkpoint"
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
GET_ARGS = f"{_TRAINING}:get_args"
TE_VERSION = "megatron.core.utils:_te_version"
ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
STATE_DICT = f"{_DISTRIBUTED_OPTIMIZER}.state_dict"
LOAD_STATE_DICT = f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict"
NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"
COMPILE_HELPERS = "megatron.core.datasets.utils:compile_helpers"
RESULTS_QUEUE = "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue"
TE_GEMM = "megatron.core.transformer.moe.moe_utils:te_general_gemm"


@dataclass(frozen=True)
class Symbol:
    """Something of Megatron that is replaced.

    `by` is the file that replaces it, in megatron/ unless it says more, `during` how long, `why` what
    for. `bound_in` are modules of Megatron that import it by name, and get the replacement too; `takes` are
    the parameters that the replacement reads.
    """

    by: str
    during: str
    why: str
    bound_in: tuple[str, ...] = ()
    takes: str = ""


_ATTACHED = "from `enable` or `attach` to `disable`"
_EXCHANGE = "for the length of `start_grad_sync`"
_MEASURED = "in Megatron's own training loop, from `enable` or `attach` to `disable`"
_LAUNCHED = "for a run of `megatron_patch.launch`"
_ON_CPU = "on CPU (`launch.device: cpu`)"
_PREFLIGHT = "while a configuration is checked, before any process starts"
_STEP = (
    "the end of a training iteration, which error feedback must know of; 1-bit Adam takes its place, and the "
    "exact weight gather begins before it and ends after it. On the class: optimizers are built after the "
    "model"
)
_HALF = "half of a step, where a loop or an optimizer around it (MimoOptimizer) calls the two by themselves"


def _checkpoint(why: str, takes: str) -> Symbol:
    return Symbol("checkpoint/training_loop.py", _ATTACHED, why, (_TRAINING,), takes)


SYMBOLS = {
    INIT: Symbol(
        "doors.py",
        "from `enable` to `disable`",
        "models are wrapped deep inside Megatron's builders; every one passes here",
    ),
    BASE_INIT: Symbol(
        "doors.py",
        "from `enable` to `disable`",
        "FSDP's wrappers pass here too, and are refused: nothing would be compressed, silently",
    ),
    START_GRAD_SYNC: Symbol(
        "seams/gradients.py",
        f"on the instance, {_ATTACHED}",
        "every gradient exchange of DDP begins here; a layer above differs between releases, and the layer "
        "below, torch.distributed, has other users",
        takes="force_all_reduce",
    ),
    START_PARAM_SYNC: Symbol(
        "seams/weights.py",
        f"on the instance, {_ATTACHED}",
        "every gather of updated weights begins here, whoever asks for it; the layers beside are as above",
        takes="force_sync",
    ),
    REDUCE_SCATTER: Symbol(
        "seams/intercept.py",
        _EXCHANGE,
        "the collective that it asks for, by this global in all releases",
        takes="op group async_op",
    ),
    TORCH: Symbol(
        "seams/intercept.py",
        _EXCHANGE,
        "its `distributed.all_reduce`: between optimizer instances, and of the replicated optimizer",
    ),
    ALL_GATHER: Symbol(
        "seams/intercept.py",
        "for the length of `start_param_sync`",
        "the collective that it asks for, by this global in all releases",
        takes="group async_op",
    ),
    **{path: Symbol("seams/optimizer_step.py", _ATTACHED, _STEP) for path in STEPS},
    **{path: Symbol("seams/optimizer_step.py", _ATTACHED, _HALF) for path in (*PREPARES, *UPDATES)},
    CORE_SAVE: Symbol(
        "checkpoint/dist_checkpointing.py",
        _ATTACHED,
        "every trainer writes its checkpoints by it: error states are added to what it writes",
        takes="sharded_state_dict",
    ),
    CORE_LOAD: Symbol(
        "checkpoint/dist_checkpointing.py",
        _ATTACHED,
        "error states are put back after it",
        takes="sharded_state_dict checkpoint_dir",
    ),
    SHARDED_METADATA: Symbol(
        "checkpoint/dist_checkpointing.py",
        _ATTACHED,
        "strict loading compares keys with it: ours are left out",
    ),
    **{
        path: Symbol(
            "checkpoint/dist_checkpointing.py",
            _ATTACHED,
            "its result is marked with the optimizer, by which `save` and `load` know whose states to carry",
        )
        for path in SHARDED_STATES
    },
    SAVE_CHECKPOINT: _checkpoint(
        "`--ckpt-format torch` does not pass dist_checkpointing",
        "iteration model optimizer non_persistent_ckpt release",
    ),
    LOAD_CHECKPOINT: _checkpoint(
        "likewise; and a tracker file that a kill left empty is repaired before it",
        "ddp_model optimizer load_arg",
    ),
    TRAIN_STEP: Symbol("metrics.py", _MEASURED, "when a step begins, and with which model"),
    TRAINING_LOG: Symbol("metrics.py", _MEASURED, "called on every rank after every step, with its losses"),
    EVALUATE_AND_PRINT: Symbol("metrics.py", _MEASURED, "tells the validation set from the test set"),
    EVALUATE: Symbol("metrics.py", _MEASURED, "its result is the validation loss"),
    ADD_ARGUMENTS: Symbol(
        "run_script.py", _LAUNCHED, "every script builds its parser with it: --compression-* is added there"
    ),
    GET_ARGS: Symbol(
        "workflows/run/preflight.py", _PREFLIGHT, "Megatron's schedule is built from the flags being checked"
    ),
    TE_VERSION: Symbol(
        "workflows/run/preflight.py",
        f"{_PREFLIGHT}, without Transformer Engine",
        "the ranks of a job that is planned here will have it",
    ),
    STATE_DICT: Symbol(
        "cpu/torch_adam.py",
        f"{_ATTACHED}, without Transformer Engine and Apex",
        "a repair: loading asserts a step count, which torch's Adam has after its first step only",
    ),
    LOAD_STATE_DICT: Symbol(
        "cpu/torch_adam.py",
        f"{_ATTACHED}, without Transformer Engine and Apex",
        "a repair: all parameters of torch's Adam are given one step count, which is then overwritten with 0",
    ),
    NORM: Symbol(
        "cpu/device.py",
        _ON_CPU,
        "asserts sequence parallelism off, which here needs marks on parameters only",
    ),
    COMPILE_HELPERS: Symbol("cpu/device.py", _ON_CPU, "runs `make`; the wheel ships the helper compiled"),
    RESULTS_QUEUE: Symbol(
        "cpu/device.py", _ON_CPU, "spawns a process that imports Megatron again at every rank's first save"
    ),
    TE_GEMM: Symbol(
        "cpu/device.py", _ON_CPU, "undefined in some releases without Transformer Engine; tested against None"
    ),
}


def table() -> str:
    """The symbols as a table in Markdown."""
    lines = ["| symbol | replaced by | when | why |", "| --- | --- | --- | --- |"]
    for path, symbol in SYMBOLS.items():
        shown = path.replace(":", ".")
        lines.append(f"| `{shown}` | `{symbol.by}` | {symbol.during} | {symbol.why} |")
    return "\n".join(lines) + "\n"


def unmet() -> Iterator[str]:
    """What the installed Megatron lacks of what is replaced here, a line for each symbol."""
    for path, symbol in SYMBOLS.items():
        module, _, names = path.partition(":")
        if importlib.util.find_spec(module.rpartition(".")[0]) is None:
            continue  # megatron.training is in the wheel, and in no other distribution of the core
        shown = path.replace(":", ".")
        try:
            found: Any = importlib.import_module(module)
            for name in names.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            yield f"{shown} is missing"
            continue
        gone = set(symbol.takes.split()) - set(inspect.signature(found).parameters if symbol.takes else ())
        if gone:
            yield f"{shown} has no parameter {', '.join(sorted(gone))}"
