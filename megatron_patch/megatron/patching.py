"""Replaces symbols of other packages and restores them; a missing symbol raises an error that names it.

A symbol is given by its path, as in symbols.py, which lists every symbol of Megatron that may be replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_patch.megatron.symbols import BOUND_IN, SYMBOLS

_MISSING = object()


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    before: Any
    """The value in the owner's own namespace; _MISSING if the owner inherited the name or did not have it."""
    after: Any
    also: tuple[tuple[Any, Any], ...]
    """The modules that had imported the symbol by name, each with the value that it had."""


_replaced: dict[str, _Replaced] = {}


class View:
    """A module with some of its names replaced; every other name is the module's own."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def replace(path: str, wrap: Callable[[Any], Any], *, may_be_missing: bool = False) -> None:
    """Replace a symbol by `wrap(original)` until `restore`; a symbol that is replaced already is left alone.

    With `may_be_missing`, a symbol that does not exist is created, and `wrap` gets None.

    Raises:
        RuntimeError: the installed release has no such symbol; the message has its full path.
    """
    if path in _replaced:
        return
    owner, name = _place(path)
    original = getattr(owner, name, _MISSING)
    if original is _MISSING and not may_be_missing:
        raise _missing(path)
    after = wrap(None if original is _MISSING else original)
    loaded = [sys.modules[module] for module in BOUND_IN.get(path, ()) if module in sys.modules]
    also = tuple((module, original) for module in loaded if getattr(module, name, None) is original)
    _replaced[path] = _Replaced(owner, name, vars(owner).get(name, _MISSING), after, also)
    setattr(owner, name, after)
    for module, _ in also:
        setattr(module, name, after)


def wrap(path: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper`, which gets the original as its first argument, until `restore`."""
    replace(path, lambda original: functools.wraps(original)(functools.partial(wrapper, original)))


def is_replaced(path: str) -> bool:
    """Whether this module has replaced a symbol."""
    return path in _replaced


def restore(*paths: str) -> None:
    """Restore the original symbols; paths that are not replaced are ignored.

    A symbol that other code has replaced since then is left alone.
    """
    for path in paths:
        done = _replaced.pop(path, None)
        if done is None:
            continue
        if vars(done.owner).get(done.name, _MISSING) is done.after:
            if done.before is _MISSING:
                delattr(done.owner, done.name)
            else:
                setattr(done.owner, done.name, done.before)
        for module, before in done.also:
            if getattr(module, done.name, None) is done.after:
                setattr(module, done.name, before)


@dataclass(frozen=True)
class Override:
    """A method that was set on an instance and hides the method of its class."""

    instance: Any
    name: str
    before: Any
    """The instance's own attribute of that name; _MISSING if it had none."""
    after: Any

    def undo(self) -> None:
        """Restore the previous attribute, unless other code has overridden the method since."""
        if vars(self.instance).get(self.name, _MISSING) is not self.after:
            return
        if self.before is _MISSING:
            delattr(self.instance, self.name)
        else:
            setattr(self.instance, self.name, self.before)


def override(instance: Any, name: str, method: Any) -> Override:
    """Set a method on an instance; `undo` of the returned Override restores what was there."""
    before = vars(instance).get(name, _MISSING)
    setattr(instance, name, method)
    return Override(instance, name, before, method)


@contextlib.contextmanager
def swapped(values: Mapping[str, Any]) -> Iterator[None]:
    """Set symbols, given by path, to other values within the block, and restore them after it."""
    places = [(*_place(path), value) for path, value in values.items()]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


@functools.cache  # `swapped` runs in every bucket's exchange
def _place(path: str) -> tuple[Any, str]:
    """Return the module or class that holds the last name of a path, and that name."""
    assert path in SYMBOLS or not path.startswith("megatron"), f"{path} is not listed in symbols.py"
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    try:
        owner = importlib.import_module(module)
        for attribute in owners:
            owner = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise _missing(path) from error
    return owner, name


def _missing(path: str) -> RuntimeError:
    package = "megatron-core" if path.startswith("megatron") else path.partition(".")[0].partition(":")[0]
    return RuntimeError(
        f"megatron-loco: {path} is missing in {package} {metadata.version(package)}: this release is not "
        "supported"
    )
