"""Stand-ins for what Megatron's precision-aware and offloaded optimizers need a GPU for.

FusedAdam is Transformer Engine's, a CUDA kernel: it takes gradients from `decoupled_grad`, holds fp32 main
weights, and writes the model's bf16 weights inside its own step. Of the offloaded optimizer,
HybridDeviceOptimizer, all is Megatron's but the choice of parameters, which asks whether they are on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with main weights of its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        assert master_weights
        assert use_decoupled_grad
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.dtypes = exp_avg_dtype, exp_avg_sq_dtype

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        first, second = self.dtypes
        self.state[parameter] = {
            "exp_avg": torch.zeros_like(parameter, dtype=first),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=second),
            "master_param": parameter.detach().float().clone(),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state, gradient = self.state[parameter], gradient.float()
                m = state["exp_avg"].float().lerp(gradient, 1 - b1)
                v = state["exp_avg_sq"].float().lerp(gradient * gradient, 1 - b2)
                main = state["master_param"]
                main.mul_(1 - rate * group["weight_decay"])
                mean, variance = m / (1 - b1 ** group["step"]), v / (1 - b2 ** group["step"])
                main.sub_(rate * mean / (variance.sqrt() + group["eps"]))
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                parameter.copy_(main)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad = None


def _offloaded_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
    """HybridDeviceOptimizer._get_sub_optimizer_param_groups, for parameters on a GPU."""
    every = [parameter for group in self.param_groups for parameter in group["params"]]
    threshold = sum(parameter.numel() for parameter in every) * offload_fraction
    offloaded: dict[Any, Any] = {}
    in_fp32 = {}
    groups: tuple[list[Any], list[Any]] = ([], [])  # on the CPU, on the GPU
    for group in self.param_groups:
        cut: tuple[list[Any], list[Any]] = ([], [])
        for parameter in group["params"]:
            leaves = sum(p.numel() for p in offloaded) < threshold
            inner = parameter.detach().clone() if leaves else parameter
            if self.param_update_in_fp32 and inner.dtype != torch.float32:
                inner = in_fp32[parameter] = inner.detach().clone().float()
            if leaves:
                offloaded[parameter] = inner
            cut[0 if leaves else 1].append(inner)
        for device in (0, 1):
            if cut[device]:
                groups[device].append(group | {"params": cut[device]})
    return *groups, offloaded, {inner: parameter for parameter, inner in offloaded.items()}, in_fp32


@contextlib.contextmanager
def offloading() -> Iterator[None]:
    """Megatron's HybridDeviceOptimizer offloads parameters as if all were on a GPU."""
    from megatron.core.optimizer import HybridDeviceOptimizer

    name = "_get_sub_optimizer_param_groups"
    with mock.patch.object(HybridDeviceOptimizer, name, _offloaded_groups):
        yield


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Megatron finds this Adam where it looks for Transformer Engine's."""
    import megatron.core.optimizer as optimizer
    import megatron.core.utils as utils
    from packaging.version import Version

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    assert sys.modules.keys().isdisjoint(names)
    sys.modules.update(modules)  # not mock.patch.dict, which forgets what else is imported meanwhile
    try:
        with (
            mock.patch.object(optimizer, "Adam", FusedAdam),
            mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
            mock.patch.object(utils, "_te_version", Version("0.0.0")),  # which some releases ask for
        ):
            yield
    finally:
        for name in names:
            del sys.modules[name]
