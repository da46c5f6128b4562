"""A loop of accelerate's under FSDP2 with 4-bit LoCo: `torchrun accelerate_loop.py REPLICAS`."""

from __future__ import annotations

import inspect
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_patch

LENGTH = 64

# accelerate takes FSDP2 where it finds accelerators, and DDP instead on a CPU. All that follows this decision
# runs on a CPU, too.
PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    cpu_ram_efficient_loading=False,
)
replicas = int(sys.argv[1])
sizes = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas)
accelerator = Accelerator(
    cpu=True, fsdp_plugin=plugin, parallelism_config=sizes, gradient_accumulation_steps=2
)
torch.manual_seed(1)
layers = {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, **layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = accelerator.prepare(model, optimizer)
megatron_patch.attach(model, megatron_patch.CompressionConfig(method="loco", bits=4, start_step=1))

text = torch.tensor(list(inspect.getsource(inspect).encode()))
sample = torch.Generator().manual_seed(dist.get_rank())
for microbatch in range(60):
    with accelerator.accumulate(model):
        starts = torch.randint(len(text) - LENGTH, (4,), generator=sample)
        batch = text[starts[:, None] + torch.arange(LENGTH)]
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process and microbatch % 20 in (3, 19):
        print(f"loss {loss.item():.4f}, {megatron_patch.report(model).bits_per_gradient:.2f} bits/gradient")
