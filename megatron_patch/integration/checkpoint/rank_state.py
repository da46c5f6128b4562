"""What one rank remembers: the senders of its attached chunks, in an order that a checkpoint can name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_patch.compensation.sender import Sender
from megatron_patch.integration.attach import Attachment, attachment_of
from megatron_patch.integration.checkpoint.element_map import parts_of
from megatron_patch.integration.checkpoint.files import RankLayout, Storage


class RankState:
    """The attached chunks of this rank: their senders in order, and what each is of."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks
        self.attachments = [_attachment(chunk) for chunk in chunks]
        found = [
            pair
            for chunk, attachment in zip(chunks, self.attachments, strict=True)
            for pair in parts_of(chunk, attachment)
        ]
        self.senders = [sender for sender, _ in found]
        self.layout = RankLayout(tuple((part, _storage(sender)) for sender, part in found))
        self.states = [attachment.state for attachment in self.attachments]
        self.config = self.states[0].config

    def groups(self) -> dict[str, int]:
        """Sizes of the groups of ranks that the model is spread over."""
        chunk = self.chunks[0]
        pipeline = chunk.pp_group[0] if isinstance(chunk.pp_group, list) else chunk.pp_group
        return {
            "tensor": chunk.tp_group.size(),
            "pipeline": pipeline.size(),
            "expert": chunk.ep_group.size(),
            "data": chunk.dp_cp_group.size(),
            "instances": chunk.ddp_config.num_distributed_optimizer_instances,
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, sender in enumerate(self.senders):
            for name, tensor in sender.state().items():
                if name == "generator" or self.config.save_error:
                    yield f"{number}.{name}", tensor

    def start_from_zero(self, steps: int) -> None:
        for state in self.states:
            state.restart(steps)
        for seam in (seam for attachment in self.attachments for seam in attachment.seams):
            if seam.momentum is not None:
                seam.momentum.held = None  # it begins from Adam's state
        for sender in self.senders:
            sender.reseed(steps)


def _attachment(chunk: Any) -> Attachment:
    attachment = attachment_of(chunk)
    assert attachment is not None
    return attachment


def _storage(sender: Sender) -> Storage:
    layout = sender.layout
    dtype = None if sender.error is None else sender.error.dtype
    blocks = None if layout.table is None else layout.blocks
    rotated = sender.codec.rotation.rotated
    return Storage(layout.shards, layout.shard_size, layout.block, dtype, blocks, rotated)
