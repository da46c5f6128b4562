"""Which codec a configuration asks for."""

from __future__ import annotations

import importlib

from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.codec import Codec

_FILES = ("uniform", "sign")
"""Modules of this room, each with its codecs in CODECS."""


def _all() -> dict[int, Codec]:
    modules = (importlib.import_module(f"{__package__}.{name}") for name in _FILES)
    return {codec.bits: codec for module in modules for codec in module.CODECS}


_BY_BITS = _all()


def codec_of(config: CompressionConfig) -> Codec:
    """The codec of `config.bits`."""
    return _BY_BITS[config.bits]
