"""Tries remedies for the harm of error feedback to Adam, and oracles that show its cause.

    LOCO_TRIAL=exact_v megatron-loco train configs/models/llama_tiny.yaml \
        launch.script=benchmarks/error_feedback/remedies.py \
        compression.method=error_feedback compression.bits=2 compression.start_step=0 --out runs/exact_v

It runs Megatron's pretrain_gpt.py with this file's Adam and one of these trials:

- `none`: Adam is not changed.
- `exact_m`, `exact_v`: Adam's first, or second, moment comes from the true mean gradient, which a second
  reduction in full precision gives. No real exchange has it: these oracles show which moment is harmed.
- `noise_v`: the running mean of the exchange's noise, |received - true|^2, measured over 128 elements, is
  subtracted from v, of which at least a twentieth remains. No owner could know as much of the noise.
- `damped`: half of each error is kept, e <- e/2 (with `compression.method=error_feedback`).
- `ef21`: momentum at the sender (EF21-SGDM, Fatkhullin et al. 2023): m <- beta1*m + (1-beta1)*g, the rank
  sends the code of m - G and adds what was sent to G; owners add up what they receive. Adam then has beta1 of
  0 and v of sqrt((1+beta1)/(1-beta1)) * G, which has the energy of g (with `compression.method=naive`).

Other runs cannot use the optimizer's state of these runs. Models must be dense and in fp32, with the
distributed optimizer.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.training import get_args

from megatron_patch.collectives.sender import Sender, decompress

_SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_scripts" / "pretrain_gpt.py"
TRIALS = ("none", "exact_m", "exact_v", "noise_v", "damped", "ef21")
_BLOCK = 128
_LEAST = 0.05
"""The least share of v that `noise_v` leaves."""

Received = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""For the address of each gradient buffer: (the exchange's result, the true mean), each of its length."""


def block_means(x: torch.Tensor) -> torch.Tensor:
    """Replace every number of x, flat, by the mean of its block of 128; the last block may be shorter."""
    return torch.cat([part.mean().expand_as(part) for part in x.split(_BLOCK)]) if x.numel() else x


def adam_step(
    state: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    true: torch.Tensor | None,
    group: dict[str, Any],
    trial: str,
) -> None:
    """Make a step of AdamW, changed by a trial, on a flat parameter; `true` is the uncompressed mean."""
    if not state:
        state.update(step=torch.tensor(0.0))
        for name in ("exp_avg", "exp_avg_sq", "noise"):
            state[name] = torch.zeros_like(parameter)
    state["step"] += 1
    of_m = true if trial == "exact_m" and true is not None else gradient
    of_v = true if trial == "exact_v" and true is not None else gradient
    betas = group["betas"]
    if trial == "ef21":
        of_v = gradient * ((1 + betas[0]) / (1 - betas[0])) ** 0.5
        betas = (0.0, betas[1])
    state["exp_avg"].lerp_(of_m, 1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(of_v, of_v, value=1 - betas[1])
    v = state["exp_avg_sq"]
    if trial == "noise_v" and true is not None:
        state["noise"].lerp_(block_means((gradient - true).square()), 1 - betas[1])
        v = torch.maximum(v - state["noise"], _LEAST * v)
    first, second = (1 - beta ** float(state["step"]) for beta in betas)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(state["exp_avg"], (v / second).sqrt() + group["eps"], value=-group["lr"] / first)


def _replace_adam(received: Received, trial: str) -> None:
    """Have torch.optim.AdamW, which Megatron uses without Apex, make its steps by `adam_step`."""

    @torch.no_grad()
    def step(self: Any, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, true = parameter.grad, None
                if found := received.get(gradient.untyped_storage().data_ptr()):
                    first = gradient.storage_offset()
                    given, wanted = (one[first : first + gradient.numel()] for one in found)
                    norm = float(given.norm())  # The true gradient is clipped as Megatron has clipped this.
                    true = wanted * (float(gradient.norm()) / norm if norm else 1.0)
                adam_step(self.state[parameter], parameter, gradient, true, group, trial)

    torch.optim.AdamW.step = step  # type: ignore[method-assign]


def _reduce_twice(received: Received, accumulate: bool) -> None:
    """Have every bucket group reduce its gradients a second time, uncompressed.

    With `accumulate` (`ef21`) the reduced shards are changes, and the optimizer gets their sum.
    """
    cls = buffers._ParamAndGradBucketGroup
    start, finish = cls.start_grad_sync, cls.finish_grad_sync
    pending: dict[int, list[torch.Tensor]] = {}
    sums: dict[int, torch.Tensor] = {}

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.grad_reduce_handle is None:
            group = self.intra_distributed_optimizer_instance_group
            pending[id(self)] = [bucket.grad_data.clone() for bucket in self.buckets]
            for copy in pending[id(self)]:
                torch.distributed.all_reduce(copy, group=group)
                copy /= group.size()
        return start(self, *args, **kwargs)

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = finish(self, *args, **kwargs)
        size = self.intra_distributed_optimizer_instance_size
        rank = self.intra_distributed_optimizer_instance_rank
        for bucket, true in zip(self.buckets, pending.pop(id(self), []), strict=False):
            memory = bucket.grad_data.untyped_storage()
            length = memory.nbytes() // bucket.grad_data.element_size()
            first = bucket.grad_data.storage_offset()
            mine = buffers.shard_buffer(bucket.grad_data, size)[rank]
            if accumulate:
                mine.copy_(sums.setdefault(id(bucket), torch.zeros_like(mine)).add_(mine))
            if memory.data_ptr() not in received:
                received[memory.data_ptr()] = (torch.zeros(length), torch.zeros(length))
            for whole, part in zip(received[memory.data_ptr()], (bucket.grad_data, true), strict=True):
                whole[first : first + part.numel()] = part
        return result

    cls.start_grad_sync, cls.finish_grad_sync = start_grad_sync, finish_grad_sync


def _send_momentum() -> None:
    """For `ef21`, have senders encode the difference between their momentum and the owners' copy of it."""
    compress = Sender.compress
    held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def compress_difference(self: Sender, gradient: torch.Tensor, payload: torch.Tensor) -> None:
        zeros = torch.zeros_like
        momentum, known = held.setdefault(id(self), (zeros(gradient), zeros(gradient)))
        momentum.lerp_(gradient, 1 - get_args().adam_beta1)
        compress(self, momentum - known, payload)
        sent = torch.empty_like(known)
        decompress(payload, self.codec, self.layout, sent)
        known.add_(sent)

    Sender.compress = compress_difference  # type: ignore[method-assign]


def _damp() -> None:
    """For `damped`, drop half of every error."""
    compress = Sender.compress

    def compress_and_halve(self: Sender, gradient: torch.Tensor, payload: torch.Tensor) -> None:
        compress(self, gradient, payload)
        if self.error is not None:
            self.error.scale_by(0.5)

    Sender.compress = compress_and_halve  # type: ignore[method-assign]


def main() -> None:
    """Train with the trial that LOCO_TRIAL names."""
    trial = os.environ.get("LOCO_TRIAL", "none")
    if trial not in TRIALS:
        raise SystemExit(f"LOCO_TRIAL={trial}: must be one of {', '.join(TRIALS)}")
    received: Received = {}
    _replace_adam(received, trial)
    _reduce_twice(received, accumulate=trial == "ef21")
    if trial == "ef21":
        _send_momentum()
    if trial == "damped":
        _damp()
    runpy.run_path(str(_SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
