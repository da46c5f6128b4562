"""Which codec a configuration asks for."""

from __future__ import annotations

import importlib

from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.codec import Codec

_FILES = ("uniform", "sign")
"""Modules of this room, each with its codecs in CODECS."""


def _all() -> dict[int, Codec]:
    found: dict[int, Codec] = {}
    for name in _FILES:
        for codec in importlib.import_module(f"{__package__}.{name}").CODECS:
            if found.setdefault(codec.bits, codec) is not codec:
                raise ValueError(f"{found[codec.bits].name} and {codec.name} both have {codec.bits} bits")
    return found


_BY_BITS = _all()


def codec_of(config: CompressionConfig) -> Codec:
    """The codec of `config.bits`."""
    return _BY_BITS[config.bits]
