"""Codecs and exchanges by name: the package's own, and those of a user's own files (docs/extending.md).

CompressionConfig asks here which names there are, and which bits a codec has. The package's own codecs are
listed here; their modules are imported when they are first used, so that options are made without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patch.errors import UserError

OWN_TOPOLOGIES = ("auto", "flat", "two_hop")
"""What collectives/makers.py chooses among by itself."""
_MOST_BITS = 8


@dataclass(frozen=True)
class CodecEntry:
    """A codec's name and what a configuration must know of it."""

    name: str
    bits: tuple[int, ...]
    made_by: Callable[..., Any] | str
    """Its class, a quantization.codec.Codec; or the name of that class in the module of the codec's name."""
    rotated: bool = False
    """Whether blocks are rotated unless `rotation` says otherwise."""

    def make(self, bits: int, rotation: object) -> Any:
        """The codec of so many bits, with a quantization.rotation.Rotation."""
        made_by = self.made_by
        if isinstance(made_by, str):
            made_by = getattr(importlib.import_module(f"{__package__}.quantization.{self.name}"), made_by)
        return made_by(bits, rotation)


_OWN = (
    CodecEntry("uniform", (8, 4, 3, 2), "Uniform"),
    CodecEntry("levels", (4, 3, 2), "Levels", rotated=True),
    CodecEntry("sign", (1,), "Sign"),
)
OWN_CODECS = tuple(entry.name for entry in _OWN)
"""The fused kernels know these, and number them in this order."""
_codecs = {entry.name: entry for entry in _OWN}
_topologies: dict[str, Any] = {}


def register_codec[Made: Callable[..., Any]](
    name: str, bits: Sequence[int], *, rotated: bool = False
) -> Callable[[Made], Made]:
    """Decorate a codec's class, so that `CompressionConfig(codec=name)` uses it.

    Args:
        name: not that of another codec.
        bits: widths of a code that it has, 1 to 8; the first is the default.
        rotated: whether blocks are rotated by default before they are coded.

    The class is called with (bits, rotation), keeps both as attributes, and has the methods of
    quantization.codec.Codec. Its attribute `name` is set here.

    Raises:
        UserError: a name that is taken, or bits that cannot be.
    """
    widths = tuple(bits)
    if not widths or any(type(width) is not int or not 1 <= width <= _MOST_BITS for width in widths):
        raise UserError(
            f"register_codec({name!r}): bits are whole numbers from 1 to {_MOST_BITS}, not {bits!r}"
        )

    def register(make: Made) -> Made:
        entry = None if name in OWN_CODECS else _codecs.get(name)
        _check_free(name, make, OWN_CODECS, entry and entry.made_by)
        make.name = name  # type: ignore[attr-defined]
        _codecs[name] = CodecEntry(name, widths, make, rotated)
        return make

    return register


def register_exchange[Made: type](name: str) -> Callable[[Made], Made]:
    """Decorate a class with the functions of collectives.exchange.Topology: `topology: name` uses it.

    Raises:
        UserError: a name that is taken.
    """

    def register(made: Made) -> Made:
        _check_free(name, made, OWN_TOPOLOGIES, _topologies.get(name))
        _topologies[name] = made
        return made

    return register


def _check_free(name: str, new: Any, reserved: tuple[str, ...], old: Any) -> None:
    """A module that is imported anew may register again; another one may not take a name."""
    same = old is not None and (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    if not name.isidentifier() or name in reserved or (old is not None and not same):
        why = "is taken" if name.isidentifier() else "is no name: letters, digits and underscores"
        raise UserError(f"{new.__module__}.{new.__qualname__}: {name!r} {why}")


def codecs() -> dict[str, CodecEntry]:
    """All codecs by name, the package's own first."""
    return dict(_codecs)


def topology(name: str) -> Any:
    """A user's class of a collectives.exchange.Topology; None for the package's own."""
    return _topologies.get(name)


def topologies() -> tuple[str, ...]:
    """Names that `CompressionConfig.topology` may have."""
    return (*OWN_TOPOLOGIES, *_topologies)
