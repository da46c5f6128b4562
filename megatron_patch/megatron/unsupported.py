"""Refuses configurations that cannot be served, with an error of one line that says what to change.

The command line checks Megatron's parsed flags before it spawns a process; `attach` checks the wrapped model
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from megatron_patch.collectives.exchange import CARRIED
from megatron_patch.config import MUONS, CompressionConfig
from megatron_patch.errors import UserError
from megatron_patch.megatron import arguments

TORCH_FSDP2, MEGATRON_FSDP = "use_torch_fsdp2", "use_megatron_fsdp"
_SERVED = ("optim_grads", "optim_grads_params")


def _refuse(flag: str, value: object, why: str, what: str = "gradient compression") -> None:
    raise UserError(f"megatron.{flag}: {value!r} cannot be combined with {what}: {why}")


def fsdp_of(chunk: Any) -> str | None:
    """Return the flag of the Megatron FSDP that wraps a model (TORCH_FSDP2, MEGATRON_FSDP); None without one.

    The classes are compared by name, because on Megatron's main branch the name FullyShardedDataParallel is
    a function that chooses a class.
    """
    kinds = {kind.__name__ for kind in type(chunk).__mro__}
    if "TorchFullyShardedDataParallel" in kinds:
        return TORCH_FSDP2
    return MEGATRON_FSDP if kinds & {"FullyShardedDataParallel", "FullyShardedDataParallelV1"} else None


def refuse_flags(args: Any) -> None:
    """Check a namespace of Megatron's parsed flags.

    Raises:
        UserError: a flag cannot be served; the message names it, its value and what to change.
    """
    method = getattr(args, "compression_method", None)
    exact = getattr(args, "compression_weight_gather", None) == "exact"
    if (interval := getattr(args, "compression_outer_interval", None) or 1) > 1:
        _refuse_for_outer_steps(interval, args)
    if getattr(args, "compression_trial", 0):
        _refuse_for_trial(args)
    if method == "none" and not exact:
        return
    if getattr(args, TORCH_FSDP2, False):
        _refuse_for_torch_fsdp2(method, exact)
    if getattr(args, MEGATRON_FSDP, False):
        _refuse_for_megatron_fsdp(args, args, method, exact)
    _refuse_settings(args)
    refuse_graphed(args)
    if exact:
        _refuse_for_exact_gather(args, getattr(args, "overlap_param_gather", False))
    if method == "none":
        return
    _refuse_weight_shards(args)
    optimizer = getattr(args, "optimizer", "adam")
    if method == "onebit_adam":
        _refuse_for_onebit_adam(args)
        if optimizer != "adam":
            _refuse("optimizer", optimizer, "onebit_adam is Adam; use adam")
        if interval := getattr(args, "save_wgrads_interval", None):
            why = "onebit_adam reduces no gradients that could be saved; leave it out"
            _refuse("save_wgrads_interval", interval, why)
    if optimizer not in ("adam", "sgd", *MUONS):
        _refuse("optimizer", optimizer, "it is tested with adam, sgd and muon only")
    if optimizer in MUONS:
        _refuse_old_muon(optimizer)


def refuse_chunk(chunk: Any, config: CompressionConfig) -> None:
    """Check a wrapped model chunk.

    Raises:
        UserError: the chunk cannot be served; the message names the option and what to change.
    """
    refuse_wrapper(chunk)
    _refuse_settings(chunk.config)
    kind = fsdp_of(chunk)
    if config.outer_steps:
        _refuse_for_outer_steps(config.outer_interval, chunk.ddp_config, kind)
        refuse_with_outer_steps(chunk.config)
    if kind == TORCH_FSDP2:
        _refuse_for_torch_fsdp2(config.method, config.codes_weights)
    elif kind == MEGATRON_FSDP:
        flags = SimpleNamespace(**arguments.all_flags())
        _refuse_for_megatron_fsdp(chunk.ddp_config, flags, config.method, config.codes_weights)
    if kind is not None:
        return
    if config.compresses:
        _refuse_weight_shards(chunk.config)
        _refuse_gradients(chunk)
    if config.codes_weights:
        _refuse_for_exact_gather(chunk.config, chunk.ddp_config.overlap_param_gather)
    if config.is_onebit_adam:
        _refuse_for_onebit_adam(chunk.ddp_config)


def _refuse_gradients(chunk: Any) -> None:
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        for dtype in {bucket.grad_data.dtype for bucket in group.buckets}.difference(CARRIED):
            if chunk.dp_cp_group.size() > 1:  # Over a single rank no gradient is exchanged.
                raise UserError(
                    f"gradients in {dtype} cannot be compressed, those in float32, bfloat16 or float16 can: "
                    "cast the model, or set DistributedDataParallelConfig.grad_reduce_in_fp32"
                )


def refuse_wrapper(chunk: Any) -> None:
    """Check that a model's wrapper is Megatron's DistributedDataParallel or one of its FSDPs.

    Raises:
        UserError: it is another wrapper, which the message names.
    """
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(chunk, DistributedDataParallel) and fsdp_of(chunk) is None:
        kind = f"{type(chunk).__module__}.{type(chunk).__qualname__}"
        raise UserError(
            f"{kind} does not exchange gradients as Megatron's DistributedDataParallel or Megatron-FSDP v1 "
            "do: leave out --use-megatron-fsdp, or use its v1"
        )


def refuse_graphed(settings: Any) -> None:
    """Refuse Megatron's flags, or an optimizer's configuration, if steps are replayed from a CUDA graph.

    Raises:
        UserError: `optimizer_cuda_graph` is set.
    """
    if getattr(settings, "optimizer_cuda_graph", False):
        why = "steps that are replayed from a graph are not seen; leave it out"
        _refuse("optimizer_cuda_graph", True, why)


def refuse_one_by_one(sessions: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Refuse 1-bit Adam if the training loop steps the optimizers of one model one by one.

    Raises:
        UserError: it does; the message says what to call instead.
    """
    if any(session.ledger.joins(optimizers) for session in sessions):
        raise UserError(
            "onebit_adam exchanges the momentum of all of a model's optimizers at once: call step() of the "
            "optimizer that get_megatron_optimizer returns, not of those that it chains"
        )


def refuse_other_optimizer(optimizer: Any, sessions: Sequence[Any]) -> None:
    """Refuse the step of an optimizer that is not Megatron's for sessions of 1-bit Adam, or with a trial.

    Raises:
        UserError: `sessions`, whose parameters it updates, have one; the message says what to change.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    take = f"this model's is {kind}: take the optimizer that get_megatron_optimizer returns, or"
    if any(session.config.is_onebit_adam for session in sessions):
        raise UserError(f"onebit_adam makes the step of Megatron's own optimizers, and {take} method loco")
    if any(session.config.trial for session in sessions):
        # Ranks may step other ones as they like, and would wait for one another at the end of a turn.
        raise UserError(f"compression.trial takes turns of Megatron's own optimizers, and {take} no trial")


def refuse_unattached(parts: Sequence[Any], chunks: Sequence[Any], parameters: Iterable[Any]) -> None:
    """Refuse 1-bit Adam if its optimizer also updates models that are not attached.

    Args:
        parts: Megatron's optimizers, none of which chains others.
        chunks: the attached chunks that they update.
        parameters: the model parameters that they update.

    Raises:
        UserError: they do; the message says what to attach.
    """
    known = {id(chunk) for chunk in chunks}
    unattached = any(id(chunk) not in known for part in parts for chunk in getattr(part, "model_chunks", ()))
    if unattached or any(all(p not in chunk.param_to_bucket_group for chunk in chunks) for p in parameters):
        raise UserError(
            "onebit_adam exchanges the momentum of all that an optimizer updates, and this one updates a "
            "model that is not attached with it, too: attach all of its models, or give each an optimizer"
        )


def refuse_stepping(part: Any) -> None:
    """Check one of Megatron's optimizers, which chains no others, whose gradients are compressed.

    Raises:
        UserError: it is a Muon of a release that is not served.
    """
    kinds = {kind.__name__ for kind in type(getattr(part, "optimizer", None)).__mro__}
    if "TensorParallelMuon" in kinds:
        _refuse_old_muon("muon")


def _refuse_old_muon(optimizer: str) -> None:
    import megatron.core

    if Version(Version(megatron.core.__version__).base_version) < Version("0.18"):
        why = f"Muon is served from megatron-core 0.18 on, and this is {megatron.core.__version__}; use adam"
        _refuse("optimizer", optimizer, why)


def refuse_optimizer(part: Any) -> None:
    """Check that 1-bit Adam can serve one of Megatron's optimizers.

    Raises:
        UserError: it cannot; the message names the option, its value and what to change.
    """
    if not {"betas", "eps"} <= part.optimizer.defaults.keys():
        _refuse("optimizer", type(part.optimizer).__name__, "onebit_adam is Adam; use adam")
    _refuse_for_onebit_adam(part.config)


def _refuse_for_torch_fsdp2(method: str | None, exact: bool) -> None:
    if method == "onebit_adam":
        _refuse("use_torch_fsdp2", True, "no rank has a whole gradient; use loco", "onebit_adam")
    if exact:
        why = "its weights are sharded; leave out weight_gather"
        _refuse("use_torch_fsdp2", True, why, "weight_gather exact")


def _refuse_for_megatron_fsdp(settings: Any, flags: Any, method: str | None, exact: bool) -> None:
    """Check `settings`: Megatron's flags, or the DistributedDataParallelConfig of a wrapped model."""
    if method == "none" and not exact:
        return
    what = "weight_gather exact" if method == "none" else "gradient compression"
    if method == "onebit_adam":
        _refuse(MEGATRON_FSDP, True, "it keeps no whole gradient; use loco", "onebit_adam")
    if (version := getattr(settings, "megatron_fsdp_version", 1)) != 1:  # Megatron's main branch has it.
        _refuse("megatron_fsdp_version", version, "it exchanges by other code; use 1", what)
    name = "data_parallel_sharding_strategy"
    strategy, outer = getattr(settings, name), getattr(settings, "outer_dp_sharding_strategy", "no_shard")
    if strategy not in _SERVED:
        _refuse(name, strategy, "it reduces by other functions; use optim_grads", what)
    if exact and strategy != "optim_grads":
        _refuse(name, strategy, "weights are sharded; use optim_grads", "weight_gather exact")
    if outer != "no_shard":
        _refuse("outer_dp_sharding_strategy", outer, "it drops gradient scaling; use no_shard", what)
    instances = getattr(settings, "num_distributed_optimizer_instances", 1)
    if instances > 1 and getattr(flags, "overlap_grad_reduce", None) is False:
        why = "without overlap_grad_reduce Megatron never reduces them; set it"
        _refuse("num_distributed_optimizer_instances", instances, why, "compression")


def takes_turns(chunk: Any) -> bool:
    """Whether steps of a wrapped chunk can be tried with and without the exact gather and low bits."""
    edits = chunk.ddp_config.overlap_param_gather and getattr(chunk.config, "qk_clip", False)
    return fsdp_of(chunk) is None and not edits


def _refuse_for_trial(flags: Any) -> None:
    for name in (TORCH_FSDP2, MEGATRON_FSDP):
        if getattr(flags, name, False):
            _refuse(name, True, "it takes no turns; leave out the trial", "compression.trial")
    if getattr(flags, "qk_clip", False) and getattr(flags, "overlap_param_gather", False):
        why = "it changes weights between their step and their gather; leave out overlap_param_gather"
        _refuse("qk_clip", True, why, "compression.trial")


def _refuse_for_exact_gather(settings: Any, overlaps: bool) -> None:
    if overlaps and getattr(settings, "qk_clip", False):
        raise UserError(
            "megatron.qk_clip: True cannot be combined with compression.weight_gather exact and "
            "overlap_param_gather: it changes weights between the step that is coded and their gather; leave "
            "out overlap_param_gather, or set weight_gather to stock"
        )


def _refuse_for_onebit_adam(settings: Any) -> None:
    """Check Megatron's flags or one of its configurations; settings that it does not have are skipped."""

    def setting(name: str) -> Any:
        return getattr(settings, name, None)

    instances = setting("num_distributed_optimizer_instances")
    if instances and instances > 1:
        _refuse(
            "num_distributed_optimizer_instances",
            instances,
            "onebit_adam supports a single optimizer instance; leave it out",
        )
    for flag in (
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "reuse_grad_buf_for_mxfp8_param_ag",
    ):
        if setting(flag):
            _refuse(flag, True, "onebit_adam reads Adam's state, in fp32, and gradient buffers; leave it out")
    if setting("decoupled_weight_decay") is False and setting("weight_decay"):
        _refuse("decoupled_weight_decay", False, "onebit_adam decays weights apart from gradients")


def _refuse_for_outer_steps(interval: int, settings: Any, kind: str | None = None) -> None:
    """Check Megatron's flags, or the DistributedDataParallelConfig of a chunk wrapped by the FSDP `kind`."""
    what = f"compression.outer_interval {interval}"
    fsdp = kind or next(
        (flag for flag in (TORCH_FSDP2, MEGATRON_FSDP) if getattr(settings, flag, False)), None
    )
    if fsdp is not None:
        _refuse(fsdp, True, "it has no instances of the distributed optimizer; leave it out", what)
    instances = getattr(settings, "num_distributed_optimizer_instances", None) or 1
    if instances == 1:
        why = "it needs several optimizer instances; set it to the number of sites"
        _refuse("num_distributed_optimizer_instances", instances, why, what)
    optimizer = getattr(settings, "optimizer", "adam")
    if optimizer != "adam":
        _refuse("optimizer", optimizer, "outer steps read Adam's fp32 weights; use adam", what)
    refuse_with_outer_steps(settings)


def refuse_with_outer_steps(settings: Any) -> None:
    """Check Megatron's flags or one of its configurations for outer steps between optimizer instances.

    Raises:
        UserError: a setting cannot be served; the message names it and what to change.
    """
    what = "compression.outer_interval"
    for flag, why in (
        ("calculate_per_token_loss", "it divides by the tokens of all instances; leave it out"),
        ("use_precision_aware_optimizer", "it hides the fp32 weights; leave it out"),
        ("optimizer_cpu_offload", "it keeps fp32 weights elsewhere; leave it out"),
        ("overlap_param_gather_with_optimizer_step", "it gathers within the step; leave it out"),
        ("reuse_grad_buf_for_mxfp8_param_ag", "it gathers weights from gradient buffers; leave it out"),
        (
            "check_weight_hash_across_dp_replicas_interval",
            "weights of instances differ between outer steps; leave it out",
        ),
    ):
        if value := getattr(settings, flag, None):
            _refuse(flag, value, why, what)


def _refuse_settings(settings: Any) -> None:
    """Refuse CUDA graphs of the full iteration in Megatron's flags or a model's configuration."""
    graph = "full_iteration"
    why = "it would freeze the step counter; graph layers instead, or none"
    if getattr(settings, "cuda_graph_impl", None) == graph:
        _refuse("cuda_graph_impl", graph, why)
    scopes = getattr(settings, "cuda_graph_scope", None) or []  # Megatron 0.17 has a list of enums here.
    if any(getattr(scope, "name", scope) == graph for scope in scopes):
        _refuse("cuda_graph_scope", graph, why)


def _refuse_weight_shards(settings: Any) -> None:
    """Refuse GTP: megatron-core 0.19 can cut weights into more shards than tensor-parallel ranks, and then
    reduces their gradients in the backward pass, before DDP sees them."""
    tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
    experts = getattr(settings, "expert_tensor_parallel_size", None) or tensor
    for name, ranks in (("", tensor), ("expert_", experts)):
        flag = f"{name}tensor_parallel_num_weight_shards"
        shards = getattr(settings, flag, None) or ranks
        if shards > ranks:
            why = "its gradients are reduced outside Megatron's DistributedDataParallel; leave it out"
            _refuse(flag, shards, why)
