"""The loaders of files that other users' runs have written, each with valid files and what must hold.

A loader reads a file into something, or raises UserError in one line. What it has read is written down
again, by code of its own here, and read to the same.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from megatron_patch.workflows.ablation import curves, definition, records
from megatron_patch.workflows.data import files as data_files
from megatron_patch.workflows.plan import cluster_file
from megatron_patch.workflows.report import figures, page, planned, runs
from megatron_patch.workflows.run import configuration

from .mutations import as_json, as_yaml, changed_bytes, changed_tree

ROOT = Path(__file__).resolve().parents[2]
Read = Callable[[Path, bytes], object]


@dataclass(frozen=True)
class Loader:
    """One way for a file into this package."""

    name: str
    inputs: st.SearchStrategy[bytes]
    read: Read
    """Writes the bytes below a folder, and reads them; raises UserError, or AssertionError where what it has
    read is not what is there."""


def same(one: object, other: object) -> None:
    """Equal, NaN to NaN."""
    assert repr(one) == repr(other)


def _inputs(valid: list[bytes], trees: list[Any], dump: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(changed_bytes(valid), changed_tree(trees).map(dump))


# --- configurations ---------------------------------------------------------------------------------------

_CONFIGS: list[dict[str, Any]] = [
    {
        "defaults": ["other.yaml"],
        "megatron": {"num_layers": 2, "lr": 1e-3, "bf16": True, "optimizer": "adam", "train_iters": None},
        "compression": {"method": "loco", "bits": 4, "error_beta": 0.5, "block_size": 64, "attach": True},
        "launch": {"device": "cpu", "nproc_per_node": 4, "rdzv_endpoint": "a1:29500", "max_restarts": 1},
        "data": {"path": "data/x", "source": "stdlib", "tokenizer": "bpe:300"},
    },
    {
        "megatron": {
            "lr": "${oc.decode:${oc.env:NOT_THERE,1e-3}}",
            "min_lr": "${megatron.lr}",
            "x": [1, "a"],
        },
        "compression": {"method": "onebit_adam", "warmup_steps": 10},
        "launch": {"nnodes": 2, "node_rank": "${oc.decode:${oc.env:NOT_THERE,1}}"},
    },
]


def read_configuration(folder: Path, data: bytes) -> object:
    """A recipe, and the resolved configuration of another user's run."""
    path = folder / "config.yaml"
    path.write_bytes(data)
    (folder / "other.yaml").write_text("defaults: [third.yaml]\nmegatron: {seed: 1, lr: 2}\n")
    (folder / "third.yaml").write_text("compression: {weight_gather: exact}\n")
    found = configuration.load(path)
    (folder / "again.yaml").write_text(found.as_yaml(), encoding="utf-8")
    same(configuration.load(folder / "again.yaml"), found)
    return found


# --- ablations' definitions ---------------------------------------------------------------------------------

_ABLATIONS: list[dict[str, Any]] = [
    {
        "defaults": ["common.yaml"],
        "base": "configs/models/llama_tiny.yaml",
        "seeds": [3, 1],
        "overrides": {"megatron.train_iters": 20},
        "baseline": {"compression.method": "none"},
        "grid": {"compression.method": ["naive", "loco"], "compression.bits": [4, 2]},
        "cells": [{"compression.method": "loco", "compression.error_beta": 0.5}],
        "contrast": "compression.method",
    }
]


def read_ablation(folder: Path, data: bytes) -> object:
    """A definition of an ablation; `defaults` that include one another too."""
    path = folder / "trial.yaml"
    path.write_bytes(data)
    (folder / "common.yaml").write_text("seeds: [1]\n")
    (folder / "x").write_text("defaults: [trial.yaml]\n")  # what a mutation likes to name
    found = definition.read(path)
    content = {
        "base": str(found.base),
        "seeds": list(found.seeds),
        "baseline": found.baseline.settings,
        "cells": [cell.settings for cell in found.cells[1:]],
        "contrast": found.contrast,
    }
    for mapping in (content["baseline"], *content["cells"]):
        for key, value in mapping.items():
            if isinstance(value, str):  # it was resolved
                mapping[key] = value.replace("${", "\\${")
    again = folder / path.name
    again.write_bytes(as_yaml(content))
    same(definition.read(again).cells, found.cells)
    return found


# --- clusters, links ----------------------------------------------------------------------------------------


def _curve(name: str, scope: str, ranks: int) -> list[dict[str, Any]]:
    return [
        {"collective": name, "scope": scope, "ranks": ranks, "bytes": 4**n * 1024, "seconds": 1e-5 * 2**n}
        for n in range(3)
    ]


_CLUSTERS: list[dict[str, Any]] = [
    {"nodes": 2, "gpus_per_node": 8, "gpu": "H100", "mfu": 0.4, "inter_gbit": 100, "compress_rate": "280e9"},
    {
        "nodes": 2,
        "gpus_per_node": 2,
        "backend": "gloo",
        "device": "cpu",
        "cores": 2,
        "links": [*_curve("all_to_all", "between", 2), *_curve("all_gather", "inside", 2)],
    },
]


def read_cluster(folder: Path, data: bytes) -> object:
    """`plan --cluster`, by hand and with the links that `bench links` measured."""
    path = folder / "cluster.yaml"
    path.write_bytes(data)
    found = cluster_file.read(path)
    (folder / "again.yaml").write_bytes(as_yaml(found))
    same(cluster_file.read(folder / "again.yaml"), found)
    cluster = cluster_file.build(found, 2, 8, path.name)
    assert cluster.between.bandwidth > 0
    assert cluster.inside.bandwidth > 0
    assert cluster.processor.share > 0
    return found


# --- an ablation's results ----------------------------------------------------------------------------------

_COLUMNS = ["cell", "seed", "state", records.CONFIGURATION, *records.NUMBERS, "device", "versions"]
_RESULTS = [
    [
        "method=none",
        "1",
        "done",
        "0123456789abcdef",
        "2.5",
        "2.75",
        "2.25",
        "20",
        "4.125",
        "1e6",
        "2e6",
        "300",
        "",
        "4",
    ],
    ["method=loco", "1", "done", "f" * 16, "nan", "", "", "20", "4.125", "1e6", "2e6", "300", "16.0", "4"],
    ["method=loco", "2", "failed", "e" * 16, *[""] * 10],
]


def _csv(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode(errors="replace")


def _csv_of(tree: Any) -> bytes:
    """Any tree as rows of cells."""
    rows = tree if isinstance(tree, list) else [tree]
    return _csv([[str(cell) for cell in row] if isinstance(row, list) else [str(row)] for row in rows])


def _results() -> list[list[str]]:
    numbers = list(records.NUMBERS)
    rows = []
    for row in _RESULTS:
        head, values = row[:4], dict(zip(numbers, row[4:], strict=True))
        if row[2] == "done" and not values["weight_bits_per_element"]:
            values["weight_bits_per_element"] = "16.0"
        rows.append([*head, *values.values(), "cpu", json.dumps({"torch": "2.15.0"})])
    return [_COLUMNS, *rows]


def read_results(folder: Path, data: bytes) -> object:
    """`ablate --results`."""
    path = folder / "results.csv"
    path.write_bytes(data)
    found = records.read(path)
    rows = []
    for digest, summary in found.items():
        values = []
        for place in records.NUMBERS.values():
            value: Any = summary
            for key in place:
                value = value[key]
            values.append("" if value is None else repr(value))
        rows.append(
            ["cell", "1", "done", digest, *values, summary["device"], json.dumps(summary["versions"])]
        )
    (folder / "again.csv").write_bytes(_csv([_COLUMNS, *rows]))
    same(records.read(folder / "again.csv"), found)
    return found


_CURVES = [
    list(curves.COLUMNS),
    ["method=none", "1", "5", "2.5", "16.000", "16.000", "0123456789abcdef"],
    ["method=none", "1", "10", "nan", "16.000", "3.125", "0123456789abcdef"],
    ["method=loco", "2", "5", "", "4.125", "2.000", "f" * 16],
]


def read_curves(folder: Path, data: bytes) -> object:
    """`ablate --results` reads the curves beside the file."""
    path = folder / "results_curves.csv"
    path.write_bytes(data)
    found = curves.read(path)
    for points in found.values():
        for point in points:
            assert isinstance(point.step, int)
            assert math.isfinite(point.weight_bits)
    return found


# --- runs that `report` reads -------------------------------------------------------------------------------


def _record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5 / step,
        "step_seconds": 0.25,
        "tokens_per_second": 16000.0,
        "gradient_wire_bytes": 7e5,
        "gradient_wire_bits_per_element": 4.125,
        "weight_wire_bytes": 2.5e5,
        "weight_wire_bits_per_element": 5.0,
        "weight_unchanged_share": 0.5,
        "weight_bits_by_bucket": {"bucket 0": 3.0, "bucket 1": 4.0},
        "raw_weight_gathers": {"forced": 1},
        "compression_snr_db": 17.0,
        "compensation_norm_ratio": None,
    }


_SUMMARY: dict[str, Any] = {
    "method": "loco",
    "bits": 4,
    "world_size": 4,
    "steps": 20,
    "train_loss": 0.25,
    "valid_loss": 2.0,
    "step_seconds": {"median": 0.26},
    "gradient_wire": {"bytes_per_step": 7e5, "bits_per_element": 4.125},
    "weight_wire": {"bytes_per_step": 2.5e5, "bits_per_element": 5.0},
    "raw_weight_gathers": {"forced": 2},
    "compensation_bytes": 483224,
    "device": "cpu (x86_64)",
    "versions": {"torch": "2.15.0"},
}
_RUN_CONFIG: dict[str, Any] = {
    "megatron": {"seed": 1, "train_iters": 20, "lr": 0.002},
    "compression": {"attach": True, "method": "loco", "bits": 4},
    "launch": {"device": "cpu", "nproc_per_node": 4, "nnodes": 1},
}
_METRICS = b"".join(json.dumps(_record(step)).encode() + b"\n" for step in (5, 10, 15, 20))
_NAMES = (b"summary.json", b"metrics.jsonl", b"config.yaml", b"failures/rank-00000.json")


def _lines(tree: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in tree)


def _run_inputs() -> st.SearchStrategy[bytes]:
    """A file's name, a line end, and what is in it."""
    failure = {"error": "ValueError: x", "time": 1.5}
    return st.one_of(
        _inputs([as_json(_SUMMARY)], [_SUMMARY], as_json).map(lambda data: _NAMES[0] + b"\n" + data),
        st.one_of(
            changed_bytes([_METRICS]), changed_tree([[_record(5), _record(10), _record(15)]]).map(_jsonl)
        ).map(lambda data: _NAMES[1] + b"\n" + data),
        _inputs([as_yaml(_RUN_CONFIG)], [_RUN_CONFIG], as_yaml).map(lambda data: _NAMES[2] + b"\n" + data),
        _inputs([as_json(failure)], [failure], as_json).map(lambda data: _NAMES[3] + b"\n" + data),
    )


def _jsonl(tree: Any) -> bytes:
    return _lines(tree if isinstance(tree, list) else [tree])


def _no_picture(*_: Any) -> tuple[str, str]:
    return "<svg></svg>", ""


_draw = figures._picture
_pages = 0


def read_run(folder: Path, data: bytes) -> object:
    """`report`: two runs of one configuration, one of them as it is drawn; pictures on every 200th."""
    global _pages
    name, _, content = data.partition(b"\n")
    for run in ("one", "two"):
        place = folder / run
        (place / "failures").mkdir(parents=True, exist_ok=True)
        (place / "command.txt").write_text("torchrun")
        (place / "summary.json").write_bytes(as_json(_SUMMARY))
        (place / "metrics.jsonl").write_bytes(_METRICS)
        (place / "config.yaml").write_bytes(as_yaml(_RUN_CONFIG))
    (folder / "one" / "failures/rank-00000.json").unlink(missing_ok=True)
    if name == _NAMES[3]:
        (folder / "one" / "summary.json").unlink()
    (folder / "one" / name.decode()).write_bytes(content)
    found = runs.read_runs([folder])
    first = next(run for run in found if run.path.name == "one")
    if name == _NAMES[0]:
        same(first.summary, json.loads(content.decode(errors="replace") or "{}"))
    if name == _NAMES[1]:
        lines = content.decode(errors="replace").split("\n")
        given = [json.loads(line) for line in lines[: len(first.records) + lines.count("")] if line.strip()]
        same(first.records, given[: len(first.records)])
    _pages += 1
    figures._picture = _draw if _pages % 200 == 0 else _no_picture
    try:
        html = page.render(found)
    finally:
        figures._picture = _draw
    html.encode()
    assert "<script" not in html
    return found


# --- plans that `report --plan` reads -----------------------------------------------------------------------


def _method(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "step_seconds": 1.5,
        "speedup": 1.2,
        "tokens_per_second": 1e5,
        "exposed_seconds": 0.5,
        "node_uplink_bytes": 1e9,
        "memory_bytes": 5e10,
        "fits": True,
    }


_PLAN: dict[str, Any] = {
    "recipe": "llama2_7b",
    "nodes": 2,
    "gpus_per_node": 8,
    "microbatches": 8,
    "methods": [_method("stock"), _method("naive4")],
    "recommended": "naive4",
    "reason": "it is faster",
    "curves": {"inter_gbit": [1, 10, 100], "step_seconds": {"stock": [3, 2, 1], "naive4": [2, 1.5, 1]}},
}


def read_plan(folder: Path, data: bytes) -> object:
    """`report --plan`."""
    path = folder / "plan.json"
    path.write_bytes(data)
    found = planned.read(path)
    same(found, json.loads(data.decode()))
    drawn = planned._picture
    planned._picture = lambda *_: "<svg></svg>"  # type: ignore[assignment]
    try:
        planned.section(found)
    finally:
        planned._picture = drawn
    return found


# --- data sets ----------------------------------------------------------------------------------------------

_LENGTHS = [5, 3, 8]


def _index() -> bytes:
    offsets = [2 * sum(_LENGTHS[:n]) for n in range(len(_LENGTHS))]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(_LENGTHS), len(_LENGTHS) + 1)
    return (
        head + struct.pack("<3i", *_LENGTHS) + struct.pack("<3q", *offsets) + struct.pack("<4q", 0, 1, 2, 3)
    )


_MANIFEST: dict[str, Any] = {
    "format": data_files.FORMAT,
    "tokenizer": "bytes",
    "vocab_size": 257,
    "eod": 256,
    "documents": 3,
    "tokens": 16,
    "source": "stdlib",
    "source_bytes": 100,
    "fingerprint": "abc",
    "files": {".bin": 32, ".idx": len(_index())},
    "megatron_flags": {"tokenizer_type": "NullTokenizer", "vocab_size": 257},
}


def read_data_set(folder: Path, data: bytes) -> object:
    """The index and the manifest of a data set: the first byte says which of them was changed."""
    prefix = folder / "set"
    (folder / "set.bin").write_bytes(bytes(32))
    (folder / "set.idx").write_bytes(data[1:] if data[:1] == b"i" else _index())
    (folder / "set.json").write_bytes(data[1:] if data[:1] == b"m" else as_json(_MANIFEST))
    data_files.check_dataset(prefix)
    found = data_files.load_manifest(prefix)
    if found is not None:
        content = {"format": data_files.FORMAT} | dataclasses.asdict(found)
        (folder / "set.json").write_bytes(as_json(content))
        same(data_files.load_manifest(prefix), found)
        assert all((folder / f"set{suffix}").stat().st_size == size for suffix, size in found.files.items())
    return found


def _data_inputs() -> st.SearchStrategy[bytes]:
    return st.one_of(
        changed_bytes([_index()]).map(lambda data: b"i" + data),
        _inputs([as_json(_MANIFEST)], [_MANIFEST], as_json).map(lambda data: b"m" + data),
    )


LOADERS = [
    Loader(
        "configuration", _inputs([as_yaml(one) for one in _CONFIGS], _CONFIGS, as_yaml), read_configuration
    ),
    Loader("ablation", _inputs([as_yaml(one) for one in _ABLATIONS], _ABLATIONS, as_yaml), read_ablation),
    Loader(
        "cluster and links", _inputs([as_yaml(one) for one in _CLUSTERS], _CLUSTERS, as_yaml), read_cluster
    ),
    Loader("results.csv", _inputs([_csv(_results())], [_results()], _csv_of), read_results),
    Loader("results_curves.csv", _inputs([_csv(_CURVES)], [_CURVES], _csv_of), read_curves),
    Loader("runs", _run_inputs(), read_run),
    Loader("plan", _inputs([as_json(_PLAN)], [_PLAN], as_json), read_plan),
    Loader("data set", _data_inputs(), read_data_set),
]
