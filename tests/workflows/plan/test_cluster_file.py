"""`--cluster FILE`: what it says is used, and each mistake is one line that names its way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_patch.errors import UserError
from megatron_patch.workflows.plan import cluster_file
from megatron_patch.workflows.plan.cluster import ALL_GATHER, ALL_TO_ALL


def written(folder: Path, content: object) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def curve(name: str, scope: str, ranks: int, call: float, rate: float) -> list[dict[str, object]]:
    sizes = (1e4, 1e5, 1e6, 1e7)
    return [
        {"collective": name, "scope": scope, "ranks": ranks, "bytes": s, "seconds": call + s / rate}
        for s in sizes
    ]


def test_options_and_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    path = written(tmp_path, "nodes: 4\ngpus_per_node: 2\ninter_gbit: 100\ncompress_rate: 280e9\ngpu: a100\n")
    cluster = cluster_file.build(cluster_file.read(path), 1, 1)
    assert (cluster.nodes, cluster.per_node) == (4, 2)
    assert cluster.between.bandwidth == pytest.approx(0.955 * 100e9 / 8)
    assert cluster.processor.compress_work(4).unit == pytest.approx(1 / 280e9)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nodes: [", "is not valid YAML"),
        ("- 1\n", "must be a mapping"),
        ({"node": 2}, "did you mean nodes"),
        ({"nodes": 1.5}, "nodes: 1.5 must be a whole number"),
        ({"inter_gbit": -1}, "inter_gbit: -1 must be a number above 0"),
        ({"inter_gbit": "fast"}, "inter_gbit"),
        ({"links": [{"bytes": 1}]}, "run it again"),
        ({"links": [{**curve("all_to_all", "all", 4, 0.0, 1e9)[0], "seconds": 0}]}, "above 0"),
    ],
)
def test_mistakes(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(UserError, match=words) as found:
        cluster_file.read(written(tmp_path, content))
    assert "\n" not in str(found.value)


def test_a_file_that_is_not_there_and_an_unknown_gpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        cluster_file.read(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"--gpu: 'H10' must be one of .*did you mean H100"):
        cluster_file.build({"gpu": "H10"}, 1, 8)


def test_measured_links_replace_the_data_sheets() -> None:
    links = [
        *curve("all_to_all", "between", 2, 2e-5, 1e9),
        *curve("all_gather", "between", 2, 4e-5, 2e9),
        *curve("all_to_all", "inside", 8, 1e-5, 5e10),
        *curve("all_gather", "inside", 8, 7e-6, 1e11),
        *curve("all_to_all", "all", 16, 1.0, 1.0),
    ]
    settings = {"nodes": 2, "gpus_per_node": 8, "links": links, "device": "NVIDIA A100-SXM4-80GB"}
    cluster = cluster_file.build(settings, 2, 8, "links.yaml")
    assert cluster.measured == "links.yaml"
    # Eight groups shared the node's uplink.
    assert cluster.between.of(ALL_TO_ALL) == pytest.approx(8e9, rel=1e-6)
    assert cluster.between.of(ALL_GATHER) == pytest.approx(16e9, rel=1e-6)
    assert cluster.between.latency == pytest.approx(4e-5, rel=1e-3)
    assert cluster.inside.of(ALL_GATHER) == pytest.approx(1e11, rel=1e-6)
    assert cluster.inside.latency == pytest.approx(1e-6, rel=1e-3)
    assert cluster_file.gpu_of(settings["device"]) == "A100"


def test_links_of_one_node_say_nothing_of_those_between_nodes() -> None:
    settings = {"nodes": 2, "gpus_per_node": 4, "links": curve("all_gather", "all", 4, 1e-5, 1e10)}
    with pytest.raises(UserError, match="--inter-gbit"):
        cluster_file.build(settings, 1, 4)
    cluster = cluster_file.build({**settings, "inter_gbit": 100}, 1, 4)
    assert cluster.inside.of(ALL_GATHER) == pytest.approx(1e10, rel=1e-6)
    assert cluster.between.bandwidth == pytest.approx(0.955 * 12.5e9)


def test_a_fit_is_never_negative() -> None:
    call, unit = cluster_file.fit([(1e3, 1e-3), (1e6, 0.9e-3)])
    assert call > 0
    assert unit > 0
