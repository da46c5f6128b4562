"""Reading a shell script's commands as bash would expand them, without executing any."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_patch.workflows.run import shell_script

SCRIPT = r"""#!/bin/bash
# torchrun in a comment, and a quote that isn't closed
export LAYERS=${LAYERS:-32}
SIZE=8b   # a comment
if [[ "$SIZE" == "8b" ]]; then HIDDEN=4096; elif [ $SIZE = 70b ]; then HIDDEN=8192
else
    HIDDEN=1
fi
if [ -z "$NOWHERE_SET" ] || [[ $LAYERS -gt 64 ]]; then
    DATA=("--mock-data" "--split '99,1,0'")
    if [ 2 -lt 1 ]; then DATA+=(--wrong); else DATA+=(--right); fi
else
    DATA=(--data-path x)
fi
MODEL_ARGS=(
    --num-layers $LAYERS   # the depth
    --hidden-size "${HIDDEN}"
    # --left-out 3
    --name "two words"
)
MODEL_ARGS+=("${DATA[@]}" --quoted "${SIZE}")
OPTIONS=" --lr 1e-4 \
  --bf16"
OPTIONS="$OPTIONS --seed 1"
MODE=1 command_not_there torchrun --nnodes 2 \
    pretrain.py ${MODEL_ARGS[@]} $OPTIONS 2>&1 | tee log.txt
command_not_there "${MODEL_ARGS[@]}" && command_not_there; command_not_there $((LAYERS)) > /dev/null
"""


def by_bash(script: str, folder: Path) -> list[list[str]]:
    """The words of each `command_not_there` that bash itself would run."""
    write = "printf '%s\\0' command_not_there \"$@\" >> told; echo >> told"
    told = f"command_not_there() {{ {write}; }}\ntee() {{ :; }}\n"
    subprocess.run(["bash", "-c", told + script], cwd=folder, env={"PATH": "/usr/bin:/bin"}, check=True)
    return [line.rstrip("\0").split("\0") for line in (folder / "told").read_text().splitlines()]


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    wanted = by_bash(SCRIPT, tmp_path)
    found = [words for words in shell_script.commands(SCRIPT) if "command_not_there" in words]
    assert found[0].pop(0) == "MODE=1"
    # Quotes within an unquoted element stay in bash, and a sum is left as it is here.
    assert [word.strip("'") for word in wanted[0]] == found[0]
    assert "two" in found[0]
    assert "two words" in found[1]
    assert len(found) == 4
    assert found[2] == wanted[2]
    assert (found[3], wanted[3]) == (["command_not_there", "${...}"], ["command_not_there", "32"])


def test_variables_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERS", "80")
    assert list(shell_script.commands("run ${LAYERS:-32} $LAYERS ${LAYERS}x")) == [["run", "80", "80", "80x"]]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run --save $1 ${2}/x $NOWHERE_SET", ["--save", "$1", "${2}/x", "$NOWHERE_SET"]),
        ("run $(nproc) `date +%s`", ["${...}", "${...}"]),
        ("A=(--x)\nif grep -q x y; then A+=(--y); fi\nrun ${A[@]}", ["${A}"]),
        ("case $N in\n 1) A=1 ;;\n 2)\n A=2\n ;;\nesac\nrun $A", ["${A}"]),
        ("if [[ $N == *x* ]]; then A=1; else B=2; fi; run $A $B", ["${A}", "2"]),
        ("A='it is'; run \"$A\" $A", ["it is", "it", "is"]),
    ],
)
def test_what_only_a_run_knows_stays(script: str, words: list[str]) -> None:
    assert ["run", *words] in list(shell_script.commands(script))


def test_nothing_is_executed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    list(shell_script.commands(f"touch {told}\nA=$(touch {told})\n: > {told}\nif touch {told}; then :; fi"))
    assert not told.exists()
