"""Folders that release 0.2.0 wrote beside Megatron's files: 7 steps, random errors, two models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).with_name("of_release_0_2_0")
CASES = {
    "flat": (2, {"layers": 1}, {"bits": 4}),
    "experts": (4, {"ep": 2, "experts": 4, "layers": 1}, {"bits": 2, "error_dtype": "bf16"}),
}
"""Ranks, parallelism and compression of each folder."""


def read(folder: str, parallel: dict[str, Any], compression: dict[str, Any]) -> tuple[list[bytes], list[int]]:
    """In a worker: the bytes of this rank's error states after reading, and the steps of its chunks."""
    import torch
    from with_megatron.gpt_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import attachment_of
    from megatron_patch.megatron.checkpoint import dist_checkpointing
    from megatron_patch.megatron.checkpoint.element_map import rank_state_of

    gpt = build(**parallel)
    config = megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    megatron_patch.attach(gpt.chunks, config)
    dist_checkpointing.restore(rank_state_of(gpt.chunks), Path(folder), lambda: None, 0, 1.0)
    states = [attachment_of(chunk).state for chunk in gpt.chunks]
    tensors = [t for state in states for sender in state.senders for t in sender.error.tensors().values()]
    found = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
    steps = [state.ledger.steps for state in states]
    megatron_patch.disable()
    return found, steps


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_release_0_2_0_is_read_bit_for_bit(pool: Any, case: str) -> None:
    ranks, parallel, compression = CASES[case]
    for rank, (tensors, steps) in enumerate(
        pool.run(read, str(HERE / case), parallel, compression, world_size=ranks)
    ):
        assert steps == [7] * len(steps)
        file = (HERE / case / "compression" / f"rank-{rank:05}.safetensors").read_bytes()
        assert sum(map(len, tensors)) == len(file) - 8 - int.from_bytes(file[:8], "little")
        assert all(tensor in file for tensor in tensors)
        assert len(set(tensors)) == len(tensors)
