"""Measures the loss that 4 bits between FSDP2's replicas cost, by paired runs of a LLaMA without Megatron.

    torchrun --nproc-per-node 4 benchmarks/error_feedback/fsdp2_pairs.py --seeds 1,2 --steps 1000

There are two replicas of two shards each. The model has the width and depth of `llama_3m` (hidden size 256, 3
layers) over bytes; it learns Python's standard library, and its loss is measured on numpy's source. For each
seed it is trained twice, with the same weights and batches: uncompressed, and with LoCo.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_patch
from megatron_patch import CompressionConfig

LENGTH, BATCH, PEAK, LEAST, WARM_UP = 128, 4, 1e-3, 1e-5, 100
"""Tokens of a sequence, sequences per rank, peak and least learning rate, steps of the warm-up."""
VALIDATION = 256
"""The number of sequences on which the loss is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = _bytes_below(Path(sysconfig.get_path("stdlib")))
    other = _bytes_below(Path(numpy.__file__).parent)
    runs: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for method in ("none", "loco"):
            config = CompressionConfig(method=method, bits=args.bits)
            runs.append({"seed": seed, "method": method} | _trained(config, seed, args.steps, text, other))
            if dist.get_rank() == 0:
                print(json.dumps(runs[-1]), flush=True)
    if dist.get_rank() == 0:
        pairs = list(zip(runs[::2], runs[1::2], strict=True))
        percent = [100 * (loco["loss"] / none["loss"] - 1) for none, loco in pairs]
        told = ", ".join(f"{one:+.3f} %" for one in percent)
        print(f"{told}; mean {statistics.mean(percent):+.3f} %")
        if args.json:
            found = {"runs": runs, "percent": percent, "torch": torch.__version__, "bits": args.bits}
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _trained(
    config: CompressionConfig, seed: int, steps: int, text: torch.Tensor, other: torch.Tensor
) -> dict[str, Any]:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=256, **sizes))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    megatron_patch.attach(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    sample = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        batch = _rows(text, torch.randint(len(text) - LENGTH, (BATCH,), generator=sample))
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - began) / steps
    report = megatron_patch.report(model)
    loss = _validation(model, other)
    megatron_patch.disable()
    return {"loss": loss, "bits_per_gradient": report.bits_per_gradient, "step_seconds": seconds}


def _rate(step: int, steps: int) -> float:
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    return LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP))) / 2


@torch.no_grad()
def _validation(model: Any, text: torch.Tensor) -> float:
    """Return the mean loss over the same sequences for every run; each rank computes a share of them."""
    starts = torch.linspace(0, len(text) - LENGTH - 1, VALIDATION).long()[
        dist.get_rank() :: dist.get_world_size()
    ]
    parts = [_rows(text, some) for some in starts.split(16)]
    total = torch.stack([model(part, labels=part).loss for part in parts]).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _rows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(LENGTH)].long()


def _bytes_below(folder: Path) -> torch.Tensor:
    """Return all Python source below a folder, in order, without site-packages."""
    files = sorted(
        path for path in folder.rglob("*.py") if "site-packages" not in path.relative_to(folder).parts
    )
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


if __name__ == "__main__":
    main()
