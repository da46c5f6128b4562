"""The rooms of docs/architecture.md: imports go one way only, one room names Megatron, importing is lean."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_patch"
ORDER = [
    {"errors", "files", "registry", "releases", "step_report"},
    {"config"},
    {"quantization"},
    {"loco"},
    {"collectives"},
    {"weights"},
    {"session"},
    {"megatron", "pytorch"},
    {"workflows"},
]
# Thin doors to a room behind them; nothing may depend on them.
ENTRANCES = {"__init__", "__main__", "doors", "launch"}
MODULES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def rank_of(room: str) -> int | None:
    return next((place for place, rooms in enumerate(ORDER) if room in rooms), None)


def imported_names(path: Path) -> list[tuple[str, int, bool]]:
    """(absolute module name, line, at module level) of every import in a file, wherever it stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # What only a function or `if TYPE_CHECKING` imports is not loaded with the module.
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
        for inner in ast.walk(node)
    }
    here = ("megatron_patch", *path.relative_to(PACKAGE).parts)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, [base, node.module or ""]))
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        else:
            continue
        found += [(name, node.lineno, id(node) not in lazy) for name in names]
    return found


def own_imports(path: Path) -> list[tuple[str, int]]:
    """(room, line) of every import of this package."""
    return [
        (room_of(tuple(name.split(".")[1:])), line)
        for name, line, _ in imported_names(path)
        if name.startswith("megatron_patch.")
    ]


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path):
    room = room_of(path.relative_to(PACKAGE).parts)
    if room in ENTRANCES:
        return
    place = rank_of(room)
    assert place is not None, f"{relative(path)} lies in no room of docs/architecture.md"
    wrong = []
    for imported, line in own_imports(path):
        other = rank_of(imported)
        if other is None:
            # `from megatron_patch import CompressionConfig`: the public API, made of config and errors.
            if imported in ENTRANCES:
                wrong.append(f"line {line}: {imported}")
        elif other > place:
            wrong.append(f"line {line}: {imported}")
    assert not wrong, f"{relative(path)} ({room}) imports from a later room: {wrong}"


# The parts of megatron/, from what knows nothing of the others to the ways in.
WITHIN_MEGATRON = [
    {"arguments", "symbols", "unsupported"},
    {"patching"},
    {"cpu", "seams"},
    {"onebit_adam", "outer_steps", "startup_log"},
    {"fsdp"},
    {"attach"},
    {"metrics", "weight_metrics"},
    {"checkpoint"},
    {"doors"},
    {"run_script"},
]


def test_imports_within_megatron_go_one_way():
    place = {name: number for number, names in enumerate(WITHIN_MEGATRON) for name in names}
    room = "megatron_patch.megatron."
    wrong = []
    for path in MODULES:
        here = dotted(path)
        if not here.startswith(room) or here == f"{room}__init__":
            continue
        mine = place[here.removeprefix(room).split(".")[0]]
        for name, line, _ in imported_names(path):
            part = name.removeprefix(room).split(".")[0]
            if name.startswith(room) and place.get(part, -1) > mine:
                wrong.append(f"{relative(path)}, line {line}: {name}")
    assert not wrong


def test_megatron_and_pytorch_know_each_other_in_one_file_alone():
    """`--use-torch-fsdp2` is torch's FSDP2 inside Megatron's engine: one adapter serves both."""
    found = {
        (relative(path), room)
        for path in MODULES
        for room, _ in own_imports(path)
        if {room_of(path.relative_to(PACKAGE).parts), room} == {"megatron", "pytorch"}
    }
    assert found == {("megatron/fsdp/torch_fsdp2.py", "pytorch")}


def test_the_package_imports_no_benchmark():
    """A wheel has none of them."""
    found = {
        f"{relative(path)}, line {line}: {name}"
        for path in MODULES
        for name, line, _ in imported_names(path)
        if name.split(".")[0] == "benchmarks"
    }
    assert not found


def dotted(path: Path) -> str:
    return ".".join(("megatron_patch", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_no_modules_import_one_another_in_a_circle():
    ours = {dotted(path) for path in MODULES}
    graph = {dotted(path): {name for name, *_ in imported_names(path)} & ours for path in MODULES}
    assert circle_in(graph) is None
    first = next(name for name in graph if graph[name])
    graph[next(iter(graph[first]))] = {first}
    assert circle_in(graph) is not None, "the check sees a circle"


def circle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Names that lead back to the first of them, if there are any."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        for other in graph.get(name, ()):
            if found := walk(other, [*way, name]):
                return found
        done.add(name)
        return None

    return next((found for name in graph if (found := walk(name, []))), None)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_megatron_names_megatron(path):
    room = room_of(path.relative_to(PACKAGE).parts)
    named = [
        f"line {line}: {name}" for name, line, _ in imported_names(path) if name.split(".")[0] == "megatron"
    ]
    if room == "megatron":
        return
    if room == "workflows":
        # Tools that drive Megatron's own data or argument code may; a training seam may not.
        seam = [name for name in named if "megatron.core.distributed" in name or "optimizer" in name]
        assert not seam, f"{relative(path)} reaches into the seam: {seam}"
        return
    assert not named, f"{relative(path)} names Megatron: {named}"


@pytest.mark.parametrize("room", ["quantization"])
def test_arithmetic_rooms_know_no_process_group(room):
    for path in (PACKAGE / room).rglob("*.py"):
        named = [name for name, _, _ in imported_names(path) if name.startswith("torch.distributed")]
        assert not named, f"{relative(path)} imports {named}"
        attributes = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr == "distributed"
        ]
        assert not attributes, f"{relative(path)} uses torch.distributed at lines {attributes}"


def test_the_checks_see_what_they_must(tmp_path, monkeypatch):
    """The parser of this file finds imports in functions, relative ones and names of a package."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "quantization").mkdir()
    path = tmp_path / "quantization" / "bad.py"
    path.write_text(
        "from megatron_patch import megatron\n"
        "from ..collectives import reduce_scatter\n"
        "def f():\n    import megatron.core\n"
    )
    rooms = [room for room, _ in own_imports(path)]
    assert "megatron" in rooms
    assert "collectives" in rooms
    assert ("megatron.core", 4, False) in imported_names(path)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_package_loads_neither_megatron_nor_torch():
    loaded = loaded_by("import megatron_patch; megatron_patch.CompressionConfig(); megatron_patch.UserError")
    assert "megatron_patch.config" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "megatron"}
    assert "torch" not in loaded


def test_the_arithmetic_loads_without_megatron_and_touches_no_cuda():
    loaded = loaded_by(
        "import megatron_patch.loco, megatron_patch.collectives.sender\n"
        "import megatron_patch.collectives.reduce_scatter\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    assert "megatron_patch.collectives.reduce_scatter" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "megatron"}
