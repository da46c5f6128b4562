"""`megatron-loco bench links`: started by torchrun on gloo ranks, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch.workflows.bench import links
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.plan import cluster_file

ROOT = Path(__file__).parents[3]


def test_two_ranks_on_gloo_write_a_file_that_plan_reads(tmp_path: Path) -> None:
    out = tmp_path / "links.yaml"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_patch.workflows.cli", "bench", "links", "--most", "0.25", "--out", str(out)),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all_to_all" in done.stdout
    found = cluster_file.read(out)
    assert (found["nodes"], found["gpus_per_node"], found["backend"]) == (1, 2, "gloo")
    names = {one["collective"] for one in found["links"]}
    assert names == {"all_to_all", "reduce_scatter", "all_gather"}
    sizes = [one["bytes"] for one in found["links"] if one["collective"] == "all_gather"]
    assert sizes == [2048, 8192, 32768, 131072]
    assert cluster_file.build(found, 1, 2, "links.yaml").inside.bandwidth > 1e6


@pytest.mark.slow
def test_groups_of_two_nodes_share_the_uplink(tmp_path: Path) -> None:
    """Four ranks as two nodes of two: all, inside and between."""
    script = tmp_path / "four.py"
    script.write_text(
        "import json, sys, torch, torch.distributed as dist\n"
        "from megatron_patch.workflows.bench import links\n"
        "torch.set_num_threads(1)\n"
        "dist.init_process_group('gloo')\n"
        "found = links.measure(2, 1 << 14)\n"
        "if dist.get_rank() == 0:\n"
        "    open(sys.argv[1], 'w').write(json.dumps(found))\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    out = tmp_path / "curves.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *(str(script), str(out)),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {(one["scope"], one["ranks"]) for one in found} == {("all", 4), ("inside", 2), ("between", 2)}
    assert all(one["seconds"] > 0 for one in found)
    sent = [one["bytes"] for one in found if one["scope"] == "all" and one["collective"] == "all_to_all"]
    assert sent == [3072, 12288]


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({}, [], "start it by torchrun"),
        ({"WORLD_SIZE": "1"}, [], "a single rank has no links"),
        ({"WORLD_SIZE": "2"}, ["--most", "0"], "--most: 0 is not allowed"),
    ],
)
def test_mistakes(
    environment: dict[str, str],
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if environment:
            monkeypatch.setenv(name, environment.get(name, "0"))
    assert main(["bench", "links", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not Path("links.yaml").exists()


def test_the_table_has_the_largest_size_of_each_curve() -> None:
    curves = [
        {"collective": "all_to_all", "scope": "all", "ranks": 4, "bytes": size, "seconds": size / 1e9}
        for size in (1e6, 3e6)
    ]
    lines = links.table(curves).splitlines()
    assert len(lines) == 2
    assert "3.00" in lines[1]
    assert "1.000" in lines[1]
