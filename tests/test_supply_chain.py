"""What the package brings along: locked versions, their licences, and nothing that executes what it reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    *sorted((ROOT / "megatron_patch").rglob("*.py")),
    *sorted((ROOT / "pretrain_scripts").rglob("*.py")),
]
LOCKS = [ROOT / "requirements.lock", ROOT / "docs/requirements.lock"]
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
SAFE_YAML = {"SafeLoader", "CSafeLoader"}


def name_of(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a module unpickles, executes text or may do so, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                if module.partition(".")[0] in UNSAFE_MODULES:
                    yield f"line {node.lineno}: import {module}"
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            constants = {one.arg: getattr(one.value, "value", None) for one in node.keywords}
            if called in ("eval", "exec", "compile", "__import__"):
                yield f"line {node.lineno}: {called}"
            elif called.endswith("torch.load") and constants.get("weights_only") is not True:
                yield f"line {node.lineno}: torch.load without weights_only=True"
            elif called in ("np.load", "numpy.load") and constants.get("allow_pickle", False) is not False:
                yield f"line {node.lineno}: np.load with pickles"
            elif re.fullmatch(r"yaml\.((unsafe_|full_)?load(_all)?|parse)", called):
                names = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
                loaders = {name for name in names if name.endswith("Loader")}
                if "_load" in called or not loaders or not loaders <= SAFE_YAML:
                    yield f"line {node.lineno}: {called} without a safe loader"


def test_nothing_unpickles_or_executes_what_it_reads() -> None:
    found = [
        f"{path.relative_to(ROOT)}, {one}"
        for path in SOURCES
        for one in unsafe(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def test_the_check_sees_what_it_must() -> None:
    for text in (
        "def f():\n    import shelve as s",
        "from marshal import loads",
        "eval(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "yaml.load(x, yaml.Loader)",
        "yaml.full_load(x)",
    ):
        assert list(unsafe(ast.parse(text))), text
    for text in ("torch.load(x, weights_only=True)", "np.load(x)", "yaml.safe_load(x)", "re.compile(x)"):
        assert not list(unsafe(ast.parse(text))), text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lock_holds_exact_versions_and_no_addresses(lock: Path) -> None:
    for line in lock.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line), line


def test_every_locked_package_has_its_licence_on_the_page() -> None:
    page = (ROOT / "docs/licences.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| (\S+) \| (\S+) \| [^|]+ \| (?:core|extras|development) \|$", page, re.MULTILINE)
    )
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert rows == dict(line.split("==") for line in lines), "make licences"
