"""Measures how a gradient exchange changes Adam's steps, for coordinates with small and large gradients.

    megatron-loco train configs/models/llama_tiny.yaml \
        launch.script=benchmarks/error_feedback/step_directions.py \
        compression.method=error_feedback compression.bits=1 compression.start_step=0 --out runs/directions

It runs Megatron's pretrain_gpt.py, and reduces every bucket a second time in full precision. Adam's moments
and steps, m / (sqrt(v) + eps) with bias correction, are computed from both results: u from those of the
tested exchange, w from the true ones. step_directions.json in the run's folder has, over rank 0's shards and
for each hundred optimizer steps, the cosine between u and w, the ratio of their norms, and u's length along
w, which is u.w / w.w: in all, for the four quarters of each shard's coordinates by the true sqrt(v), smallest
first, and at last for sums of 20 steps, to which error feedback has added what single steps still lack.
Training is not changed. Models must be dense.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.training import get_args

_SCRIPT = Path(__file__).resolve().parents[2] / "pretrain_scripts" / "pretrain_gpt.py"
_EPS = 1e-8
_WINDOW, _PATH = 100, 20


class Adam:
    """Adam's moments of one sequence of gradients."""

    def __init__(self, like: torch.Tensor) -> None:
        self.m, self.v, self.step = torch.zeros_like(like), torch.zeros_like(like), 0

    def direction(self, gradient: torch.Tensor, betas: tuple[float, float]) -> torch.Tensor:
        """Return the next step in units of the learning rate, in the shape of `gradient`."""
        self.step += 1
        self.m.lerp_(gradient, 1 - betas[0])
        self.v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        first, second = (1 - beta**self.step for beta in betas)
        return (self.m / first) / ((self.v / second).sqrt() + _EPS)


class Directions:
    """Compares the results of an exchange with the true mean, for each bucket and step."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Adam, Adam]] = {}
        self._paths: dict[int, torch.Tensor] = {}
        self._windows: list[torch.Tensor] = []

    def add(self, key: int, exchanged: torch.Tensor, true: torch.Tensor, betas: tuple[float, float]) -> None:
        """Add one shard of one step; both tensors are flat, of equal length and in fp32."""
        given, wanted = self._pairs.setdefault(key, (Adam(true), Adam(true)))
        u, w = given.direction(exchanged, betas), wanted.direction(true, betas)
        if len(self._windows) * _WINDOW < wanted.step:
            self._windows.append(torch.zeros(5, 3, dtype=torch.float64))
        order = wanted.v.argsort()
        order = order[wanted.v[order] > 0]  # This drops padding and embedding rows that no token has used.
        window = self._windows[-1]
        for row, quarter in zip(window[:4], order.tensor_split(4), strict=True):
            row += _products(u[quarter], w[quarter])
        path = self._paths.setdefault(key, torch.zeros(2, true.numel()))
        path += torch.stack([u, w])
        if wanted.step % _PATH == 0:
            window[4] += _products(*path)
            path.zero_()

    def result(self) -> list[dict[str, list[float]]]:
        """Return three numbers for each hundred steps: in all, for each quarter, for sums of 20 steps."""
        return [_ratios(torch.cat([sums[:4].sum(0, keepdim=True), sums])) for sums in self._windows]


def _products(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return u.w, u.u and w.w in fp64."""
    u, w = u.double(), w.double()
    return torch.stack([u @ w, u @ u, w @ w])


def _ratios(sums: torch.Tensor) -> dict[str, list[float]]:
    """Return what sums of u.w, u.u and w.w, fp64 [R, 3], say of each row; NaN where they are zero."""
    dot, u, w = sums.T
    found = {"cosine": dot / (u * w).sqrt(), "norm_ratio": (u / w).sqrt(), "along": dot / w}
    return {name: values.tolist() for name, values in found.items()}


def _watch(directions: Directions) -> None:
    """Have every bucket group of this process reduce its gradients a second time, uncompressed."""
    cls = buffers._ParamAndGradBucketGroup
    start, finish = cls.start_grad_sync, cls.finish_grad_sync
    pending: dict[int, list[torch.Tensor]] = {}

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.grad_reduce_handle is None:
            group = self.intra_distributed_optimizer_instance_group
            copies = [bucket.grad_data.to(torch.float32, copy=True) for bucket in self.buckets]
            for copy in copies:
                torch.distributed.all_reduce(copy, group=group)
                copy /= group.size()
            pending[id(self)] = copies
        return start(self, *args, **kwargs)

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = finish(self, *args, **kwargs)
        options = get_args()
        for bucket, true in zip(self.buckets, pending.pop(id(self), []), strict=False):
            size, rank = (
                self.intra_distributed_optimizer_instance_size,
                self.intra_distributed_optimizer_instance_rank,
            )
            mine, wanted = (buffers.shard_buffer(one, size)[rank].float() for one in (bucket.grad_data, true))
            directions.add(id(bucket), mine, wanted, (options.adam_beta1, options.adam_beta2))
        return result

    cls.start_grad_sync, cls.finish_grad_sync = start_grad_sync, finish_grad_sync


def main() -> None:
    """Train, then write step_directions.json."""
    directions = Directions()
    _watch(directions)
    runpy.run_path(str(_SCRIPT), run_name="__main__")
    if torch.distributed.get_rank() == 0:
        text = json.dumps(directions.result(), indent=2) + "\n"
        (Path(get_args().compression_output) / "step_directions.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
