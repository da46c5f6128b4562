"""Reads `plan --cluster FILE`: a YAML mapping of a cluster's numbers, by hand or from `bench links`.

    nodes: 2                 gpus_per_node: 8          gpu: H100            mfu: 0.4
    inter_gbit: 100          intra_gbyte: 450          compress_rate: 280e9
    links: [...]             what `megatron-loco bench links` measured, in place of data sheets

Command-line options replace what the file says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_patch import files
from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.plan import constants
from megatron_patch.workflows.plan.cluster import COLLECTIVES, Cluster, Link, of_gpus, on_cpu

_WHOLE = ("nodes", "gpus_per_node", "cores")
_ABOVE_0 = ("inter_gbit", "intra_gbyte", "mfu", "compress_rate")
_NOTED = ("backend", "device", "links", "gpu")
KEYS = (*_WHOLE, *_ABOVE_0, *_NOTED)
_SCOPES = ("all", "between", "inside")
_MOST, _MOST_WHOLE = 1e18, 1_000_000
DEFAULT_GPU, DEFAULT_INTER_GBIT = "H100", 400.0


def read(path: Path) -> dict[str, Any]:
    """Read the file, check its keys and values, and return its mapping."""
    try:
        content = files.load_yaml(files.read_text(path))
    except OSError as error:
        raise UserError(f"--cluster: {path}: {error.strerror or error}") from error
    except files.Unfit as error:
        raise UserError(f"--cluster: {path}: is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--cluster: {path}: must be a mapping, e.g. nodes: 2")
    for key in content:
        if key not in KEYS:
            allowed = ", ".join(KEYS)
            raise UserError(f"--cluster: {path}: {key}: no such key{nearest(key, KEYS)}; allowed: {allowed}")
    for key in (*_WHOLE, *_ABOVE_0):
        if key in content:
            content[key] = _number(f"--cluster: {path}: {key}", content[key], key in _WHOLE)
    for key in ("gpu", "device", "backend"):
        if key in content and not isinstance(content[key], str):
            raise UserError(f"--cluster: {path}: {key}: {content[key]!r} must be text")
    if "links" in content:
        _check_links(path, content["links"])
    return content


def _number(where: str, value: Any, whole: bool) -> float | int:
    """Convert `value` to a number above 0 (YAML reads 280e9 as text)."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    most = _MOST_WHOLE if whole else 1.0 if where.endswith(": mfu") else _MOST
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 1 / _MOST <= value <= most
    if not fits or (whole and value != int(value)):
        allowed = f"whole number, 1 to {most:,}" if whole else f"number above 0, at most {most:g}"
        raise UserError(f"{where}: {value!r} must be a {allowed}")
    return int(value) if whole else float(value)


def _check_links(path: Path, found: Any) -> None:
    where = f"--cluster: {path}: links"
    wanted = {"collective", "scope", "ranks", "bytes", "seconds"}
    good = isinstance(found, list) and all(isinstance(one, dict) and wanted <= one.keys() for one in found)
    if not good or not found:
        raise UserError(f"{where}: must be what megatron-loco bench links writes; run it again")
    for place, one in enumerate(found):
        if one["collective"] not in COLLECTIVES or one["scope"] not in _SCOPES:
            names = f"{one['collective']!r} over {one['scope']!r} ranks"
            raise UserError(f"{where}[{place}]: {names} is none of bench links' curves; run it again")
        for key in ("ranks", "bytes", "seconds"):
            one[key] = _number(f"{where}[{place}]: {key}", one[key], key == "ranks")


def build(settings: Mapping[str, Any], nodes: int, per_node: int, source: str = "") -> Cluster:
    """Return the cluster of checked settings; `nodes` and `per_node` are the recipe's, used as defaults."""
    device = settings.get("device")
    name = settings.get("gpu") or gpu_of(device)
    gpu = constants.find(name)
    nodes, per_node = settings.get("nodes", nodes), settings.get("gpus_per_node", per_node)
    links = settings.get("links")
    inter = settings.get("inter_gbit")
    cluster = of_gpus(
        gpu,
        nodes,
        per_node,
        DEFAULT_INTER_GBIT if inter is None else inter,
        settings.get("intra_gbyte"),
        settings.get("mfu"),
        settings.get("compress_rate"),
    )
    if device == "cpu" and "gpu" not in settings:
        cluster = on_cpu(cluster, int(settings.get("cores", per_node)))
    return cluster if not links else _measured(cluster, links, settings, source)


def gpu_of(device: Any) -> str:
    """Return the name in constants.GPUS for CUDA's name of a GPU."""
    return constants.named(str(device or "")) or DEFAULT_GPU


def _measured(
    cluster: Cluster, links: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], source: str
) -> Cluster:
    scopes = {one["scope"] for one in links}
    local = settings.get("gpus_per_node", 1)
    measured_nodes = max((one["ranks"] for one in links if one["scope"] == "between"), default=0)
    alone = "between" not in scopes  # There was one rank per node, or one node.
    one_node = alone and max(one["ranks"] for one in links) <= local
    if not one_node:
        scope, together = ("all", 1) if alone else ("between", local)
        ranks = measured_nodes or max(one["ranks"] for one in links)
        between = link_of(links, scope, together, ranks)
        if settings.get("inter_gbit") is not None:
            between = dataclasses.replace(between, bandwidth=cluster.between.bandwidth)
        cluster = dataclasses.replace(cluster, between=between, call_latency=0.0, measured=source)
    elif cluster.nodes > 1 and settings.get("inter_gbit") is None:
        raise UserError(
            "--cluster: its links were measured on one node; give --inter-gbit, or measure on two nodes"
        )
    if one_node or "inside" in scopes:
        inside = link_of(links, "all" if one_node else "inside", 1, local)
        cluster = dataclasses.replace(cluster, inside=inside, call_latency=0.0, measured=source)
    return cluster


def link_of(links: Sequence[Mapping[str, Any]], scope: str, together: int, ranks: int) -> Link:
    """Fit latency and bandwidth to the curves of a scope, in which `together` groups shared the link."""
    fits = {name: fit(points(links, name, scope)) for name in COLLECTIVES if points(links, name, scope)}
    if not fits:
        raise UserError(f"--cluster: links: no curve over {scope} ranks; run megatron-loco bench links again")
    rates = {name: together / unit for name, (_, unit) in fits.items()}
    best = max(rates.values())
    call = fits.get("all_gather", next(iter(fits.values())))[0]
    return Link(best, call / max(1, ranks - 1), {name: rate / best for name, rate in rates.items()})


def points(links: Sequence[Mapping[str, Any]], collective: str, scope: str) -> list[tuple[float, float]]:
    return [
        (float(one["bytes"]), float(one["seconds"]))
        for one in links
        if one["collective"] == collective and one["scope"] == scope
    ]


def fit(curve: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (seconds per call, seconds per byte), not below 0, by least squares of relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    sizes, seconds = np.array(curve).T
    found, _ = nnls(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(curve)))
    return float(found[0]), max(float(found[1]), 1e-15)
