"""Files that once ended a loader with a traceback, without end, or with something else than they said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.errors import UserError

from . import loaders
from .bounds import bounded
from .mutations import BOMBS, as_json, as_yaml


def changed(tree: Any, path: list[Any], value: Any) -> Any:
    """A copy of `tree` with another value at `path`."""
    found = copy.deepcopy(tree)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


CONFIG, ABLATION, CLUSTER = loaders._CONFIGS[0], loaders._ABLATIONS[0], loaders._CLUSTERS[1]
RESULTS = loaders._csv(loaders._results())
DOUBLING = "\n".join(
    ["megatron:", "  b0: x", *(f"  b{i}: ${{.b{i - 1}}}${{.b{i - 1}}}" for i in range(1, 40))]
)
CASES = [
    (loaders.read_configuration, b"5", "config.yaml"),
    (loaders.read_configuration, b"compression: ${megatron.lr}", "'megatron.lr' not found"),
    (loaders.read_configuration, b"compression: {method: '${megatron.lr}'}", "'megatron.lr' not found"),
    (
        loaders.read_configuration,
        as_yaml(changed(CONFIG, ["defaults"], ["a\0"])),
        "no such configuration file",
    ),
    (loaders.read_configuration, as_yaml(changed(CONFIG, ["defaults"], ["x" * 300])), "too long"),
    (loaders.read_configuration, as_yaml(changed(CONFIG, ["defaults"], ["${x}"])), "not found"),
    (loaders.read_configuration, b"megatron: {lr: " + b"9" * 5000 + b"}", "not valid YAML"),
    (loaders.read_configuration, b"megatron: {lr: !!int x}", "not valid YAML"),
    (loaders.read_configuration, DOUBLING.encode(), "write some of them out"),
    (loaders.read_configuration, b"megatron: {'a\\nb': 1}\nx: '" + b"[" * 9 + b"'", "x: no such key"),
    (loaders.read_ablation, as_yaml(changed(ABLATION, ["contrast"], ["x"])), "contrast"),
    (loaders.read_ablation, as_yaml(changed(ABLATION, ["seeds"], [[3]])), "seeds"),
    (
        loaders.read_ablation,
        as_yaml(changed(ABLATION, ["grid"], {f"megatron.x{i}": list(range(9)) for i in range(9)})),
        "cells",
    ),
    (loaders.read_cluster, b"gpu: 5", "gpu: 5 must be text"),
    (loaders.read_cluster, b"gpu: H100\nnodes: 1.0e+90", "nodes"),
    (loaders.read_cluster, b"gpu: H100\nmfu: 500", "mfu"),
    (loaders.read_cluster, b"nodes: 1\nnodes: 2", "there twice"),
    (loaders.read_cluster, as_yaml(changed(CLUSTER, ["cores"], "x")), "cores"),
    (loaders.read_cluster, as_yaml(changed(CLUSTER, ["links", 0, "ranks"], "x")), "ranks"),
    (loaders.read_cluster, as_yaml(changed(CLUSTER, ["links", 0, "scope"], [])), "none of bench links"),
    (loaders.read_cluster, as_yaml(changed(CLUSTER, ["links", 0, "seconds"], "x")), "seconds"),
    (
        loaders.read_results,
        loaders._csv(loaders._results()).replace(b",20,", b"," + b"9" * 4000 + b","),
        "steps",
    ),
    (loaders.read_data_set, b"m" + as_json(changed(loaders._MANIFEST, ["files"], [])), "damaged"),
    (loaders.read_data_set, b"m" + as_json(changed(loaders._MANIFEST, ["files"], {"/../x\0": 1})), "damaged"),
    (loaders.read_plan, as_json(changed(loaders._PLAN, ["methods"], [1])), "methods"),
    (loaders.read_plan, as_json(changed(loaders._PLAN, ["curves", "step_seconds"], {})), "curves"),
    (loaders.read_plan, b"[" * 100_000, "cannot be read"),
]
RUNS = [
    (0, as_json(changed(loaders._SUMMARY, ["step_seconds"], 5)), "step_seconds"),
    (0, as_json(changed(loaders._SUMMARY, ["gradient_wire"], None)), "gradient_wire"),
    (0, as_json(changed(loaders._SUMMARY, ["versions"], [])), "versions"),
    (0, as_json(changed(loaders._SUMMARY, ["steps"], "x")), "steps"),
    (0, as_json(changed(loaders._SUMMARY, ["method"], "\ud800")), "summary.json"),
    (0, as_json(changed(loaders._SUMMARY, ["train_loss"], 10**400)), "summary.json"),
    (1, as_json(changed(loaders._record(5), ["weight_bits_by_bucket"], [1])).replace(b"\n", b""), "line 1"),
    (1, b"[" * 100_000, "line 1"),
    (2, b"a: " + b"[" * 50_000, "config.yaml"),
    (2, BOMBS[0].encode(), "config.yaml"),
]
CASES += [(loaders.read_run, loaders._NAMES[file] + b"\n" + data, words) for file, data, words in RUNS]


@pytest.mark.parametrize(("read", "data", "words"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_file_that_ended_otherwise(read: loaders.Read, data: bytes, words: str, tmp_path: Path) -> None:
    with bounded(), pytest.raises(UserError, match=words) as found:
        read(tmp_path, data)
    assert len(str(found.value).splitlines()) == 1


def test_defaults_that_include_one_another_twice_each_time(tmp_path: Path) -> None:
    """Two to the power of 40 files, of 40 small ones."""
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"defaults: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "40.yaml").write_text("{}\n")
    with bounded(), pytest.raises(UserError, match="more than 100 files"):
        loaders.configuration.load(tmp_path / "0.yaml")


def test_a_failure_without_a_time_is_shown(tmp_path: Path) -> None:
    """A rank's record is what a killed process left."""
    record = {"error": "\n", "time": [1]}
    loaders.read_run(tmp_path, loaders._NAMES[3] + b"\n" + json.dumps(record).encode())
