# ruff: noqa: E402, F401  (stand-ins come before what needs them)
"""Training by Megatron-Bridge's own `pretrain` on CPU ranks, under torchrun.

    bridge_training.py FOLDER STEPS STOP CHANGE

trains up to STOP of STEPS steps from the checkpoint in FOLDER, if there is one, and saves there every 5
steps, by Bridge's own checkpoint manager. CHANGE is none or async (saves).
"""

from __future__ import annotations

import logging
import sys
from functools import partial

from megatron_patch.megatron.cpu import device, torch_adam

device.install()
torch_adam.install()

import megatron.core.dist_checkpointing.strategies.nvrx
import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.optimizer
import stand_ins
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

stand_ins.install(
    *("transformer_engine", "nvidia_resiliency_ext", "modelopt", "megatron.energon", "diffusers", "datasets")
)

from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training import eval as evaluation
from megatron.bridge.training import train
from megatron.bridge.training.config import ConfigContainer, MockGPTDatasetConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

import megatron_patch
from megatron_patch.megatron import patching, symbols

ON_CPU = {
    "transformer_layer_spec": lambda config, vp_stage=None: get_gpt_layer_local_spec(),
    "transformer_impl": "local",
    **dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "persist_layer_norm",
            "masked_softmax_fusion",
            "bias_activation_fusion",
        ),
        False,
    ),
    **dict.fromkeys(("bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion", "bf16"), False),
    "params_dtype": torch.float32,
}


def configured(folder: str, steps: int, stop: int) -> ConfigContainer:
    """A GPT of 85,504 parameters on random tokens, in fp32."""
    cfg = vanilla_gpt_pretrain_config()
    size = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    for name, value in (ON_CPU | size | {"seq_length": 32, "vocab_size": 256}).items():
        setattr(cfg.model, name, value)
    cfg.model.hidden_dropout = cfg.model.attention_dropout = 0.0
    cfg.tokenizer.vocab_size = 255
    cfg.mixed_precision = None
    cfg.optimizer.bf16, cfg.optimizer.params_dtype = False, torch.float32
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-3, 1e-4
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 2, steps
    cfg.dist.distributed_backend = "gloo"
    cfg.train.train_iters, cfg.train.exit_interval = steps, stop
    cfg.train.global_batch_size, cfg.train.micro_batch_size = 8, 2
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = True
    cfg.ddp.overlap_grad_reduce = True
    cfg.dataset = MockGPTDatasetConfig(
        random_seed=1,
        seq_length=32,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        num_workers=0,
        dataloader_type="single",
    )
    cfg.logger.tensorboard_dir, cfg.logger.log_interval = None, 1
    cfg.checkpoint.save = cfg.checkpoint.load = folder
    cfg.checkpoint.save_interval = 5
    return cfg


def main() -> None:
    folder, steps, stop, change = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    logging.getLogger("megatron_patch").setLevel(logging.INFO)
    cfg = configured(folder, steps, stop)
    if change == "async":
        cfg.checkpoint.async_save, cfg.checkpoint.async_strategy = True, "mcore"
        patching.restore(symbols.RESULTS_QUEUE)  # the stand-in's is not for processes that write
    config = megatron_patch.CompressionConfig(method="loco", bits=4)
    cfg.model.register_post_wrap_hook(partial(megatron_patch.attach, config=config))
    for module in (train, evaluation):  # ModelOpt's, which says None where nothing is distilled
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
