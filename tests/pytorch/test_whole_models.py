"""Whole models under FSDP2 and DDP: what PyTorch users combine with them; bad gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import TransformerEncoderLayer

import megatron_patch


def language_model(tied: bool = False) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 32)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True) for _ in range(2)
            )
            self.out = nn.Linear(32, 50, bias=False)
            if tied:
                self.out.weight = self.words.weight

        def forward(self, tokens: Any) -> Any:
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    return Tied()


def train(how: str, compression: dict[str, Any] | None, replicas: int = 1) -> dict[str, Any]:
    """Five steps; losses, norms and weights."""
    torch.manual_seed(3)
    with torch.device("meta") if how == "meta" else nullcontext():
        model = language_model(how == "tied")
    if how == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, TransformerEncoderLayer))
    if how == "compiled":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    options: dict[str, Any] = {"mesh": mesh if replicas > 1 else mesh["shard"]}
    if how == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if compression is not None:
        megatron_patch.attach(model, megatron_patch.CompressionConfig(**compression))
    if how == "meta":
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(9)
        for parameter in model.parameters():
            with torch.no_grad():
                whole = torch.randn(parameter.shape, generator=generator) / 8
                parameter.copy_(
                    torch.distributed.tensor.distribute_tensor(
                        whole, parameter.device_mesh, parameter.placements
                    )
                )
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2)]
    if how == "two optimizers":
        optimizers = [torch.optim.AdamW(parameters[:3], lr=1e-2), torch.optim.SGD(parameters[3:], lr=1e-2)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, norms = [], []
    for _ in range(5):
        tokens = torch.randint(50, (2, 9), generator=generator)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0).full_tensor()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    found = {
        "losses": losses,
        "norms": norms,
        "weights": [p.full_tensor().detach().numpy() for p in parameters],
    }
    if compression is not None:
        found["step"], found["bits"] = (
            megatron_patch.report(model).step,
            megatron_patch.report().bits_per_gradient,
        )
        megatron_patch.disable()
    return found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "how", ["plain", "tied", "checkpointed", "compiled", "offloaded", "meta", "two optimizers"]
)
def test_method_none_is_stock_and_four_bits_stay_close(pool, how: str, replicas: int) -> None:
    stock = pool.run(train, how, None, replicas, world_size=4)
    none = pool.run(train, how, {"method": "none"}, replicas, world_size=4)
    loco = pool.run(train, how, {"method": "loco", "start_step": 0}, replicas, world_size=4)
    for mine, theirs, low in zip(none, stock, loco, strict=True):
        assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
        assert all(map(np.array_equal, mine["weights"], theirs["weights"]))
        assert mine["step"] == low["step"] == 5, "two optimizers make one step"
        assert low["losses"] != theirs["losses"]
        np.testing.assert_allclose(low["losses"], theirs["losses"], rtol=0.02)
        assert low["bits"] < 9, "vectors are sent as they are"
