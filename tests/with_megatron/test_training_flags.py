"""What Megatron's flags say: the learning rate's warm-up, with batches that grow too; what is refused."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import Any

import pytest

from megatron_patch.errors import UserError
from megatron_patch.megatron import arguments
from megatron_patch.megatron.unsupported import refuse_flags


def warm_up(flags: dict[str, Any], calculator: dict[str, Any] | None) -> int:
    """In a worker: steps of the warm-up in a job with these flags."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.training import global_vars

    before = global_vars._GLOBAL_ARGS
    global_vars._GLOBAL_ARGS = Namespace(**flags)
    try:
        if calculator is not None:
            microbatches.init_num_microbatches_calculator(0, **calculator)
        return arguments.lr_warmup_steps()
    finally:
        global_vars._GLOBAL_ARGS = before
        microbatches.destroy_num_microbatches_calculator()


BATCH = {"global_batch_size": 64}


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({}, 0),
        ({**BATCH, "lr_warmup_iters": 25}, 25),
        ({**BATCH, "lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None}, 0),
        ({**BATCH, "lr_warmup_fraction": 0.07, "train_iters": 100}, 7),  # 0.07 * 100 is 7.000000000000001
        ({**BATCH, "lr_warmup_fraction": 0.1, "train_iters": 100, "lr_decay_iters": 50}, 5),
        ({**BATCH, "lr_warmup_samples": 1000, "train_samples": 50000}, 16),
        ({**BATCH, "lr_warmup_fraction": 0.1, "train_samples": 6400}, 10),
        ({"lr_warmup_samples": 100}, 0),  # a batch that is not known yet
        ({**BATCH, "lr_warmup_iters": "soon"}, 0),  # refused elsewhere
    ],
)
@pytest.mark.parametrize("initialized", [False, True])
def test_steps_of_the_warm_up(pool, flags, steps, initialized):
    sizes = {**BATCH, "rampup_batch_size": None, "micro_batch_size": 2, "data_parallel_size": 4}
    calculator = sizes if initialized else None
    if initialized and "global_batch_size" not in flags:
        pytest.skip("Megatron always knows the batch then")
    assert pool.run(warm_up, flags, calculator, world_size=1) == [steps]


def grown(thresholds: list[tuple[int, int]], samples: int) -> int:
    """Steps until `samples` are consumed, by batches of the sizes that begin at these numbers of samples."""
    consumed = steps = 0
    while consumed < samples:
        consumed += next(size for least, size in reversed(thresholds) if consumed >= least)
        steps += 1
    return steps


def test_a_schedule_of_batch_sizes_is_followed(pool):
    """By the final batch it would be a third of the steps."""
    from megatron.core import num_microbatches_calculator as microbatches

    if (
        "step_batch_size_schedule"
        not in inspect.signature(microbatches.init_num_microbatches_calculator).parameters
    ):
        pytest.skip("this release of Megatron has batch ramp-ups instead")
    flags = {"global_batch_size": 256, "lr_warmup_samples": 20_000, "train_samples": 100_000}
    calculator = {
        "micro_batch_size": 2,
        "data_parallel_size": 4,
        "step_batch_size_schedule": "0:32 4000:64 12000:128 30000:256",
    }
    (found,) = pool.run(warm_up, flags, calculator, world_size=1)
    expected = grown([(0, 32), (4000, 64), (12000, 128), (30000, 256)], 20_000)
    assert found == expected
    assert found > 3 * 20_000 / 256


OUTER = {"compression_method": "none", "compression_outer_interval": 30, "optimizer": "adam"}
INSTANCES = {"num_distributed_optimizer_instances": 2}
FSDP = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads",
    "outer_dp_sharding_strategy": "no_shard",
    "compression_method": "loco",
}
EXACT = {"compression_weight_gather": "exact", "overlap_param_gather": True, "qk_clip": True}
TRIAL = {"compression_trial": 48}
QK = "leave out overlap_param_gather, or set weight_gather to stock"
AWARE, OFFLOAD = "use_precision_aware_optimizer", "optimizer_cpu_offload"
GRAPH, WGRADS = "optimizer_cuda_graph", "save_wgrads_interval"
HASHES, VERSION = "check_weight_hash_across_dp_replicas_interval", "megatron_fsdp_version"
SHARDS = "tensor_parallel_num_weight_shards"


@pytest.mark.parametrize(
    ("flags", "words", "served"),
    [
        (OUTER, "num_distributed_optimizer_instances", INSTANCES),
        (OUTER | INSTANCES | {"use_megatron_fsdp": True}, "leave it out", {"use_megatron_fsdp": False}),
        (OUTER | INSTANCES | {"optimizer": "muon"}, "use adam", {"optimizer": "adam"}),
        (OUTER | INSTANCES | {AWARE: True}, "hides the fp32", {AWARE: False}),
        (OUTER | INSTANCES | {OFFLOAD: True}, OFFLOAD, {OFFLOAD: False}),
        (OUTER | INSTANCES | {HASHES: 10}, "differ between outer steps", {HASHES: None}),
        (EXACT, QK, {"overlap_param_gather": False}),
        (
            TRIAL | {"use_torch_fsdp2": True},
            "use_torch_fsdp2: True .* leave out the trial",
            {"compression_trial": 0},
        ),
        (TRIAL | FSDP, "use_megatron_fsdp: True .* leave out the trial", {"compression_trial": 0}),
        (TRIAL | EXACT, "qk_clip: True .* compression.trial", {"overlap_param_gather": False}),
        (EXACT, QK, {"qk_clip": False}),
        (EXACT, QK, {"compression_weight_gather": "stock"}),
        ({GRAPH: True}, "optimizer_cuda_graph: True", {GRAPH: False}),
        ({"compression_method": "onebit_adam", WGRADS: 10}, "10 .* leave it out", {WGRADS: None}),
        ({SHARDS: 2}, f"{SHARDS}: 2 .* leave it out", {SHARDS: None}),
        # On Megatron's main branch it is another implementation, which no release has yet.
        (FSDP | {VERSION: 2}, "megatron_fsdp_version: 2 .* use 1$", {VERSION: 1}),
    ],
)
def test_what_cannot_be_served_is_refused_before_ranks_start(
    flags: dict[str, Any], words: str, served: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=words) as error:
        refuse_flags(Namespace(**flags))
    assert "\n" not in str(error.value)
    refuse_flags(Namespace(**flags | served))
