"""Keeps what outer steps need in checkpoints of megatron.core.dist_checkpointing (megatron/outer_steps.py).

Megatron takes all optimizer instances to be equal, and saves the weights and Adam's states of some. Right
after an outer step the weights are equal, and the anchor; Megatron's own training loop has one made before it
saves (training_loop.py). A rank adds one tensor of bytes, PREFIXmegatron_loco_outer.rank_R: the outer
momentum, the errors of the exchange, and its Adam states. A run with as many ranks, placed alike, continues
from them as if it had not been interrupted. Others, and stock Megatron, start from the saved weights and Adam
states.
"""

from __future__ import annotations

import io
import logging
from typing import Any

import torch
import torch.distributed as dist

from megatron_patch.megatron.outer_steps import OuterSteps

logger = logging.getLogger(__name__)


def packed(outer: list[OuterSteps], optimizer: Any) -> torch.Tensor:
    """Return the states of this rank's chunks, uint8 on CPU."""
    late = any(one.steps or one.under_way for one in outer)
    if late and dist.get_rank() == 0:
        logger.warning(
            "megatron-loco: saved between outer steps, %d optimizer steps after one: the checkpoint mixes "
            "the weights of all optimizer instances; save after a multiple of compression.outer_interval%s",
            outer[0].steps,
            ", without compression.outer_delay" if outer[0].config.outer_delay else "",
        )
    buffer, kept = io.BytesIO(), []
    for one in outer:
        state = {} if late else one.state(optimizer)
        kept.append((one.layout(), {name: tensor.detach().cpu().clone() for name, tensor in state.items()}))
    torch.save(kept, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def restore(outer: list[OuterSteps], data: torch.Tensor | None) -> None:
    """Have the next step begin from the states that `packed` has returned; None: the checkpoint has none."""
    saved = [] if data is None else torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    fits = [layout for layout, _ in saved] == [one.layout() for one in outer]
    for place, one in enumerate(outer):
        one.forget()
        one.loaded = saved[place][1] if fits else {}
    if not fits and dist.get_rank() == 0:
        why = "the checkpoint has none" if data is None else "the checkpoint's ranks were placed otherwise"
        logger.info("megatron-loco: outer steps begin anew, without errors and momentum: %s", why)
