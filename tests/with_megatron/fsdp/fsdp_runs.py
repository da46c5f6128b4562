"""A tiny GPT under Megatron's FSDPs in a worker, and what is exchanged of its gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from coded_values import sent_codes
from with_megatron.gpt_model import build
from with_megatron.seam_runs import attachment_of, errors_of, logged, session_of

import megatron_patch

STEPS = 3


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in the folder of a run of Megatron's engine."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path) -> str:
    """What its first rank has printed."""
    return (folder / "rank-0.log").read_text()


def train(model: dict[str, Any], compression: dict[str, Any]) -> dict[str, Any]:
    """STEPS steps with compression; every exchange, and how many there were after each step.

    An exchange is a dict of `bucket` (a number), `peers` (the ranks that exchange), `parameters` ([(first
    element, shape)] of the peers' tensors end to end), `padding` (how many elements belong to none), `place`
    (this rank's first element in them), and what went `in`, was `sent` and came `out`, fp32.
    """
    gpt = build(**model)
    (chunk,) = gpt.chunks
    options = {"method": "loco", "start_step": 0} | compression
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**options))
    record: list[dict[str, Any]] = []
    _record(chunk, attachment_of(chunk), record)
    ends = []
    for step in range(STEPS):
        assert gpt.step(step)
        ends.append(len(record))
    report = megatron_patch.report(gpt.chunks)
    inside = report.gradient_bytes_inside_node
    megatron_patch.disable()
    if model["ddp"].get("gradient_reduce_div_fusion") is False:
        gpt.backward(STEPS)  # Megatron's own again, which gloo can run without a product in the collective
        assert gpt.update()
        assert len(record) == ends[-1]
    return {"record": record, "ends": ends, "losses": gpt.losses, "step": report.step, "inside": inside}


def _record(chunk: Any, attachment: Any, record: list[dict[str, Any]]) -> None:
    session = attachment.session
    start = session.start
    # Where parameters lie is upstream's own word, not ours.
    groups = chunk.module.param_and_grad_buffer.parameter_groups
    reductions = attachment._reductions

    def noting(exchange: Any, tensor: Any, output: Any, average: bool, group: Any) -> Any:
        (number,) = (n for n, mine in reductions.exchanges.items() if mine is exchange)
        buffer = groups[number].main_grad_buffer
        place = 0
        if tensor.numel() != buffer.bucket_index.size:  # a shard of it, between instances
            place = buffer.shard_bucket_index.bucket_data_index
        items = [(item.global_data_index, tuple(item.shape)) for item in buffer.item_index_map.values()]
        covered = torch.zeros(buffer.bucket_index.size, dtype=torch.bool)
        for first, shape in items:
            covered[first : first + torch.Size(shape).numel()] = True
        covered = covered[place : place + tensor.numel()]
        tensor[~covered] = torch.nan  # memory that nobody has written may hold anything
        entry: dict[str, Any] = {
            "bucket": number,
            "peers": torch.distributed.get_process_group_ranks(group),
            "parameters": items,
            "numel": buffer.bucket_index.size,
            "padding": int((~covered).sum()),
            "place": place,
            "in": tensor.float().masked_fill(~covered, 0.0),
            "dtype": {torch.float32: "fp32", torch.bfloat16: "bf16"}[tensor.dtype],
            "average": average,
        }
        sender = exchange.senders[0]
        with sent_codes(sender, entry):
            handle = start(exchange, tensor, output, average, group)
            handle.wait()
        entry["out"] = output.float().clone()
        record.append(entry)
        return handle

    session.start = noting


def saved_and_restored(model: dict[str, Any], folder: str, save: bool) -> dict[str, Any]:
    """Two steps whose errors are saved as Megatron's loop saves them in fsdp_dtensor folders, or loaded from
    there; the errors before and after loading, and what the log says."""
    from megatron_patch.megatron.checkpoint import training_loop
    from megatron_patch.megatron.checkpoint.dist_checkpointing import restore
    from megatron_patch.megatron.checkpoint.states import rank_state_of

    gpt = build(**model)
    with logged() as lines:
        megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="loco", start_step=0))
        session = session_of(gpt.chunks[0])
        for step in range(2 if save else 0):
            gpt.step(step)
        before = errors_of(session)
        if save:
            training_loop.save(Path(folder), gpt.chunks, gpt.optimizer)
            session.restart(0)
        torch.distributed.barrier()
        rank = rank_state_of(gpt.chunks)
        restore(rank, Path(folder), lambda: training_loop.saved(Path(folder)), 0, 1.0)
        after = errors_of(session)
    return {"before": before, "after": after, "lines": lines, "steps": session.ledger.steps}
