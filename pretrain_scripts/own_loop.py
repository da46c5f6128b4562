"""A training loop of your own on megatron-core, with 4-bit gradients and exact weight gathers.

On 2 ranks without a GPU:

    torchrun --nproc-per-node 2 -m megatron_patch.launch own_loop.py --compression-device cpu

With GPUs it is `torchrun --nproc-per-node 8 own_loop.py`: put "nccl" for "gloo", call
torch.cuda.set_device(local_rank) first, and move the model and its batches to the GPU (`.cuda()`).
"""

import inspect
import logging

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

import megatron_patch

logging.getLogger("megatron.core").setLevel(logging.ERROR)  # or it names every bucket's parameters
STEPS, BATCH, LENGTH = 30, 8, 64

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1234)
text = torch.tensor(list(inspect.getsource(logging).encode()))  # what it learns: Python, byte by byte

config = TransformerConfig(
    num_layers=2, hidden_size=128, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16
)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=LENGTH).bfloat16()
ddp = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
model = distributed.DistributedDataParallel(config, ddp, model)
megatron_patch.attach(model, megatron_patch.CompressionConfig(bits=4, weight_gather="exact"))
model.broadcast_params()
adam = OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True)
optimizer = get_megatron_optimizer(adam, [model])

positions = torch.arange(LENGTH).expand(BATCH, -1)
mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()  # what a position may not see
sample = torch.Generator().manual_seed(dist.get_rank())  # every rank draws batches of its own
for step in range(1, STEPS + 1):
    model.zero_grad_buffer()
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=sample)
    batch = text[starts + torch.arange(LENGTH + 1)]
    loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).float().mean()
    loss.backward()
    distributed.finalize_model_grads([model])  # gradients are exchanged, in 4 bits
    optimizer.step()  # updated weights are gathered, as changes in an exact code
    if step % 5 == 0 and dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}  {megatron_patch.report()}", flush=True)
dist.destroy_process_group()
