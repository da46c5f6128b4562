"""CUDA_DEVICE_MAX_CONNECTIONS=1, where Megatron asks for it: a GPU's one hardware queue for all streams."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def wants_one_connection(flags: Sequence[str]) -> bool:
    """Whether ranks with these flags of Megatron's need the variable, or have it set already.

    Megatron asserts 1 with tensor or context parallelism up to Hopper, and more than 1 with FSDP. Elsewhere
    one queue would only hold exchanges, on streams of their own, up behind backward passes.
    """
    if {"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(flags):
        return False
    if VARIABLE in os.environ:
        return True
    sizes = [
        int(value)
        for flag, value in itertools.pairwise(flags)
        if flag in ("--tensor-model-parallel-size", "--context-parallel-size")
    ]
    if max(sizes, default=1) == 1:
        return False
    import torch

    # Where there is no GPU the job is planned for a Hopper one (dry_run.py).
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10
