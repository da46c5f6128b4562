"""Which codec a configuration asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.rotation import HADAMARD, NONE, Rotation

_FILES = ("uniform", "levels", "sign")
"""Modules of this room, each with its codec and its numbers of bits in CODECS."""


def _all() -> dict[tuple[str, int], Callable[[int, Rotation], Codec]]:
    found: dict[tuple[str, int], Callable[[int, Rotation], Codec]] = {}
    for name in _FILES:
        for make, bits in importlib.import_module(f"{__package__}.{name}").CODECS:
            if found.setdefault((make.name, bits), make) is not make:
                raise ValueError(f"two codecs are {make.name} with {bits} bits")
    return found


_BY_NAME = _all()


def codec_of(config: CompressionConfig, first: bool = True, last: bool = True) -> Codec:
    """The codec of `config.codec`, `bits` and `rotation`, for a hop that may be the first or the last of
    some."""
    rotation = HADAMARD if config.rotates else NONE
    return _BY_NAME[config.code, config.bits](config.bits, rotation.hop(first, last))
