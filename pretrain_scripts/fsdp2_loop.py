"""A training loop on PyTorch's FSDP2 with low-bit gradients, flat or between replicas.

On 4 ranks without a GPU, sharded over all of them; and in 2 replicas of 2 shards, where bytes between
replicas are 4-bit codes and everything inside is FSDP2's own:

    torchrun --nproc-per-node 4 fsdp2_loop.py
    torchrun --nproc-per-node 4 fsdp2_loop.py 2

With GPUs put "cuda" for "cpu" and "nccl" for "gloo", call torch.cuda.set_device(local_rank) first, and move
the model and its batches to the GPU.
"""

import inspect
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import megatron_patch

STEPS, BATCH, LENGTH, WIDTH = 40, 8, 64, 128

dist.init_process_group("gloo")
replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1
shape, names = (replicas, dist.get_world_size() // replicas), ("replicate", "shard")
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
mesh = mesh if replicas > 1 else mesh["shard"]
text = torch.tensor(list(inspect.getsource(inspect).encode()))  # what it learns: Python, byte by byte

torch.manual_seed(1)
blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256))
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*model, model):
    fully_shard(module, mesh=mesh, mp_policy=precision)
megatron_patch.attach(model, megatron_patch.CompressionConfig(method="loco", bits=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

sample = torch.Generator().manual_seed(dist.get_rank())  # every rank draws batches of its own
for step in range(1, STEPS + 1):
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=sample)
    batch = text[starts + torch.arange(LENGTH + 1)]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()  # gradients are exchanged, in 4 bits
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}  {megatron_patch.report()}", flush=True)
dist.destroy_process_group()
