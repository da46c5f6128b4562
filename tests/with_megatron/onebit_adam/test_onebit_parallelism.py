"""1-bit Adam under Megatron's parallelisms, against float64.

A rank's gradients are written down as the optimizer's step begins, after finalize_model_grads. From those
alone the test computes momentum, errors, variance and weights in float64, for every bucket and the ranks that
Layout says exchange it, and the mean of what several ranks hold copies of. The norms that clip are checked
against those of the gradients, and the warm-up must be method none bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation.loco_float64 import block_labels
from simulation.onebit_adam_float64 import one_bit, shard_blocks
from with_megatron.gpt_model import BETAS, EPSILON, LEARNING_RATE, MOE, OVERLAP, WEIGHT_DECAY, build
from with_megatron.parallelism_agreement import Layout, apart, copies, layout_of
from with_megatron.recording import buckets_of, described, trained, weights
from with_megatron.seam_runs import session_of

import megatron_patch

WARMUP, STEPS = 4, 8
BLOCK = 256
"""More than the 64 that Megatron aligns parameters to: copies are cut in other blocks on every rank."""
REPLICATED = {"use_distributed_optimizer": False}
HALF = {"grad_reduce_in_fp32": False}
CLIPPED = {"optimizer": {"clip_grad": 0.5}}

# name: (ranks, model)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2-replicated-average": (4, {"tp": 2, "ddp": REPLICATED | {"average_in_collective": True}}),
    "tp2-sp-dp2": (4, {"tp": 2, "sequence_parallel": True, **CLIPPED}),
    # The distributed optimizer gives tied embeddings a bucket of their own: copies cannot differ there.
    "pp2-dp2-tied-replicated": (4, {"pp": 2, "tied": True, "ddp": REPLICATED, **CLIPPED}),
    "tp2-sp-ep2-dp2": (4, MOE | {"tp": 2, "expert_tp": 1, "sequence_parallel": True}),
    "dp4-overlap-per-token": (4, {"per_token_loss": True, "ddp": OVERLAP | {"overlap_param_gather": True}}),
    "dp4-bf16-replicated": (4, {"dtype": "bf16", "ddp": HALF | REPLICATED, **CLIPPED}),
    "ep2-dp4-fp16": (4, MOE | {"dtype": "fp16", "optimizer": {"initial_loss_scale": 2.0**10}}),
}


def train_case(model: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the record of STEPS steps, and the weights that method none has after the warm-up."""
    none = trained(build(**model), {"method": "none"}, WARMUP)
    gpt = build(**model)
    config = {"warmup_steps": WARMUP, "block_size": BLOCK, "error_dtype": "fp32", "ranks_per_node": 1}
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="onebit_adam", **config))
    buckets = buckets_of(gpt)
    report: dict[str, Any] = {
        "none": none,
        "parameters": described(gpt),
        "initial": weights(gpt),
        "buckets": [description for description, _ in buckets],
        "steps": [],
    }
    for step in range(STEPS):
        record = {"scale": gpt.loss_scale, "active": session_of(gpt.chunks[0]).active}
        gpt.backward(step)
        if step:  # only now are the parameters of the last step surely gathered
            report["steps"][-1]["weights"] = weights(gpt)
        record["gradients"] = [bucket.grad_data.float().clone() for _, bucket in buckets]
        successful, record["norm"], _ = gpt.optimizer.step()
        assert successful
        gpt.scheduler.step(increment=1)
        report["steps"].append(record)
    gpt.gather()
    report["steps"][-1]["weights"] = weights(gpt)
    return report


class _Bucket:
    """One bucket and the ranks that exchange it: m, v, both errors and the weights, float64."""

    def __init__(self, reports: list[dict[str, Any]], ranks: list[int], place: int, model: dict[str, Any]):
        self.ranks, self.place = ranks, place
        self.spans = [reports[rank]["buckets"][place]["parameters"] for rank in ranks]
        first, numel = reports[ranks[0]], reports[ranks[0]]["buckets"][place]["numel"]
        ddp = model.get("ddp", {})
        shapes = reports[ranks[0]]["buckets"][place]["shapes"]
        found = [(span[0], shapes[name]) for name, span in self.spans[0].items()]
        self.blocks = shard_blocks(block_labels(numel, found, BLOCK, exact=False), len(ranks), BLOCK)
        self.sharded = ddp.get("use_distributed_optimizer", True)
        self.own = 1.0 if ddp.get("average_in_collective") else len(ranks)
        self.x, self.m, self.v, self.decay, self.owner = np.zeros((5, numel))
        self.d = np.zeros((len(ranks), numel))
        self.left_out = np.zeros(numel, dtype=bool)
        """Blocks in which a sign or a scale was a matter of rounding, and all that follows from them."""
        self.padding = np.ones(numel, dtype=bool)
        for name, (start, end) in self.spans[0].items():
            self.x[start:end] = first["initial"][name].numpy()
            self.decay[start:end] = WEIGHT_DECAY * (first["parameters"][name]["dimensions"] > 1)
            self.padding[start:end] = False
        self.initial = self.x.copy()

    def reduced(self, gradients: np.ndarray) -> np.ndarray:
        """The warm-up's gradient: each rank's own shard of it is reduced, or all of it on every rank."""
        parts = gradients.reshape(len(self.ranks), len(self.ranks) if self.sharded else 1, -1)
        return np.concatenate([parts[k, k] for k in range(len(parts))]) if self.sharded else gradients[0]

    def warm_up(self, gradient: np.ndarray) -> None:
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * gradient
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * gradient**2

    def exchange(self, gradients: np.ndarray) -> None:
        self._spread()
        said = BETAS[0] * self.m + (1 - BETAS[0]) * gradients + self.d
        sent = np.stack([self._coded(values) for values in said])
        total = sent.mean(axis=0) + self.owner
        self.m = self._coded(total)
        self.d, self.owner = said - sent, total - self.m
        self.m[self.padding] = 0.0

    def update(self, steps: int) -> None:
        size = np.sqrt(self.v / (1 - BETAS[1] ** min(steps, WARMUP))) + EPSILON
        step = np.where(self.v > 0, self.m / (1 - BETAS[0] ** steps) / size, 0.0)
        if steps > WARMUP:
            most = 3 * max(1.0, (1 - BETAS[0]) / np.sqrt(1 - BETAS[1]))
            step = np.clip(step, -most, most)
        self.x = self.x - LEARNING_RATE * (step + self.decay * self.x)

    def _coded(self, values: np.ndarray) -> np.ndarray:
        found, undecided = one_bit(values, self.blocks)
        self.left_out |= undecided
        return found

    def _spread(self) -> None:
        """A copy that is left out elsewhere is left out here, and with it its block: they share a scale."""
        for here in self.blocks:
            self.left_out[here] = self.left_out[here].any()


class _Simulation:
    """All buckets of a job, from the reports of its ranks."""

    def __init__(self, reports: list[dict[str, Any]], layout: Layout, model: dict[str, Any]):
        self.reports = reports
        self.limit = model.get("optimizer", {}).get("clip_grad", 0.0)
        self.buckets = [
            _Bucket(reports, ranks, place, model)
            for expert in (False, True)
            for ranks in ([rank for row in rows for rank in row] for rows in layout.groups(expert))
            for place, bucket in enumerate(reports[ranks[0]]["buckets"])
            if bucket["expert"] == expert
        ]
        where = {
            (rank, name): (number, start, end)
            for number, bucket in enumerate(self.buckets)
            for rank, spans in zip(bucket.ranks, bucket.spans, strict=True)
            for name, (start, end) in spans.items()
        }
        classes = [sorted({where[copy] for copy in same}) for same in copies(reports, layout)]
        classes += [[place] for place in {*where.values()} - {place for same in classes for place in same}]
        self.copies = classes
        """Where the same parameter lies: in buckets of several groups of ranks, if ranks hold copies."""

    def step(self, number: int) -> None:
        steps = [report["steps"][number] for report in self.reports]
        norm = steps[0]["norm"]
        assert all(step["norm"] == norm for step in steps), "ranks would clip differently"
        factor = (min(1.0, self.limit / (norm + 1e-6)) if self.limit else 1.0) / steps[0]["scale"]
        means = []
        for bucket in self.buckets:
            found = [steps[rank]["gradients"][bucket.place].numpy() for rank in bucket.ranks]
            gradients = np.stack(found).astype(np.float64)
            if number < WARMUP:
                means.append(bucket.reduced(gradients))
                bucket.warm_up(means[-1] * factor)
            else:
                means.append(bucket.own * gradients.mean(axis=0))
                bucket.exchange(bucket.own * gradients * factor)
        self._check_norm(norm, means, steps[0]["scale"], exact=number < WARMUP)
        for same in (same for same in self.copies if len(same) > 1):
            views = [(self.buckets[place], slice(start, end)) for place, start, end in same]
            mean = np.mean([bucket.m[here] for bucket, here in views], axis=0)
            left_out = np.any([bucket.left_out[here] for bucket, here in views], axis=0)
            for bucket, here in views:
                bucket.m[here], bucket.left_out[here] = mean, left_out
        for bucket in self.buckets:
            bucket.update(number + 1)

    def _check_norm(self, norm: float, means: list[np.ndarray], scale: float, exact: bool) -> None:
        """That of the whole model's mean gradient, each parameter once: exact, or within five deviations."""
        if exact and not self.limit:
            return  # Megatron computes none
        once = [means[place][start:end] for (place, start, end), *_ in self.copies]
        expected = float(np.linalg.norm(np.concatenate(once))) / scale
        assert norm == pytest.approx(expected, rel=1e-3 if exact else 0.11)

    def compare(self, number: int) -> None:
        for bucket in self.buckets:
            for rank, spans in zip(bucket.ranks, bucket.spans, strict=True):
                for name, (start, end) in spans.items():
                    real = self.reports[rank]["steps"][number]["weights"][name].numpy().astype(np.float64)
                    kept, wanted = ~bucket.left_out[start:end], bucket.x[start:end]
                    off = np.abs(real - wanted)[kept]
                    where = f"step {number}, rank {rank}, {name}"
                    dtype = self.reports[rank]["parameters"][name]["dtype"]
                    half_ulp = {"torch.float32": 0.0, "torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
                    rest = off - half_ulp[dtype] * np.abs(wanted[kept])
                    bound = 1e-5 * max(np.abs(wanted).max(), LEARNING_RATE)
                    assert (rest <= bound).all(), f"{where}: off by {off.max():.1e}, bound {bound:.1e}"


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_simulated_ones_and_copies_stay_equal(pool: Any, name: str) -> None:
    ranks, model = CASES[name]
    reports, layout = pool.run(train_case, model, world_size=ranks), layout_of(ranks, model)
    simulation = _Simulation(reports, layout, model)
    for number in range(STEPS):
        steps = [report["steps"][number] for report in reports]
        assert {step["active"] for step in steps} == {number >= WARMUP}
        simulation.step(number)
        simulation.compare(number)
        assert not apart(reports, layout, lambda report, number=number: report["steps"][number]["weights"])
    for report in reports:
        for parameter, values in report["none"].items():
            assert np.array_equal(values, report["steps"][WARMUP - 1]["weights"][parameter]), parameter
    kept = np.concatenate([~bucket.left_out for bucket in simulation.buckets])
    moved = np.concatenate([np.abs(bucket.x - bucket.initial) for bucket in simulation.buckets])
    assert kept.mean() > 0.5, f"{kept.mean():.0%} was compared"
    assert np.median(moved[moved > 0]) > 0.3 * LEARNING_RATE
