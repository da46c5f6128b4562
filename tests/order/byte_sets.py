"""Which bytes of its storage a tensor is: a slice where they lie end to end, else their places."""

from __future__ import annotations

import functools

import numpy as np
import torch

Bytes = slice | np.ndarray


def bytes_of(tensor: torch.Tensor) -> Bytes | None:
    """The bytes of a tensor, counted from its storage's first; None where it has no element."""
    if not tensor.numel():
        return None
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return slice(start, start + tensor.numel() * size)
    return _places(start, size, tuple(tensor.shape), tuple(tensor.stride()))


@functools.lru_cache(4096)
def _places(start: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    places = np.full(1, start, dtype=np.int64)
    for length, stride in (*zip(shape, strides, strict=True), (size, None)):
        step = 1 if stride is None else stride * size
        places = np.add.outer(places, np.arange(length if step else 1) * step).reshape(-1)
    places = np.unique(places)
    if places[-1] - places[0] + 1 == len(places):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places
