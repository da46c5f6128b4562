"""The native library of another machine, run by qemu: stands where native.loaded() has this machine's.

Every call is a message to emulator.cpp: the function's name, its arguments, and the contents of what their
pointers point to, which come back as the call changed them. Pointers are those that `native.pointer` gave
out: here it notes how long each tensor is. Both machines have 64 bits, the same byte order, and the same
layout of structures.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_patch.quantization import native


def _int64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


class Library:
    """Stands in for the ctypes.CDLL of `path`, run by `command` (an emulator and emulator.cpp, compiled)."""

    def __init__(self, command: list[str], path: Path) -> None:
        self.calls = 0
        self._tensors: dict[int, torch.Tensor] = {}
        self._process = subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        """End the emulator, which may be in the middle of a call that has failed here."""
        self._process.kill()
        self._process.communicate()

    def point(self, tensor: torch.Tensor) -> int:
        """native.pointer, which remembers the tensor until the next call."""
        assert tensor.is_contiguous()
        self._tensors[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def __getattr__(self, name: str) -> Any:
        def call(variant: int = 0, *arguments: Any) -> int:
            return self._call(name, variant, *arguments)

        return call

    def _call(self, name: str, variant: int, *arguments: Any) -> int:
        self.calls += 1
        structure, plain = b"", []
        if arguments and not isinstance(arguments[0], int):  # ctypes.byref of a structure
            structure = bytes(arguments[0]._obj)
            words = {place: value for place, value in _pointers(arguments[0]._obj) if value}
        else:
            plain = list(arguments)
            words = {place: value for place, value in enumerate(plain) if value and value in self._tensors}
        message = _int64(len(name)) + name.encode() + _int64(variant, len(structure)) + structure
        message += _int64(len(plain), *plain, len(words))
        for place, address in words.items():
            contents = self._bytes(address)
            message += _int64(place, len(contents), address) + bytes(contents)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(message)
        stdin.flush()
        answer = stdout.read(8)
        assert len(answer) == 8, f"{name} ended the emulator"
        for address in words.values():
            contents = self._bytes(address)
            contents[:] = stdout.read(len(contents))
        self._tensors.clear()
        return int(struct.unpack("<q", answer)[0])

    def _bytes(self, address: int) -> Any:
        tensor = self._tensors[address]
        size = tensor.numel() * tensor.element_size()
        return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def _pointers(structure: ctypes.Structure, start: int = 0) -> Iterator[tuple[int, int]]:
    """(offset, address) of each pointer in a structure and in those inside it."""
    for name, kind, *_ in structure._fields_:
        offset, value = start + getattr(type(structure), name).offset, getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from _pointers(value, offset)
        elif kind is ctypes.c_void_p:
            yield offset, value or 0


@contextmanager
def emulating(command: list[str], path: Path) -> Iterator[Library]:
    """Within the block the native kernels are those of the library at `path`."""
    library = Library(command, path)
    before = native._library, native.pointer, native.variants
    native._library = lambda: library  # type: ignore[assignment]
    native.pointer = library.point
    native.variants = lambda: ("baseline",)  # type: ignore[assignment]
    try:
        with native.using(0):
            yield library
    finally:
        native._library, native.pointer, native.variants = before
        library.close()
