"""A stand-in for Transformer Engine's FusedAdam, as Megatron's precision-aware optimizer uses it.

The real one is a CUDA kernel. What the exchanges can notice of it is the same here: it takes gradients from
`decoupled_grad`, holds fp32 main weights itself, and writes the model's bf16 weights inside its own step.
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


@contextlib.contextmanager
def stands_in() -> Iterator[None]:
    """Megatron finds this Adam where it looks for Transformer Engine's."""
    import megatron.core.optimizer as optimizer

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(optimizer, "Adam", FusedAdam),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield
