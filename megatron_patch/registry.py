"""The registry of codecs and exchanges: the package's own, and those that users register (docs/extending.md).

CompressionConfig looks up here which names exist and which bits a codec has. The modules of the package's own
codecs are imported when they are first used, so that a CompressionConfig can be made without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patch.errors import UserError, in_one_line

OWN_TOPOLOGIES = ("auto", "flat", "two_hop")
"""The topologies that collectives/makers.py implements; users cannot register these names."""
_WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True)
class CodecEntry:
    """A registered codec: its name, and what CompressionConfig must know about it."""

    name: str
    bits: tuple[int, ...]
    made_by: Callable[..., Any] | str
    """The codec's class (quantization.codec.Codec), or the class's name in the module `quantization.NAME`."""
    rotated: bool = False
    """Whether blocks are rotated unless `rotation` says otherwise."""

    def make(self, bits: int, rotation: object) -> Any:
        """Create the codec with this number of bits and a quantization.rotation.Rotation."""
        made_by = self.made_by
        if isinstance(made_by, str):
            made_by = getattr(importlib.import_module(f"{__package__}.quantization.{self.name}"), made_by)
        return made_by(bits, rotation)


_OWN = (
    CodecEntry("uniform", (8, 4, 2), "Uniform"),
    CodecEntry("levels", (4, 2), "Levels", rotated=True),
    CodecEntry("sign", (1,), "Sign"),
)
OWN_CODECS = tuple(entry.name for entry in _OWN)
"""The codecs that the fused kernels support; the C++ kernels number them in this order (kernels.h)."""
_codecs = {entry.name: entry for entry in _OWN}
_topologies: dict[str, Any] = {}


def register_codec[Made: Callable[..., Any]](
    name: str, bits: Sequence[int], *, rotated: bool = False
) -> Callable[[Made], Made]:
    """Decorate a codec's class, so that `CompressionConfig(codec=name)` uses it.

    The class is called with (bits, rotation), keeps both as attributes, and has the methods of
    quantization.codec.Codec. The decorator sets its attribute `name`.

    Args:
        name: a Python identifier that no other codec has.
        bits: the code widths that the codec supports, of 8, 4, 2 and 1; the first one is the default.
        rotated: whether blocks are rotated by default before they are coded.

    Raises:
        UserError: the name is taken or is no identifier, or `bits` are not allowed.
    """
    widths = tuple(bits)
    if not widths or any(type(width) is not int or width not in _WIDTHS for width in widths):
        raise UserError(f"register_codec({name!r}): bits are some of 8, 4, 2 and 1, not {bits!r}")

    def register(make: Made) -> Made:
        entry = None if name in OWN_CODECS else _codecs.get(name)
        _check_free(name, make, OWN_CODECS, entry and entry.made_by)
        make.name = name  # type: ignore[attr-defined]
        _codecs[name] = CodecEntry(name, widths, make, rotated)
        return make

    return register


def register_exchange[Made: type](name: str) -> Callable[[Made], Made]:
    """Decorate a class that implements collectives.exchange.Topology, so that `topology: name` uses it.

    Raises:
        UserError: the name is taken or is no identifier.
    """

    def register(cls: Made) -> Made:
        _check_free(name, cls, OWN_TOPOLOGIES, _topologies.get(name))
        _topologies[name] = cls
        return cls

    return register


def import_file(path: Path) -> None:
    """Import a user's file, which registers codecs or exchanges; as a script's, its folder is in sys.path.

    Raises:
        UserError: there is no such file, its name is another module's, or it raises.
    """
    name, there = path.stem, sys.modules.get(path.stem)
    if there is not None and Path(getattr(there, "__file__", None) or "").resolve() == path.resolve():
        return
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"import: {path}: no such Python file")
    if there is not None:
        raise UserError(f"import: {path}: another module is named {name}; rename the file")
    sys.path.insert(0, str(path.parent))
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UserError(f"import: {path}: {in_one_line(error)}") from error


def _check_free(name: str, new: Any, reserved: tuple[str, ...], old: Any) -> None:
    """Raise UserError if `name` is taken. A module that is imported again may register its class again."""
    same = old is not None and (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    if not name.isidentifier() or name in reserved or (old is not None and not same):
        why = "is taken" if name.isidentifier() else "is no name: letters, digits and underscores"
        raise UserError(f"{new.__module__}.{new.__qualname__}: {name!r} {why}")


def codecs() -> dict[str, CodecEntry]:
    """Return all registered codecs by name, the package's own first."""
    return dict(_codecs)


def topology(name: str) -> Any:
    """Return the class that a user registered under `name`; None for the package's own topologies."""
    return _topologies.get(name)


def topologies() -> tuple[str, ...]:
    """Return the values that `CompressionConfig.topology` may have."""
    return (*OWN_TOPOLOGIES, *_topologies)
