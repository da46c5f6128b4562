"""Which codec a configuration asks for."""

from __future__ import annotations

from megatron_patch.config import CompressionConfig
from megatron_patch.quantization.codec import Codec
from megatron_patch.quantization.sign import Sign
from megatron_patch.quantization.uniform import Uniform

_BY_BITS: dict[int, Codec] = {
    8: Uniform(8),
    4: Uniform(4),
    2: Uniform(2),
    1: Sign(),
}


def codec_of(config: CompressionConfig) -> Codec:
    """The codec of `config.bits`."""
    return _BY_BITS[config.bits]
