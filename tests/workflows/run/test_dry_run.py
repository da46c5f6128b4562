"""`megatron-loco train CONFIG --dry-run`: what it prints, and that it starts, writes and needs nothing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch

from megatron_patch.errors import UserError
from megatron_patch.workflows import data
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import configuration, prepare
from megatron_patch.workflows.run.configuration import shipped
from megatron_patch.workflows.run.job import Job, Launch

SEVEN_B = str(shipped("configs/models/llama2_7b.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "top.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_gpu_recipe_where_there_is_no_gpu_no_data_and_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line, and a configuration that loads to itself."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    out = tmp_path / "run"
    asked = ["megatron.lr=1e-4", "megatron.save=saves", "megatron.save_interval=5"]
    assert main(["train", SEVEN_B, *asked, "--dry-run", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    comments, command, rest = printed.partition("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 ")
    assert "16 ranks on 2 nodes" in comments
    assert "data/llama2_text_document.bin and .idx are needed, and not there; Megatron's tools/" in comments
    assert "launch.rdzv_endpoint is not set" in comments
    words = shlex.split((command + rest).splitlines()[0])
    assert words[1:7] == [
        *("torchrun", "--nproc-per-node=8", "--nnodes=2", "--node-rank=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500"),
    ]
    for flag, value in {
        **{"--num-layers": "32", "--lr": "0.0001", "--save": "saves", "--load": "saves"},
        **{"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "tokenizers/llama2"},
        "--compression-output": str(out),
    }.items():
        assert words[words.index(flag) + 1] == value
    shown = write(tmp_path, printed.partition("# configuration\n")[2])
    assert configuration.load(shown) == configuration.load(Path(SEVEN_B), asked)
    assert list(tmp_path.iterdir()) == [shown]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["launch.nnodes: 2 nodes", "launch.rdzv_endpoint is not set", "set MASTER_ADDR", "--dry-run"]),
        (["--with", "configs/clusters/two_nodes.yaml"], ["localhost is another", "set MASTER_ADDR"]),
        (["launch.nnodes=1", "launch.device=cuda"], ["no GPU", "--dry-run"]),
        (["launch.device=cpu", "launch.rdzv_endpoint=a:1"], ["GLOO_SOCKET_IFNAME", "eth0"]),
        (
            ["megatron.data_path=/nowhere", "data.path=null", "data.source=null", "--dry-run"],
            ["/nowhere.bin"],
        ),
        (["megatron.save=msc://bucket", "--dry-run"], ["megatron.save: 'msc://bucket'", "object store"]),
    ],
)
def test_what_is_refused_in_one_line(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", SEVEN_B, *arguments, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_that_nodes_have_no_place_to_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nodes = ("--with", "configs/clusters/two_nodes.yaml", "--dry-run", "--out", str(tmp_path / "run"))
    for address, refused in ((None, True), ("node01", False)):
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        if address:
            monkeypatch.setenv("MASTER_ADDR", address)
        assert main(["train", SEVEN_B, *with_nodes]) == 0
        assert ("# a run will be refused: launch.nnodes: 2" in capsys.readouterr().out) is refused


def test_a_split_that_leaves_a_part_no_document_is_refused(tmp_path: Path) -> None:
    """Megatron would look for samples in it until it is killed."""
    data.prepare("installed:numpy/fft/*.py", tmp_path / "set")
    run = configuration.load(write(tmp_path, f"data: {{path: {tmp_path}/set}}\n"))
    named = configuration.load(write(tmp_path, f"megatron: {{data_path: [{tmp_path}/set]}}\n"))
    for one in (run, named):
        prepare._check_split(one, "50,50,0")
        prepare._check_split(one, "100,0,0")
        with pytest.raises(
            UserError, match=r"megatron\.split: '95,5,0' .* documents of .*/set for validation"
        ):
            prepare._check_split(one, "95,5,0")


@pytest.mark.parametrize(
    ("section", "line", "flags"),
    [
        ("{path: a}", "a.bin and .idx are needed, and not there; Megatron's tools/preprocess_data.py", None),
        ("{path: a, source: stdlib}", "a would be prepared from stdlib, tokenizer bytes", "NullTokenizer"),
        ("{path: a, source: stdlib, tokenizer: 'bpe:8000'}", "from stdlib", "HuggingFaceTokenizer"),
        ("{}", "made up by Megatron", None),
    ],
)
def test_what_is_said_of_the_data(section: str, line: str, flags: str | None, tmp_path: Path) -> None:
    run = configuration.load(write(tmp_path, f"data: {section}\n"))
    assert line in prepare.data_line(run)
    assert prepare.planned_data(run).get("tokenizer_type") == flags


def test_a_tokenizer_that_is_not_there_is_refused_before_a_run(tmp_path: Path) -> None:
    run = configuration.load(write(tmp_path, "data: {path: a, source: stdlib, tokenizer: /nowhere}\n"))
    with pytest.raises(UserError, match="tokenizer: '/nowhere'; allowed: bytes"):
        prepare.planned_data(run)


def test_data_that_is_there_and_data_named_by_megatrons_own_flag(tmp_path: Path) -> None:
    data.prepare("installed:numpy/version.py", tmp_path / "set")
    run = configuration.load(write(tmp_path, f"data: {{path: {tmp_path}/set, tokenizer: 'bpe:900'}}\n"))
    assert prepare.data_line(run) == f"data: {tmp_path}/set.bin and .idx are there"
    assert prepare.planned_data(run)["tokenizer_type"] == "NullTokenizer", "the manifest knows"
    assert prepare.prepared_data(run) == prepare.planned_data(run)

    run = configuration.load(
        write(tmp_path, f"megatron: {{data_path: [0.5, {tmp_path}/set, 0.5, {tmp_path}/no]}}\n")
    )
    assert prepare.data_line(run) == f"data: needed, and not there: {tmp_path}/no (.bin and .idx)"


def test_validation_and_test_data_of_their_own_have_the_tokenizer_of_the_training_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"train": "numpy/_core/*.py", "valid": "numpy/fft/*.py", "test": "numpy/ma/*.py"}
    parts = ", ".join(
        f"{'' if name == 'train' else f'{name}_'}path: {tmp_path}/{name}-set, "
        f"{'' if name == 'train' else f'{name}_'}source: 'installed:{source}'"
        for name, source in sources.items()
    )
    run = configuration.load(write(tmp_path, f"data: {{{parts}, tokenizer: 'bpe:320'}}\n"))
    planned, lines = prepare.planned_data(run), prepare.data_line(run).splitlines()
    assert [line.partition("would be prepared")[0] for line in lines] == [
        f"{start}data: {tmp_path}/{name}-set "
        for start, name in (("", "train"), ("# ", "valid"), ("# ", "test"))
    ]
    assert prepare.prepared_data(run) == planned
    assert {key: value for key, value in planned.items() if key.endswith("data_path")} == {
        f"{part}_data_path": [f"{tmp_path}/{part}-set"] for part in ("train", "valid", "test")
    }
    vocabularies = {(tmp_path / f"{name}-set-tokenizer/tokenizer.json").read_text() for name in sources}
    assert len(vocabularies) == 1
    capsys.readouterr()
    assert prepare.prepared_data(run) == planned
    assert capsys.readouterr() == ("", ""), "and a second time nothing is prepared"


SHIPPED = {
    "single_node_8gpu": ({"NPROC_PER_NODE": "4"}, ["--nproc-per-node=4", "--standalone"]),
    "two_nodes": (
        {"NODE_RANK": "1", "MASTER_ADDR": "gpu01"},
        ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=gpu01:29500"],
    ),
    "torchrun": (
        {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "gpu01", "MASTER_PORT": "7000"},
        ["--nnodes=4", "--node-rank=3", "--rdzv-endpoint=gpu01:7000", "--nproc-per-node=8"],
    ),
    "slurm": (
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "4", "MASTER_ADDR": "gpu01"},
        ["--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--rdzv-endpoint=gpu01:29500"],
    ),
    "kubernetes": (
        {
            **{"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"},
            **{"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400", "MASTER_ADDR": "other"},
        },
        ["--nnodes=2", "--node-rank=1", "--nproc-per-node=8", "--rdzv-endpoint=job-node-0-0.job:29400"],
    ),
}


@pytest.mark.parametrize("cluster", sorted(path.stem for path in shipped("configs/clusters").glob("*.yaml")))
def test_clusters_take_their_settings_from_the_environment(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composed over a model's recipe by `defaults:`, and by --with, whatever the recipe's own nodes are."""
    variables, words = SHIPPED[cluster]
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM_", "MASTER_", "NNODES"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = shipped(f"configs/clusters/{cluster}.yaml")
    method = shipped("configs/methods/loco_two_hop.yaml")
    top = write(tmp_path, f"defaults: [{SEVEN_B}, {method}, {file}]\n")
    composed = configuration.load(top)
    assert composed == configuration.load(Path(SEVEN_B), and_files=[method, file])

    assert composed.compression.topology == "two_hop"
    command = Job(composed.launch, Path("s.py"), [], tmp_path).torchrun()
    assert set(words) <= set(command)


def test_a_number_that_is_none_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "two")
    with pytest.raises(UserError, match=r"launch\.nnodes: 'two' must be a whole number"):
        configuration.load(Path(SEVEN_B), and_files=[shipped("configs/clusters/torchrun.yaml")])


NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
TENSOR, CONTEXT = ["--tensor-model-parallel-size", "2"], ["--context-parallel-size", "4"]


def set_for(flags: list[str], device: str = "cuda") -> str | None:
    job = Job(Launch(device=device), Path("pretrain_gpt.py"), flags, Path("run"))
    return job.variables().get(NAME)


def test_it_is_set_where_megatron_asserts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensor and context parallelism, on generations before Blackwell; what the user has set stays."""
    monkeypatch.delenv(NAME, raising=False)
    for flags, hopper in (
        ([], None),
        (["--tensor-model-parallel-size", "1", "--context-parallel-size", "1"], None),
        (TENSOR, "1"),
        (CONTEXT, "1"),
        ([*TENSOR, "--use-torch-fsdp2"], None),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert set_for(flags) == hopper
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for generation, wanted in ((9, hopper), (10, None)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=generation: (found, 0))
            assert set_for(flags) == wanted
    monkeypatch.setenv(NAME, "32")
    assert set_for(TENSOR) == "32"
    assert [set_for(flags, "cpu") for flags in (TENSOR, ["--use-torch-fsdp2"], ["--use-megatron-fsdp"])] == [
        *("1", "8", "8")
    ]
