"""`--use-torch-fsdp2`: torch's FSDP2 inside Megatron's engine, by the adapter of pytorch/.

Megatron's TorchFullyShardedDataParallel applies `fully_shard` to a model. The gradients are exchanged by
pytorch/fsdp2.py, as without Megatron: once a microbatch, in the gradients' own dtype (bf16 in bf16 training).
Optimizer steps are heard of Megatron's own step: in bf16 its optimizer holds fp32 copies, so that torch's
hooks would see no parameter of the model. This is the one file of megatron/ that imports pytorch/.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patch.collectives.sender import Sender
from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.seams import gradients as replicated_params
from megatron_patch.megatron.seams.weights import ChunkWeights
from megatron_patch.pytorch.attach import lines
from megatron_patch.pytorch.fsdp2 import Fsdp2
from megatron_patch.session.resharding import Part
from megatron_patch.session.session import Session


class TorchFsdp2:
    """An attached chunk of Megatron's TorchFullyShardedDataParallel.

    Args:
        chunk: it.
        config: the options as given.

    Raises:
        UserError: what pytorch/ cannot serve.
    """

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        self.asked = config
        self._tensor: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self._fsdp2 = Fsdp2(chunk.module, config, None)
        self.state: Session = self._fsdp2.session
        self.seams: list[Any] = []
        """None: FSDP2 has no bucket groups of Megatron's."""
        self.weights = ChunkWeights(chunk, self.state)
        self._marked = replicated_params.mark(chunk, self._tensor) if self._fsdp2.config.compresses else []

    def detach(self) -> None:
        """FSDP2's own exchange from the next backward pass on."""
        self._fsdp2.detach()
        replicated_params.unmark(self._marked)

    def lines(self) -> list[str]:
        """What is on, for the log."""
        return list(lines(self._fsdp2))

    def ranks(self) -> dict[str, int]:
        """Sizes of the groups, for checkpoints."""
        return {**self._fsdp2.ranks(), "tensor": self._tensor.size()}

    def parts(self) -> list[tuple[Sender, Part]]:
        """Every sender, and what its error state is of; exchanges that were not needed yet are made. All
        ranks must call it."""
        for part in self._fsdp2.parts:
            trained = tuple(n for n, parameter in enumerate(part.group.tensors) if parameter.requires_grad)
            if trained and not part.made:
                part.make(trained)
        found = self._fsdp2.senders()
        if self._tensor.size() == 1:
            return found
        return [(sender, self._on_tensor_rank(part)) for sender, part in found]

    def _on_tensor_rank(self, part: Part) -> Part:
        """Tensor-parallel ranks hold unlike tensors of one name."""
        rank = self._tensor.rank()
        pieces = [dataclasses.replace(piece, key=f"{piece.key}@{rank}") for piece in part.pieces]
        return dataclasses.replace(part, pieces=tuple(pieces))
