"""Attaches torch's FSDP2 inside Megatron (`--use-torch-fsdp2`) by the adapter of pytorch/.

Megatron's TorchFullyShardedDataParallel applies `fully_shard` to a model. pytorch/fsdp2.py exchanges the
gradients, as without Megatron: once a microbatch, in the gradients' own dtype (bf16 in bf16 training).
Optimizer steps are observed through Megatron's own step: in bf16 its optimizer holds fp32 copies, so that
torch's hooks would see no parameter of the model. No other file of megatron/ imports pytorch/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_patch.config import CompressionConfig
from megatron_patch.megatron.outer_steps import OuterSteps
from megatron_patch.megatron.seams import replicated_params
from megatron_patch.megatron.seams.weights import ChunkWeights
from megatron_patch.pytorch.attach import lines
from megatron_patch.pytorch.fsdp2 import Fsdp2
from megatron_patch.session.states import Exchanged


class TorchFsdp2:
    """An attached TorchFullyShardedDataParallel.

    Raises:
        UserError: pytorch/ cannot serve the model or the configuration.
    """

    def __init__(self, chunk: Any, config: CompressionConfig) -> None:
        self.asked = config
        self._tensor: Any = parallel_state.get_tensor_model_parallel_group()
        self._fsdp2 = Fsdp2(chunk.module, config, None)
        self.session = self._fsdp2.session
        self.outer: OuterSteps | None = None
        self.weights = ChunkWeights(chunk, self.session)
        self._marked = replicated_params.mark(chunk, self._tensor) if self.session.config.compresses else []

    def detach(self) -> None:
        """Restore FSDP2's own exchange from the next backward pass on."""
        self._fsdp2.detach()
        replicated_params.unmark(self._marked)

    def lines(self) -> Iterator[str]:
        """Return the lines of the log that say what is compressed."""
        return lines(self._fsdp2)

    def groups_of_ranks(self) -> dict[str, tuple[int, int]]:
        """Return the process groups by name, for checkpoints: size, and this rank's number."""
        return {**self._fsdp2.groups_of_ranks(), "tensor": (self._tensor.size(), self._tensor.rank())}

    def exchanged(self) -> list[Exchanged]:
        """Return every exchange, for checkpoints. All ranks must call this.

        Exchanges that no backward pass has needed yet are created first.
        """
        for part in self._fsdp2.parts:
            trained = tuple(n for n, parameter in enumerate(part.group.tensors) if parameter.requires_grad)
            if trained and not part.reductions:
                part.make(trained)
        return self._fsdp2.exchanged()
