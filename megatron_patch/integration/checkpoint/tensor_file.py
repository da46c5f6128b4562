"""Named tensors in a file, in safetensors' format: nothing in it can run, and the library reads it too.

    8 bytes: length of the header | header: JSON | the tensors' bytes

The header has of each tensor its dtype, its shape and where its bytes begin and end behind the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard

import numpy as np
import torch

from megatron_patch.untrusted import load_json

_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8


def write(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors, which are on the CPU, to a file that is open for writing."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # all are aligned
    header, at = {}, 0
    for name, tensor in ordered:
        place = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        at = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


class TensorFile:
    """Reads single tensors.

    Raises:
        ValueError: no such file, by its header.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = load_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no mapping")
        header.pop("__metadata__", None)
        self._path, self._start = path, 8 + length
        self._entries = {name: _entry(name, entry, size - self._start) for name, entry in header.items()}

    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._entries.keys()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        dtype, shape, begin, end = self._entries[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        found = np.fromfile(self._path, np.uint8, end - begin, offset=self._start + begin)
        if len(found) != end - begin:
            raise ValueError("it has become shorter")
        return torch.from_numpy(found).view(dtype).reshape(shape)


def _entry(name: str, entry: object, size: int) -> tuple[torch.dtype, list[int], int, int]:
    if isinstance(entry, dict) and entry.get("dtype") in _DTYPES:
        dtype, shape, place = _DTYPES[entry["dtype"]], entry.get("shape"), entry.get("data_offsets")
        if _are_whole(shape) and _are_whole(place) and len(place) == 2:
            begin, end = place
            if begin <= end <= size and end - begin == math.prod(shape) * dtype.itemsize:
                return dtype, shape, begin, end
    raise ValueError(f"its header is wrong about {name!r}")


def _are_whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
