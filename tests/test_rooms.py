"""The rooms of docs/architecture.md: imports go one way only, one room names Megatron, importing is lean."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

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
# Thin doors to a room behind them; nothing may depend on them.
ENTRANCES = {"__init__", "__main__", "doors", "launch"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def place_in(order: list[set[str]], room: str) -> int | None:
    return next((place for place, rooms in enumerate(order) if room in rooms), None)


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(("megatron_patch", *path.relative_to(PACKAGE).with_suffix("").parts))


def names_in(text: str, here: tuple[str, ...]) -> list[tuple[str, int]]:
    """(absolute module name, line) of every import in a module at `here`, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(text)):
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
        found += [(name, node.lineno) for name in names]
    return found


@functools.cache
def imported_names(path: Path) -> list[tuple[str, int]]:
    here = ("megatron_patch", *path.relative_to(PACKAGE).parts)
    return names_in(path.read_text(encoding="utf-8"), here)


def imports() -> Iterator[tuple[str, str, str, str]]:
    """(room, module's path, imported name, where it is) of every import of the package's modules."""
    for path in MODULES:
        for name, line in imported_names(path):
            yield room_of(path), relative(path), name, f"{relative(path)}, line {line}: {name}"


def test_imports_go_one_way() -> None:
    wrong = []
    for room, _, name, where in imports():
        if room in ENTRANCES or not name.startswith("megatron_patch."):
            continue
        place = place_in(ORDER, room)
        assert place is not None, f"{where}: the importing module lies in no room of docs/architecture.md"
        imported = name.split(".")[1]
        other = place_in(ORDER, imported)
        # None: `from megatron_patch import CompressionConfig`, the public API, made of config and errors.
        if imported in ENTRANCES if other is None else other > place:
            wrong.append(where)
    assert not wrong


def test_imports_within_megatron_go_one_way() -> None:
    wrong = []
    for room, module, name, where in imports():
        if room != "megatron" or module == "megatron/__init__.py":
            continue
        mine = place_in(WITHIN_MEGATRON, Path(module).parts[1].removesuffix(".py"))
        assert mine is not None, module
        other = place_in(WITHIN_MEGATRON, [*name.split("."), "", ""][2])
        if name.startswith("megatron_patch.megatron.") and other is not None and other > mine:
            wrong.append(where)
    assert not wrong


def test_megatron_and_pytorch_know_each_other_in_one_file_alone() -> None:
    """`--use-torch-fsdp2` is torch's FSDP2 inside Megatron's engine: one adapter serves both."""
    both = {"megatron", "pytorch"}
    found = {
        module
        for room, module, name, _ in imports()
        if name.startswith("megatron_patch.") and {room, name.split(".")[1]} == both
    }
    assert found == {"megatron/fsdp/torch_fsdp2.py"}


def test_the_package_imports_no_benchmark() -> None:
    """A wheel has none of them."""
    assert not [where for *_, name, where in imports() if name.split(".")[0] == "benchmarks"]


def test_no_modules_import_one_another_in_a_circle() -> None:
    ours = {dotted(path) for path in MODULES}
    graph = {dotted(path): {name for name, _ in imported_names(path)} & ours for path in MODULES}
    TopologicalSorter(graph).prepare()  # CycleError names the circle.


def test_only_megatron_names_megatron() -> None:
    """Tools in workflows that drive Megatron's own data or argument code may; a training seam may not."""
    seams = ("megatron.core.distributed", "optimizer")
    wrong = [
        where
        for room, _, name, where in imports()
        if name.split(".")[0] == "megatron"
        and room != "megatron"
        and (room != "workflows" or any(seam in name for seam in seams))
    ]
    assert not wrong


def test_arithmetic_knows_no_process_group() -> None:
    for path in (PACKAGE / "quantization").rglob("*.py"):
        assert not [name for name, _ in imported_names(path) if name.startswith("torch.distributed")], path
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not [one for one in nodes if isinstance(one, ast.Attribute) and one.attr == "distributed"], (
            path
        )


def test_the_checks_see_what_they_must() -> None:
    """Imports in functions, relative ones and names of a package."""
    text = "from megatron_patch import megatron\nfrom ..collectives import reduce_scatter\n"
    found = names_in(
        text + "def f():\n    import megatron.core\n", ("megatron_patch", "quantization", "bad.py")
    )
    names = ("megatron_patch.megatron", "megatron_patch.collectives.reduce_scatter", "megatron.core")
    assert [found[place][0] for place in (1, 3, 4)] == list(names)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_package_loads_neither_megatron_nor_torch() -> None:
    loaded = loaded_by("import megatron_patch; megatron_patch.CompressionConfig(); megatron_patch.UserError")
    assert "megatron_patch.config" in loaded
    assert not {"torch", "megatron"} & {name.split(".")[0] for name in loaded}


def test_the_arithmetic_loads_without_megatron_and_touches_no_cuda() -> None:
    loaded = loaded_by(
        "import megatron_patch.loco, megatron_patch.collectives.sender\n"
        "import megatron_patch.collectives.reduce_scatter\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    assert "megatron_patch.collectives.reduce_scatter" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "megatron"}
