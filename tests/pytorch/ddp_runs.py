"""Torch's DistributedDataParallel in a worker, with gradients that a test chooses, and what is exchanged."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from pytorch.fsdp2_runs import STEPS, Model, gradients_of


class Noting:
    """A handle that records its exchange's output when it is over."""

    def __init__(self, handle: Any, entry: dict[str, Any], output: torch.Tensor) -> None:
        self.handle, self.entry, self.output = handle, entry, output

    def wait(self) -> None:
        self.handle.wait()
        self.entry.setdefault("out", self.output.float().clone())


def train(how: dict[str, Any], compression: dict[str, Any] | None) -> dict[str, Any]:
    """STEPS steps; what was exchanged, the weights and norms of every step. None: without us."""
    from torch.nn.parallel import DistributedDataParallel

    import megatron_patch
    from megatron_patch.pytorch import attach

    model = Model().to(getattr(torch, how.get("dtype", "float32")))
    for number in how.get("frozen", ()):
        next(iter(model.blocks[number].parameters())).requires_grad_(False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=how.get("bucket_mb", 0.01), **how.get("options", {}))
    record: list[dict[str, Any]] = []
    if compression is not None:
        megatron_patch.attach(ddp, megatron_patch.CompressionConfig(**compression))
        _record(attach.attachment_of(ddp), record)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    rank, microbatches, norms, steps = torch.distributed.get_rank(), how.get("microbatches", 1), [], []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            whole = not how.get("no_sync") or microbatch == microbatches - 1
            with nullcontext() if whole else ddp.no_sync():
                number = step * microbatches + microbatch
                gradients = gradients_of(model, rank, number, next(model.parameters()).dtype)
                for block in how.get("unused", ()) if step % 2 and rank else ():
                    gradients[block][1] = None
                ddp(gradients).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e3)))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(len(record))
    found = {"record": record, "norms": norms, "steps": steps}
    found["weights"] = [parameter.detach().float().clone() for parameter in ddp.parameters()]
    if compression is not None:
        report = megatron_patch.report(ddp)
        found["report"] = {"step": report.step, "bits": report.bits_per_gradient}
        megatron_patch.disable()
        before = len(record)
        ddp(gradients).backward()
        assert len(record) == before, "disable gives DDP its own exchange back"
    return found


def _record(attachment: Any, record: list[dict[str, Any]]) -> None:
    """Have every compressed exchange add: its parameters' shapes, what went in, was sent, came out."""
    from coded_values import sent_codes

    start, exchange_of = attachment.session.start, attachment._exchange_of
    shapes: dict[int, list[tuple[int, ...]]] = {}

    def of(bucket: Any) -> Any:
        exchange = exchange_of(bucket)
        shapes[id(exchange)] = [tuple(parameter.shape) for parameter in bucket.parameters()]
        return exchange

    def noting(exchange: Any, tensor: Any, output: Any, average: bool, group: Any) -> Any:
        sender = exchange.sender
        entry: dict[str, Any] = {
            "shapes": shapes[id(exchange)],
            "in": tensor.float().clone(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        with sent_codes(sender, entry):
            handle = start(exchange, tensor, output, average, group)
        record.append(entry)
        return Noting(handle, entry, output)

    attachment._exchange_of, attachment.session.start = of, noting
