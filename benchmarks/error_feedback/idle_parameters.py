"""Measures whether error feedback harms parameters that stop receiving gradients: errors of earlier gradients
are still sent for some steps, and Adam makes full-sized steps of these small sums.

    torchrun --nproc-per-node 2 -m megatron_patch.launch \
        benchmarks/error_feedback/idle_parameters.py --compression-device cpu

A GPTModel of two layers learns Python source, byte by byte: 100 steps on all of it, then 200 steps in which

    rows      no capital letter occurs, so that their embedding rows have no gradient
    expert    the gradients of the first layer's MLP are zero, though its output is used

It reports how far the idle parameters moved in the 200 steps, relative to the mean of their absolute values
when they became idle, and the loss on a text that needs them, compared with the uncompressed run of the same
seed. It takes about 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import statistics
import tarfile
import typing
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

import megatron_patch

logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("megatron_patch").setLevel(logging.ERROR)
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "naive, 4 bits": {"method": "naive", "bits": 4},
    "loco, 4 bits": {"method": "loco", "bits": 4},
    "naive, 2 bits": {"method": "naive", "bits": 2},
    "loco, 2 bits": {"method": "loco", "bits": 2},
}
BUSY, IDLE, BATCH, LENGTH = 100, 200, 8, 64
CAPITALS = list(range(ord("A"), ord("Z") + 1))
TEXT = inspect.getsource(tarfile) + inspect.getsource(argparse)
HELD_OUT = inspect.getsource(typing)


def run(options: dict[str, Any], kind: str, seed: int) -> tuple[float, float]:
    """Return the movement of the idle parameters in the idle steps, and the loss on the held-out text."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    spec = get_gpt_layer_local_spec()
    gpt = GPTModel(
        config, spec, vocab_size=256, max_sequence_length=LENGTH, share_embeddings_and_output_weights=False
    )
    ddp = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = distributed.DistributedDataParallel(config, ddp, gpt)
    megatron_patch.attach(model, megatron_patch.CompressionConfig(**options))
    model.broadcast_params()
    adam = OptimizerConfig(
        lr=2e-3, adam_beta2=0.95, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(adam, [model])
    embeddings = gpt.embedding.word_embeddings.weight
    mlp = list(gpt.decoder.layers[0].mlp.parameters())

    def idle() -> torch.Tensor:
        found = [embeddings[CAPITALS]] if kind == "rows" else mlp
        return torch.cat([part.detach().reshape(-1) for part in found]).clone()

    sample = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    whole, lower = (torch.tensor(list(text.encode())) for text in (TEXT, TEXT.lower()))

    def loss_on(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        batch = text[starts[:, None] + torch.arange(LENGTH + 1)]
        return model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).float().mean()

    for step in range(1, BUSY + IDLE + 1):
        if step == BUSY + 1:
            before = idle()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(step / 20, 1.0)
        model.zero_grad_buffer()
        text = lower if kind == "rows" and step > BUSY else whole
        loss_on(text, torch.randint(len(text) - LENGTH, (BATCH,), generator=sample)).backward()
        if kind == "expert" and step > BUSY:
            for parameter in mlp:
                parameter.main_grad.zero_()
        distributed.finalize_model_grads([model])
        optimizer.step()
    moved = float((idle() - before).abs().mean() / before.abs().mean())
    held_out, losses = torch.tensor(list(HELD_OUT.encode())), []
    with torch.no_grad():
        for first in range(0, 40 * BATCH * LENGTH, BATCH * LENGTH):
            losses.append(float(loss_on(held_out, first + LENGTH * torch.arange(BATCH))))
    megatron_patch.disable()
    return moved, statistics.mean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_known_args()[0].seeds + 1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for kind in ("rows", "expert"):
        base: list[float] = []
        for name, options in METHODS.items():
            moved, losses = zip(*(run(options, kind, seed) for seed in seeds), strict=True)
            base = base or list(losses)
            change = [100 * (mine / other - 1) for mine, other in zip(losses, base, strict=True)]
            if dist.get_rank() == 0:
                print(
                    f"{kind:6}  {name:13}  moved {100 * statistics.mean(moved):6.2f} %   loss "
                    f"{statistics.mean(losses):.4f}  {', '.join(f'{each:+.2f} %' for each in change)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
