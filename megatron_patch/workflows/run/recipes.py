"""Where recipes and entry points are: at the top of the repository, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from megatron_patch.errors import UserError, nearest

_PACKAGE = Path(__file__).resolve().parents[2]


def shipped(name: str) -> Path:
    """`configs/...` or `pretrain_scripts/...` as this installation has it (it may not exist)."""
    root = _PACKAGE.parent if (_PACKAGE.parent / "configs").is_dir() else _PACKAGE / "_shipped"
    return root / name


def find(name: str) -> Path:
    """`name` as given if it is there, else the shipped file of that name."""
    path = Path(name)
    return path if is_file(path) or path.is_absolute() else shipped(name)


def is_file(path: Path) -> bool:
    """Whether it is there; a name that no file can have (too long, a NUL) is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def method_recipe(name: str) -> Path:
    """configs/methods/NAME.yaml."""
    path = shipped(f"configs/methods/{name}.yaml")
    if Path(name).name != name or not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise UserError(f"method {name!r}: must be one of {', '.join(known)}{nearest(name, known)}")
    return path
