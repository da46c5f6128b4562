"""The Kubernetes manifests against Kubeflow's own models of their schema, and against the recipe they run."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_patch.workflows.cli import build_parser
from megatron_patch.workflows.run import configuration
from megatron_patch.workflows.run.configuration import shipped

FOLDER = shipped("pretrain_scripts/kubernetes")
Manifest = dict[str, Any]


def documents(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def through_trainer_models(manifest: Manifest) -> Manifest:
    """What Kubeflow Trainer's typed models keep of a manifest; they raise where a type is wrong."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = getattr(models, f"TrainerV1alpha1{manifest['kind']}")
    return json.loads(model.from_dict(manifest).to_json())


def through_training_models(manifest: Manifest) -> Manifest:
    """What the training operator's typed models keep of a manifest; they raise where a value is missing."""
    pytest.importorskip("kubeflow.training")
    from kubeflow.training import models as training
    from kubernetes.client import ApiClient, models

    for name in vars(training):  # the client looks models up by name, in its own module
        if name.startswith("KubeflowOrgV1"):
            setattr(models, name, getattr(training, name))
    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(manifest))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


MANIFESTS: list[tuple[str, int, Callable[[Manifest], Manifest]]] = [
    ("pytorchjob.yaml", 0, through_training_models),
    ("trainjob.yaml", 0, through_trainer_models),
    ("trainjob.yaml", 1, through_trainer_models),
]


@pytest.mark.parametrize(("name", "number", "through"), MANIFESTS)
def test_the_schema_knows_every_field(
    name: str, number: int, through: Callable[[Manifest], Manifest]
) -> None:
    """A field that the models do not know does not come back, and one of a wrong type is refused."""
    manifest = documents(name)[number]
    assert through(copy.deepcopy(manifest)) == manifest


def test_a_misspelt_field_would_be_noticed() -> None:
    for name, number, through in MANIFESTS:
        text = json.dumps(documents(name)[number])
        broken = json.loads(text.replace('"volumeMounts"', '"mounts"').replace('"runtimeRef"', '"runtime"'))
        with contextlib.suppress(ValueError, TypeError):  # a required field is gone
            assert through(copy.deepcopy(broken)) != broken


def scripts_in(node: Any) -> list[str]:
    """Every `bash -c` script of a manifest."""
    if isinstance(node, dict) and node.get("command") == ["bash", "-c"]:
        return list(node["args"])
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [script for child in children for script in scripts_in(child)]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_the_command_is_one_of_ours_and_the_sizes_are_the_recipes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = documents(name)
    (script,) = set(scripts_in(manifests))  # all nodes run the same
    line = re.search(r"exec (megatron-loco .*)", script.replace("\\\n", " "))
    assert line is not None
    words = shlex.split(line[1])
    args, overrides = build_parser(words[1]).parse_known_args(words[1:])
    assert script.count("\n") <= 2, "no decision of its own in each pod"
    assert args.resume_or_start
    if name == "pytorchjob.yaml":
        replicas = manifests[0]["spec"]["pytorchReplicaSpecs"]
        nodes = sum(spec["replicas"] for spec in replicas.values())
        pod = replicas["Master"]["template"]["spec"]
        container = pod["containers"][0]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        ranks = int(manifests[0]["spec"]["nprocPerNode"])
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        monkeypatch.setenv("NNODES", environment["NNODES"])
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("PET_NPROC_PER_NODE", str(ranks))
        monkeypatch.setenv("MASTER_ADDR", "llama2-7b-master-0")
        assert container["name"] == "pytorch"
    else:
        runtime, job = manifests
        trainer = job["spec"]["trainer"]
        nodes, ranks = trainer["numNodes"], trainer["numProcPerNode"]
        gpus = int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert runtime["spec"]["mlPolicy"]["numNodes"] == nodes
        pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        container = pod["containers"][0]
        for variable, value in (("NNODES", nodes), ("NPROC_PER_NODE", ranks), ("NODE_RANK", 1)):
            monkeypatch.setenv(f"PET_{variable}", str(value))
        monkeypatch.setenv("PET_MASTER_ADDR", "llama2-7b-node-0-0.llama2-7b")
        assert container["name"] == "node"
    alone = configuration.load(shipped(args.config))
    assert (nodes, ranks, gpus) == (alone.launch.nnodes, alone.launch.nproc_per_node, ranks)
    launch = configuration.load(
        shipped(args.config),
        [*args.overrides, *overrides],
        and_files=[shipped(file) for file in args.and_files],
    ).launch
    assert (launch.nnodes, launch.nproc_per_node, launch.node_rank) == (nodes, ranks, 1)
    assert str(launch.rdzv_endpoint).startswith("llama2-7b-")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["shm"] == "/dev/shm"
    assert Path(args.out).is_relative_to(mounts["runs"])
