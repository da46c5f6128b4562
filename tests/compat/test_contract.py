"""What megatron_patch relies on in Megatron, asked of the installed megatron-core itself.

A release that breaks one of these claims fails here in the claim's own words, before a behaviour test fails
for it. `make test` asks the locked release, `make test-compat` the older ones that are supported.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

Claims = dict[str, bool]


def failed(answers: list[Claims]) -> list[str]:
    """The claims that do not hold, of all ranks."""
    return sorted({claim for claims in answers for claim, holds in claims.items() if not holds})


def version() -> str:
    import megatron.core

    return megatron.core.__version__


def test_the_megatron_core_that_was_asked_for_is_the_one_tested(pool):
    (found,) = pool.run(version, world_size=1)
    release = found.partition("+")[0]  # 0.18 and later append the commit of whatever repository they lie in
    assert release == os.environ.get("EXPECTED_MEGATRON_CORE", release)


# --- bucket groups: megatron/seams/gradients.py, seams/traffic.py, attach.py ---


def start_grad_sync() -> Claims:
    import inspect

    import torch
    from megatron.core.distributed import param_and_grad_buffer as module

    method = inspect.unwrap(module._ParamAndGradBucketGroup.start_grad_sync)
    names = set(method.__code__.co_names)
    signature = inspect.signature(method)
    finish = inspect.signature(module._ParamAndGradBucketGroup.finish_grad_sync)
    return {
        "param_and_grad_buffer.dist_reduce_scatter_func is a global function": callable(
            module.dist_reduce_scatter_func
        ),
        "param_and_grad_buffer.torch is torch": module.torch is torch,
        "start_grad_sync looks names up in param_and_grad_buffer": method.__globals__ is vars(module),
        "start_grad_sync calls the global dist_reduce_scatter_func": "dist_reduce_scatter_func" in names,
        "start_grad_sync calls torch.distributed.all_reduce through the global torch": (
            "torch.distributed.all_reduce(" in inspect.getsource(method)
            and {"torch", "distributed", "all_reduce"} <= names
            and "torch" not in method.__code__.co_varnames
        ),
        "start_grad_sync keeps a handle in grad_reduce_handle": "grad_reduce_handle" in names,
        "start_grad_sync(self, force_all_reduce=False)": list(signature.parameters)
        == ["self", "force_all_reduce"]
        and signature.parameters["force_all_reduce"].default is False,
        "finish_grad_sync(self, force_all_reduce=...)": list(finish.parameters)
        == ["self", "force_all_reduce"],
    }


def bucket_groups(model: dict[str, Any]) -> Claims:
    import torch
    import torch.distributed as dist
    from with_megatron.tiny_model import build

    tiny = build(**model)
    ddp, config = tiny.ddp, tiny.ddp.ddp_config
    (group, *_) = tiny.groups
    bucket = group.buckets[0]
    several = config.num_distributed_optimizer_instances > 1
    claims = {
        "DistributedDataParallel.bucket_groups and expert_parallel_bucket_groups are lists": isinstance(
            ddp.bucket_groups, list
        )
        and isinstance(ddp.expert_parallel_bucket_groups, list)
        and len(ddp.bucket_groups) > 0,
        "DistributedDataParallel.dp_cp_group is a process group": isinstance(
            ddp.dp_cp_group, dist.ProcessGroup
        ),
        "DistributedDataParallel.param_to_bucket_group knows every parameter": set(ddp.param_to_bucket_group)
        == set(tiny.parameters),
        "DistributedDataParallel.config is the model's": ddp.config is ddp.module.config,
        "bucket group: ddp_config is that of its DistributedDataParallel": group.ddp_config is config,
        "bucket group: is_first_batch": group.is_first_batch is True,
        "bucket group: grad_reduce_handle": group.grad_reduce_handle is None,
        "bucket: grad_data is a flat tensor": bucket.grad_data.dim() == 1,
        "bucket: gradient_scaling_factor": isinstance(bucket.gradient_scaling_factor, float),
        "bucket: params_list": all(isinstance(p, torch.nn.Parameter) for p in bucket.params_list),
    }
    for name in ("average_in_collective", "overlap_grad_reduce", "reduce_scatter_with_fp32_accumulation"):
        claims[f"DistributedDataParallelConfig.{name}"] = isinstance(getattr(config, name, None), bool)
    if not config.use_distributed_optimizer:
        claims["bucket group without distributed optimizer: data_parallel_group"] = (
            group.data_parallel_group.size() == dist.get_world_size()
        )
        return claims
    intra = group.intra_distributed_optimizer_instance_group
    claims |= {
        "bucket: param_data is as long as grad_data": bucket.param_data.numel() == bucket.grad_data.numel(),
        "bucket group: intra_distributed_optimizer_instance_size": intra.size()
        == group.intra_distributed_optimizer_instance_size,
        "bucket group: intra_distributed_optimizer_instance_rank": intra.rank()
        == group.intra_distributed_optimizer_instance_rank,
    }
    if several:
        inter = group.inter_distributed_optimizer_instance_group
        claims |= {
            "bucket group: inter_distributed_optimizer_instance_group": inter.size() * intra.size()
            == dist.get_world_size(),
            "bucket group: communication_stream with overlap": not config.overlap_grad_reduce
            or group.communication_stream is not None,
        }
    return claims


def test_start_grad_sync_goes_through_the_globals_that_are_substituted(pool):
    assert failed(pool.run(start_grad_sync, world_size=1)) == []


@pytest.mark.parametrize(
    "model",
    [{}, {"ddp": {"use_distributed_optimizer": False}}, {"instances": 2, "overlap": True}],
    ids=["distributed optimizer", "replicated optimizer", "two instances"],
)
def test_bucket_groups_have_what_the_seam_reads(pool, model):
    assert failed(pool.run(bucket_groups, model)) == []


# --- steps: seams/optimizer_step.py, chunk.py ------------------------------------------------------------


def rerun_states() -> Claims:
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    return {
        f"RerunState.{name}": name in RerunState.__members__
        for name in ("NOT_RUNNING_YET", "RERUNNING_IN_PLACE", "RERUNNING_FROM_CHECKPOINT")
    } | {"get_rerun_state_machine().state": get_rerun_state_machine().state is RerunState.NOT_RUNNING_YET}


def optimizer_steps(model: dict[str, Any]) -> Claims:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MixedPrecisionOptimizer
    from with_megatron.tiny_model import build

    tiny = build(**model)
    outer = tiny.optimizer
    parts = getattr(outer, "chained_optimizers", [outer])
    (part,) = parts
    distributed = tiny.ddp.ddp_config.use_distributed_optimizer
    claims = {
        "the outermost step is ChainedOptimizer's": isinstance(outer, ChainedOptimizer),
        "its chained_optimizers step as MixedPrecisionOptimizer or FP32Optimizer does": isinstance(
            part, MixedPrecisionOptimizer | FP32Optimizer
        )
        and type(part).step in (MixedPrecisionOptimizer.step, FP32Optimizer.step),
        "a distributed optimizer's model_chunks": not distributed
        or (len(part.model_chunks) == 1 and part.model_chunks[0] is tiny.ddp),
        "a replicated mixed-precision optimizer's groups of model parameters": distributed
        or isinstance(part, FP32Optimizer)
        or {id(p) for group in part.float16_groups + part.fp32_from_fp32_groups for p in group}
        == {id(p) for p in tiny.parameters},
        "a replicated FP32Optimizer's parameters are the model's": distributed
        or not isinstance(part, FP32Optimizer)
        or {id(p) for group in part.optimizer.param_groups for p in group["params"]}
        == {id(p) for p in tiny.parameters},
        "get_loss_scale() is a number": float(outer.get_loss_scale()) >= 1,
        "grad_scaler is there with fp16": getattr(part, "grad_scaler", None) is not None
        or "float16" not in model.get("dtypes", ()),
    }
    for name, optimizer in (("ChainedOptimizer", outer), (type(part).__name__, part)):
        tiny.ddp.zero_grad_buffer()
        tiny.backward(tiny.random_gradients(0))
        tiny.ddp.finish_grad_sync()
        result = optimizer.step()
        claims[f"{name}.step() returns (success, grad_norm, zeros)"] = (
            isinstance(result, tuple) and len(result) == 3 and bool(result[0]) is True
        )
    return claims


OPTIMIZERS = {
    "distributed fp32": {},
    "distributed bf16": {"dtypes": ("bfloat16",)},
    "distributed fp16": {"dtypes": ("float16",), "optimizer": {"initial_loss_scale": 4.0}},
    "replicated fp32": {"ddp": {"use_distributed_optimizer": False}},
    "replicated bf16": {"dtypes": ("bfloat16",), "ddp": {"use_distributed_optimizer": False}},
}


def test_the_rerun_state_machine_tells_a_replay(pool):
    assert failed(pool.run(rerun_states, world_size=1)) == []


@pytest.mark.parametrize("model", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_tell_how_a_step_ended(pool, model):
    assert failed(pool.run(optimizer_steps, model, world_size=2)) == []


# --- the training loop: megatron/metrics.py, arguments.py, launch.py ----------------------------------

READ_ARGUMENTS = {
    "train_step": {"model"},
    "training_log": {"iteration", "loss_dict", "grad_norm"},
    "evaluate_and_print_results": {"prefix"},
    "evaluate": set(),
}


def training_functions() -> Claims:
    import inspect

    from megatron.training import global_vars, training

    claims = {}
    for name, arguments in READ_ARGUMENTS.items():
        function = getattr(training, name, None)
        claims[f"megatron.training.training.{name}"] = callable(function)
        found = inspect.signature(function).parameters if function else {}
        claims |= {f"{name}({argument})": argument in found for argument in arguments}
    # A wrapped function is only called if the loop looks it up by name in its module.
    loop = inspect.unwrap(training.train).__code__.co_names
    claims["train() calls train_step, training_log and evaluate_and_print_results by name"] = {
        "train_step",
        "training_log",
        "evaluate_and_print_results",
    } <= set(loop)
    claims["evaluate_and_print_results() calls evaluate by name"] = "evaluate" in (
        inspect.unwrap(training.evaluate_and_print_results).__code__.co_names
    )
    for name in ("get_args", "get_tensorboard_writer", "get_wandb_writer"):
        claims[f"megatron.training.global_vars.{name}"] = callable(getattr(global_vars, name, None))
    return claims


def parsed() -> Claims:
    """Megatron's own parse_args, with our flags added by wrapping add_megatron_arguments."""
    import sys

    from megatron.training import arguments

    from megatron_patch.megatron.arguments import after_parsing

    seen: list[Any] = []
    original = arguments.add_megatron_arguments
    arguments.add_megatron_arguments = after_parsing(original, seen.append, {})
    sys.argv = ["pretrain.py", "--num-layers", "2", "--compression-bits", "2"]
    try:
        args = arguments.parse_args()
    finally:
        arguments.add_megatron_arguments = original
    return {
        "parse_args builds its parser with the global add_megatron_arguments": len(seen) > 0,
        "parse_args gives the flags that were added": getattr(args, "compression_bits", None) == 2,
        "parse_args gives Megatron's own flags": args.num_layers == 2,
    }


def test_the_training_loop_calls_what_the_metrics_wrap(pool):
    assert failed(pool.run(training_functions, world_size=1)) == []


def test_megatron_s_parser_takes_more_flags(pool):
    assert failed(pool.run(parsed, world_size=1)) == []


# --- checkpoints: megatron/checkpoint/ ----------------------------------------------------------------


def checkpointing() -> Claims:
    import inspect

    from megatron.core import dist_checkpointing as core
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.training import checkpointing as module
    from megatron.training import training

    save, load = (inspect.unwrap(f) for f in (module.save_checkpoint, module.load_checkpoint))
    wanted = {"iteration", "model", "optimizer", "non_persistent_ckpt", "release"}
    return {
        "save_checkpoint takes " + ", ".join(sorted(wanted)): wanted
        <= set(inspect.signature(save).parameters),
        "load_checkpoint takes ddp_model and optimizer": {"ddp_model", "optimizer"}
        <= set(inspect.signature(load).parameters),
        "training.training has them by name": (
            inspect.unwrap(training.save_checkpoint) is save
            and inspect.unwrap(training.load_checkpoint) is load
        ),
        "checkpointing asks the package for save and load": all(
            f"dist_checkpointing.{name}(" in inspect.getsource(module) for name in ("save", "load")
        ),
        "save and load take sharded_state_dict and checkpoint_dir": all(
            {"sharded_state_dict", "checkpoint_dir"}
            <= set(inspect.signature(inspect.unwrap(function)).parameters)
            for function in (core.save, core.load)
        ),
        "load compares keys by the global load_sharded_metadata": "load_sharded_metadata"
        in inspect.unwrap(serialization.load).__code__.co_names,
        "get_checkpoint_name(folder, iteration, release, return_base_dir)": (
            module.get_checkpoint_name("f", 7, release=False, return_base_dir=True) == "f/iter_0000007"
        ),
        "ShardedObject(key, data, shape, offset).unique_key": (
            ShardedObject("a", None, (1,), (0,)).unique_key == "a/shard_0_1"
        ),
        "ShardedTensor tells key, place and shape": {
            *("key", "data", "local_shape", "global_offset", "prepend_axis_num")
        }
        <= set(ShardedTensor.__dataclass_fields__),
        "ShardedTensorFactory.build() builds from data": callable(ShardedTensorFactory.build),
    }


def test_checkpoints_are_saved_and_loaded_as_the_hooks_expect(pool):
    assert failed(pool.run(checkpointing, world_size=1)) == []


def unmet_symbols() -> list[list[str]]:
    """What this release lacks, and what it would lack were a symbol or a parameter not there."""
    from megatron_patch.megatron import symbols

    found = [list(symbols.unmet())]
    known = dict(symbols.SYMBOLS)
    symbols.SYMBOLS["megatron.core.optimizer.optimizer:NoOptimizer.step"] = ""
    symbols.SYMBOLS[symbols.START_GRAD_SYNC] = "force_all_reduce speed"
    try:
        return [*found, list(symbols.unmet())]
    finally:
        symbols.SYMBOLS.clear()
        symbols.SYMBOLS.update(known)


def test_every_symbol_that_is_replaced_is_there(pool):
    ((none, some),) = pool.run(unmet_symbols, world_size=1)
    assert none == []
    name = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync"
    assert some == [
        f"{name} has no parameter speed",
        "megatron.core.optimizer.optimizer.NoOptimizer.step is missing",
    ]


# --- the supported range ---------------------------------------------------------------------------------


def warnings_of(release: str) -> list[str]:
    """What is warned of when megatron-core says that it is `release`, compression being attached twice."""
    import warnings

    import megatron.core
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron import attach

    true_release = megatron.core.__version__
    megatron.core.__version__ = release
    attach._warn_of_unknown_release.cache_clear()  # a worker serves many tests, a user's process one version
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                megatron_patch.attach([build().ddp])
            megatron_patch.enable()
            build()
    finally:
        megatron_patch.disable()
        megatron.core.__version__ = true_release
        attach._warn_of_unknown_release.cache_clear()
    return [str(warning.message) for warning in caught if "megatron-loco" in str(warning.message)]


@pytest.mark.parametrize("release", ["0.16.4", "0.21.0", "0.21.0rc1", "0.22.0.dev0", "1.0"])
def test_a_release_out_of_range_is_warned_of_once_by_version(pool, release):
    (found,) = pool.run(warnings_of, release, world_size=1)
    (message,) = found
    assert f"this is {release}" in message
    assert ">=0.17,<0.21" in message


@pytest.mark.parametrize(
    "release", ["0.17.0", "0.17.1", "0.18.2+5968063", "0.19.2", "0.20.0rc0", "0.20.0", None]
)
def test_a_release_within_the_range_is_never_warned_of(pool, release):
    """None: the installed one, whatever it is."""
    (release,) = pool.run(version, world_size=1) if release is None else (release,)
    assert pool.run(warnings_of, release, world_size=1) == [[]]
