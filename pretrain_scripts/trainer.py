"""Hugging Face's Trainer with low-bit gradients, under DistributedDataParallel or FSDP2: one callback.

On 2 ranks without a GPU:

    torchrun --nproc-per-node 2 trainer.py

With GPUs leave out `use_cpu`; for FSDP2 add fsdp="full_shard", fsdp_config={"fsdp_version": 2}.
"""

import inspect
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megatron_patch


class LowBitGradients(TrainerCallback):
    """Attaches what the Trainer has wrapped, and adds to its logs what a step sent."""

    trainer: Any = None

    def __init__(self, config: megatron_patch.CompressionConfig) -> None:
        self.config = config

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        megatron_patch.attach(self.trainer.model_wrapped, self.config)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            logs["bits_per_gradient"] = round(megatron_patch.report().bits_per_gradient, 2)


LENGTH = 64
text = torch.tensor(list(inspect.getsource(inspect).encode()))  # what it learns: Python, byte by byte
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]
torch.manual_seed(1)
sizes: dict[str, Any] = {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, **sizes))
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=60,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=10,
    lr_scheduler_type="constant_with_warmup",
    logging_steps=20,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)
callback = LowBitGradients(megatron_patch.CompressionConfig(bits=4))
callback.trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
callback.trainer.train()
