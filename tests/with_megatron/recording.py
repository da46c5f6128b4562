"""Trains a model in a worker and writes down, outside the product, what an exchange starts from and leaves.

A model is anything with `chunks` (Megatron's DDP), `parameters` by name, `backward(step)`, `update()`,
`gather()`, `loss_scale` and `tokens(step)`: gpt_model.GPT, and tiny_model.TinyTraining.

Per step and bucket: this rank's own gradient, as it was before Megatron scaled it; what each sender sent;
its error after the optimizer's step. Per step: the parameters. `start_grad_sync` is wrapped on the instance,
around the product's own override; the senders' `compress` likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from coded_values import coded_values, keep_sent
from with_megatron.seam_runs import attach, attachment_of

import megatron_patch

PARTS = {"reduce-scatter": ("scatter",), "all-reduce": ("reduce", "owner")}
"""By the kind of a stage, what its senders are called here; in two hops, `scatter` is of a node's sum."""


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The parameters' values by name, flat fp32 copies."""
    return {name: p.detach().float().reshape(-1).clone() for name, p in model.parameters.items()}


def trained(model: Any, compression: dict[str, Any] | None, steps: int) -> dict[str, torch.Tensor]:
    """Train, with compression or (None) without; returns the weights."""
    if compression is not None:
        attach(model.chunks, compression)
    for step in range(steps):
        model.backward(step)
        model.update()
    model.gather()
    megatron_patch.disable()
    return weights(model)


def recorded(model: Any, compression: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with compression and return the record: see the top of this file."""
    attach(model.chunks, compression)
    recorder = _Recorder(model)
    report: dict[str, Any] = {
        "buckets": recorder.describe(),
        "parameters": described(model),
        "initial": weights(model),
        "steps": [],
    }
    for step in range(steps):
        record = {"loss_scale": model.loss_scale, "tokens": model.tokens(step)}
        recorder.clear()
        model.backward(step)
        if step:  # only now are the parameters of the last step surely gathered, without a gather of our own
            report["steps"][-1]["weights"] = weights(model)
        record["reduced"] = recorder.reduced()
        record |= {"successful": model.update(), "next_loss_scale": model.loss_scale}
        report["steps"].append(record | recorder.record())
    model.gather()
    report["compressed"] = report["steps"][-1]["weights"] = weights(model)
    megatron_patch.disable()
    return report


def described(model: Any) -> dict[str, dict[str, Any]]:
    """How Megatron treats each parameter, by the marks that its modules set."""
    return {name: _marks(parameter) for name, parameter in model.parameters.items()}


def _marks(parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {
        "dtype": str(parameter.dtype),
        "gradient_dtype": str(parameter.main_grad.dtype),
        "dimensions": parameter.dim(),
        "sequence_parallel": bool(getattr(parameter, "sequence_parallel", False)),
        "tensor_parallel": bool(getattr(parameter, "tensor_model_parallel", False)),
        "expert": not getattr(parameter, "allreduce", True),
        "tied": bool(getattr(parameter, "shared_embedding", False)),
    }


def buckets_of(model: Any) -> list[tuple[dict[str, Any], Any]]:
    """Every bucket of all chunks, in their order, and what is in it."""
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    return [
        (
            {
                "expert": place >= len(chunk.bucket_groups),
                "numel": bucket.grad_data.numel(),
                "dtype": str(bucket.grad_data.dtype),
                "parameters": {names[id(p)]: span for p, span in bucket.param_to_index.items()},
                "shapes": {names[id(p)]: tuple(p.shape) for p in bucket.param_to_index},
            },
            bucket,
        )
        for chunk in model.chunks
        for place, group in enumerate(chunk.bucket_groups + chunk.expert_parallel_bucket_groups)
        for bucket in group.buckets
    ]


class _Recorder:
    """Wraps the bucket groups and senders of an attached model."""

    def __init__(self, model: Any) -> None:
        self.names = {id(parameter): name for name, parameter in model.parameters.items()}
        self.groups: list[Any] = []
        self.buckets: list[tuple[dict[str, Any], dict[str, Any]]] = []  # description, senders by their part
        self.gradients: dict[int, torch.Tensor] = {}
        self.sent: dict[int, dict[str, torch.Tensor]] = {}
        described = buckets_of(model)
        for chunk in model.chunks:
            groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for group, seam in zip(groups, attachment_of(chunk).seams, strict=True):
                assert seam.group is group
                first = len(self.buckets)
                for index in range(len(group.buckets)):
                    senders = {
                        part: sender
                        for stage in seam.stages
                        if stage.reduction.exchanges
                        for part, sender in zip(
                            PARTS[stage.kind], stage.reduction.exchanges[index].senders, strict=True
                        )
                    }
                    for part, sender in senders.items():
                        self._keep_sent(len(self.buckets), part, sender)
                    self.buckets.append((described[len(self.buckets)][0], senders))
                self._keep_gradients(first, group)
                self.groups.append(group)

    def describe(self) -> list[dict[str, Any]]:
        return [description for description, _ in self.buckets]

    def clear(self) -> None:
        self.gradients.clear()
        self.sent.clear()

    def record(self) -> dict[str, Any]:
        """What the last step's exchange started from and left, by bucket."""
        assert sorted(self.gradients) == list(range(len(self.buckets))), "a bucket was not exchanged"
        return {
            "gradients": [self.gradients[place] for place in range(len(self.buckets))],
            "sent": [self.sent.get(place, {}) for place in range(len(self.buckets))],
            "errors": [
                {
                    part: coded_values(sender.layout, sender.error.decode())[: sender.layout.numel]
                    for part, sender in s.items()
                }
                for _, s in self.buckets
            ],
        }

    def reduced(self) -> dict[str, tuple[torch.Tensor, slice]]:
        """What the optimizer gets of every parameter's gradient, and which elements are this rank's."""
        found = {}
        for group in self.groups:
            for bucket in group.buckets:
                first, last = 0, bucket.grad_data.numel()
                if group.ddp_config.use_distributed_optimizer:
                    ranks = group.intra_distributed_optimizer_instance_group
                    size = last // ranks.size()
                    first, last = ranks.rank() * size, (ranks.rank() + 1) * size
                for parameter, (start, end) in bucket.param_to_index.items():
                    own = slice(max(first - start, 0), max(min(last, end) - start, 0))
                    gradient = parameter.main_grad.float().reshape(-1).clone()
                    found[self.names[id(parameter)]] = (gradient, own)
        return found

    def _keep_gradients(self, first: int, group: Any) -> None:
        start_grad_sync = group.start_grad_sync

        def start(*args: Any, **kwargs: Any) -> None:
            # Upstream's own early return: a first batch that was dispatched already.
            if not (group.is_first_batch and group.grad_reduce_handle is not None):
                for place, bucket in enumerate(group.buckets, start=first):
                    assert place not in self.gradients, "a bucket was exchanged twice in one step"
                    self.gradients[place] = bucket.grad_data.float().clone()
            start_grad_sync(*args, **kwargs)

        group.start_grad_sync = start

    def _keep_sent(self, place: int, part: str, sender: Any) -> None:
        def keep(sent: torch.Tensor) -> None:
            of_bucket = self.sent.setdefault(place, {})
            assert part not in of_bucket, "a sender was used twice in one step"
            of_bucket[part] = sent[: sender.layout.numel]

        keep_sent(sender, keep)
