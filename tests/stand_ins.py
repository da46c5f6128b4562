"""Modules that a framework imports and that are not here, as modules whose every attribute exists.

`install(...)` after megatron.core is imported, which asks for some of them and does without.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


def _anything(self: object, *args: Any, **kwargs: Any) -> None:
    pass


class _StandIn(types.ModuleType):
    __path__ = ()  # a package
    __version__ = "2.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandIn(name) if name[0].islower() else type(name, (), {"__init__": _anything})
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """A decorator, with arguments or without."""
        return args[0] if args and callable(args[0]) else lambda decorated: decorated


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(*names: str) -> None:
    """Have imports of these modules, and of all below them, succeed."""
    sys.meta_path.insert(0, _Finder(names))
