# ruff: noqa: E402  (stand-ins come before what needs them)
"""A tiny GPT, wrapped by a framework's own function, trained on CPU ranks under torchrun.

    framework_training.py FRAMEWORK FOLDER METHOD [save|load CHECKPOINT]

FRAMEWORK is verl, swift or megatron (Megatron's own DistributedDataParallel), FOLDER where its wheel lies;
METHOD none, naive, loco or off, where the package is not asked for anything. Rank 0 prints every step's loss,
exactly, and the report. After half of the steps the framework's own functions save a checkpoint, or the run
begins there with what they load.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_patch.megatron.cpu import device, torch_adam

device.install()
torch_adam.install()

import megatron.training  # noqa: F401  (before the stand-ins: it does without what they stand for)
import stand_ins
import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megatron_patch

STEPS, BATCH, LENGTH, VOCABULARY = 6, 4, 32, 128
_VERL = (
    *("ray", "tensordict", "codetiming", "hydra", "torchdata", "mbridge", "flash_attn", "transformer_engine"),
    *("datasets", "peft", "pybind11", "pylatexenc", "dill", "orjson"),
)


def _by_verl(folder: str, build: Any) -> list[Any]:
    stand_ins.install(*_VERL)
    sys.path.insert(0, folder)
    utils = importlib.import_module("verl.utils.megatron_utils")
    stays = Namespace(use_cpu_initialization=True)  # or it names a GPU to move to
    return list(utils.get_model(lambda pre_process, post_process: build(), transformer_config=stays))


def _swift(folder: str) -> Any:
    """The file itself: the package around it imports every model's template."""
    stand_ins.install("swift", "mcore_bridge")
    name = "swift.megatron.utils.megatron_lm_utils"
    spec = importlib.util.spec_from_file_location(name, Path(folder, *name.split(".")).with_suffix(".py"))
    assert spec
    assert spec.loader
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    return utils


def _by_swift(folder: str, build: Any) -> list[Any]:
    utils = _swift(folder)
    options = {"use_distributed_optimizer": True, "accumulate_allreduce_grads_in_fp32": True}
    more = {"overlap_param_gather_with_optimizer_step": False, "data_parallel_random_init": True}
    return list(utils.wrap_model(Namespace(bf16=True, fp16=False, **options, **more), [build()]))


def _by_megatron(folder: str, build: Any) -> list[Any]:
    config = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    model = build()
    chunk = distributed.DistributedDataParallel(model.config, config, Float16Module(model.config, model))
    chunk.broadcast_params()
    return [chunk]


def _checkpoint_of_verl(folder: str, chunk: Any, optimizer: Any, what: str, checkpoint: Path) -> None:
    """Its checkpoint manager's two trees, model and optimizer, by its functions that write and read them."""
    module = importlib.import_module("verl.utils.megatron.dist_checkpointing")
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    model = {"model": chunk.module.sharded_state_dict(metadata=metadata)}
    loading = what == "load"
    state = {"optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}
    trees = {"model": model, "optimizer": state}
    if not loading:
        for name, tree in trees.items():
            (checkpoint / name).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            module.save_dist_checkpointing(tree, str(checkpoint / name))
        return
    loaded = {
        name: module.load_dist_checkpointing(tree, str(checkpoint / name)) for name, tree in trees.items()
    }
    chunk.module.load_state_dict(loaded["model"]["model"])
    optimizer.load_state_dict(loaded["optimizer"]["optimizer"])


def _checkpoint_of_swift(folder: str, chunk: Any, optimizer: Any, what: str, checkpoint: Path) -> None:
    """Its own functions; what they take of packages that are not here has the meaning that it has there."""
    utils = _swift(folder)
    utils.unwrap_model = lambda models: [model.module for model in models]
    utils.check_json_format = dict
    utils.logger = logging.getLogger("swift")
    utils.is_master = lambda: dist.get_rank() == 0
    utils.patch_merge_fn = lambda state: state
    utils._load_iteration = lambda path: int(Path(path).read_text())  # all-reduced on a GPU there
    args = Namespace(
        output_dir=str(checkpoint),
        mcore_model=str(checkpoint),
        tuner_type="full",
        **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
        **dict.fromkeys(("use_distributed_optimizer", "no_save_rng", "no_load_rng", "bf16"), True),
        **dict.fromkeys(("async_save", "no_save_optim", "no_load_optim", "finetune", "fp16"), False),
        **dict.fromkeys(("dist_ckpt_save_pre_mcore_014", "dist_ckpt_optim_fully_reshardable"), False),
        data_parallel_random_init=True,
    )
    if what == "save":
        utils.save_mcore_checkpoint(args, [chunk], optimizer, iteration=STEPS // 2)
    else:
        assert utils.load_mcore_checkpoint(args, [chunk], optimizer) == STEPS // 2


def main(framework: str, folder: str, method: str, what: str = "", checkpoint: str = "") -> None:
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    options = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0}
    options |= {"hidden_dropout": 0.0, "bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(**options, use_cpu_initialization=True)

    def build() -> GPTModel:
        torch.manual_seed(7)
        return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)

    if method != "off":
        logging.getLogger("megatron_patch").setLevel(logging.INFO)
        given = {"bits": 2 if method == "loco" else 4, "start_step": 0, "weight_gather": "exact"}
        megatron_patch.enable(megatron_patch.CompressionConfig(method=method, **given))
    wrap = {"verl": _by_verl, "swift": _by_swift, "megatron": _by_megatron}[framework]
    chunks = wrap(folder, build)
    adam = OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, chunks)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    sample = torch.Generator().manual_seed(dist.get_rank())
    (model,) = chunks
    checkpoint_of = {"verl": _checkpoint_of_verl, "swift": _checkpoint_of_swift}.get(framework)
    for step in range(STEPS):
        if what and checkpoint_of and step == STEPS // 2:
            checkpoint_of(folder, model, optimizer, what, Path(checkpoint))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=sample)
        if what == "load" and step < STEPS // 2:
            continue
        loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).float().mean()
        loss.backward()
        distributed.finalize_model_grads([model])
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item().hex()}")
    if dist.get_rank() == 0 and method != "off":
        print(f"report {megatron_patch.report()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
