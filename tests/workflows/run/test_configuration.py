"""Configurations: composition, overrides, and one clear line for everything that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_patch import registry
from megatron_patch.errors import UserError
from megatron_patch.workflows.cli import main
from megatron_patch.workflows.run import configuration, run_folder
from megatron_patch.workflows.run.configuration import shipped

LLAMA = shipped("configs/models/llama_tiny.yaml")
NOWHERE = "megatron.data_path=[/nowhere]"
RECIPES = sorted(path for path in shipped("configs").glob("*/*.yaml") if path.parent.name != "ablations")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_come_first_and_overrides_last(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "megatron: {lr: 1.0, num_layers: 2}\ncompression: {bits: 8}\n")
    top = write(tmp_path, "top.yaml", "defaults: [base.yaml]\nmegatron: {lr: 2.0}\n")
    run = configuration.load(top, ["megatron.num_layers=3", "compression.block_size=shard"])
    assert run.megatron == {"lr": 2.0, "num_layers": 3}
    assert (run.compression.bits, run.compression.block_size) == (8, "shard")


LOCO = "compression: {method: loco, bits: 4, codec: uniform, error_beta: 0.5, seed: 3}\n"


def test_a_file_s_bits_are_those_of_its_method(tmp_path: Path) -> None:
    """Choosing onebit_adam over it, by an override or a file, takes onebit_adam's own."""
    recipe = write(tmp_path, "recipe.yaml", LOCO)
    method = write(tmp_path, "method.yaml", "compression: {method: onebit_adam}\n")
    child = write(tmp_path, "child.yaml", "defaults: [recipe.yaml, method.yaml]\n")
    resolved = write(tmp_path, "resolved.yaml", configuration.load(recipe).as_yaml())
    for run in (
        configuration.load(recipe, ["compression.method=onebit_adam"]),
        configuration.load(resolved, ["compression.method=onebit_adam"]),
        configuration.load(recipe, and_files=[method]),
        configuration.load(child),
    ):
        found = run.compression
        assert (found.bits, found.code, found.reset_interval) == (1, "sign", 0)
        assert found.seed == 3
    for stated in (["compression.bits=4"], ["compression.start_step=2"]):
        for order in (1, -1):
            with pytest.raises(UserError, match="with method onebit_adam"):
                configuration.load(recipe, ["compression.method=onebit_adam", *stated][::order])
    assert configuration.load(recipe, ["compression.method=naive"]).compression.bits == 4
    with pytest.raises(UserError, match="bits: 4 is not allowed; it must be 1 with method onebit_adam"):
        configuration.load(write(tmp_path, "b.yaml", "compression: {method: onebit_adam, bits: 4}\n"))


def test_a_recipe_s_exact_gather_gives_way_where_weights_are_sharded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the user states stays, and is refused by Megatron's flags."""
    own, whole = "compression.weight_gather=exact", "megatron.data_parallel_sharding_strategy=optim_grads"
    torchs, megatrons = "megatron.use_torch_fsdp2=true", "megatron.use_megatron_fsdp=true"
    for asked, exact in (
        ([], True),
        *(([torchs], False), ([torchs, own], True)),
        *(([megatrons], False), ([megatrons, whole], True)),
    ):
        assert configuration.load(LLAMA, asked).compression.codes_weights is exact
        assert capsys.readouterr().err.count("stock in place of the recipe's exact") == (not exact)


def test_overrides_for_several_methods_leave_out_what_one_does_not_use(tmp_path: Path) -> None:
    """So does a method that is chosen over a recipe of onebit_adam."""
    asked = ["compression.warmup_steps=5", "compression.error_dtype=fp32"]
    for method, steps in (("none", None), ("loco", None), ("onebit_adam", 5)):
        recipe = configuration.method_recipe(method)
        found = configuration.load(LLAMA, asked, and_files=[recipe], for_several=True).compression
        assert (found.method, found.warmup_steps) == (method, steps)
    onebit = write(tmp_path, "o.yaml", "compression: {method: onebit_adam, warmup_steps: 5}\n")
    assert configuration.load(onebit, ["compression.method=loco"]).compression.warmup_steps is None
    with pytest.raises(UserError, match="warmup_steps: 5 is not allowed; it must be left out with method"):
        configuration.load(write(tmp_path, "l.yaml", "compression: {method: loco, warmup_steps: 5}\n"))


def test_the_resolved_configuration_loads_to_itself(tmp_path: Path) -> None:
    run = configuration.load(LLAMA, ["compression.method=naive"])
    again = configuration.load(write(tmp_path, "config.yaml", run.as_yaml()))
    assert again == run


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads(recipe: Path) -> None:
    assert configuration.load(recipe).compression.bits in (1, 2, 4, 8)


def test_files_that_a_configuration_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written with absolute paths, and imported for a run alone: what is only read is not obeyed."""
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    source = shipped("pretrain_scripts/own_codec.py").read_text(encoding="utf-8")
    write(tmp_path, "my_fp8.py", source.replace('"fp8"', '"my_fp8"'))
    top = write(tmp_path, "top.yaml", "compression: {codec: my_fp8}\nlaunch: {imports: [my_fp8.py]}\n")
    with pytest.raises(UserError, match=r"codec: 'my_fp8'.*your own .--import FILE\.py."):
        configuration.load(top)
    run = configuration.load(top, importing=True)
    assert run.compression.bits == 8
    assert run.launch.imports == (str(tmp_path / "my_fp8.py"),)
    written = write(tmp_path, "run/config.yaml", run.as_yaml())
    assert configuration.load(written) == run

    write(tmp_path, "theirs.py", "import pathlib\npathlib.Path('executed').touch()\n")
    theirs = run.as_yaml().replace("my_fp8.py", "theirs.py")
    written.write_text(theirs, encoding="utf-8")
    (tmp_path / "run/failed.txt").write_text("it failed")
    assert run_folder.look(tmp_path / "run", run) is run_folder.State.CHANGED
    assert not (tmp_path / "executed").exists()
    written.write_text(theirs.replace("codec: my_fp8", "codec: theirs"), encoding="utf-8")
    assert run_folder.look(tmp_path / "run", run) is run_folder.State.CHANGED
    configuration.load(top, ["launch.imports=[theirs.py]"], importing=True)
    assert (tmp_path / "executed").exists()


BAD = {
    "megatorn: {}": "megatorn.*did you mean megatron",
    "compression: {bit: 4}": r"compression\.bit.*did you mean bits",
    "compression: {bits: 4.0}": r"compression\.bits: 4\.0 .*8, 4, 2, 1",
    "compression: {attach: maybe}": r"compression\.attach: 'maybe' .*true or false",
    "compression: 4": "compression: 4 .*mapping",
    "launch: {device: tpu}": r"launch\.device: 'tpu' .*cuda or cpu",
    "launch: {nproc_per_node: 0}": r"launch\.nproc_per_node: 0 .*1 or more",
    "launch: {imports: a.py}": r"launch\.imports: 'a\.py' must be a list",
    "launch: {imports: [/nowhere/a.py]}": r"import: /nowhere/a\.py: no such Python file",
    "launch: {max_restarts: 1.5}": r"launch\.max_restarts: 1\.5 .*whole number, 0 or more",
    "launch: {nnodes: 2, node_rank: 2, rdzv_endpoint: 'a:1'}": r"node_rank: 2 .*below launch\.nnodes, 2",
    "launch: {nnodes: 2, rdzv_endpoint: node01}": r"launch\.rdzv_endpoint: 'node01' .*host:port",
    "data: {source: stdlib}": r"data\.source.*data\.path",
    "data: {path: 3}": r"data\.path: 3 .*text",
    "data: {path: a, valid_source: stdlib}": r"data\.valid_source.*data\.valid_path",
    "data: {path: a, test_path: b}": r"data\.test_path.*data\.valid_path",
    "- 1": "mapping",
    "defaults: [nothing.yaml]": r"nothing\.yaml.*no such configuration file",
    "defaults: [bad.yaml]": "include this file again",
}


@pytest.mark.parametrize("text", BAD, ids=[t.replace(" ", "") for t in BAD])
def test_bad_configurations(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=BAD[text]) as caught:
        configuration.load(write(tmp_path, "bad.yaml", text + "\n"), importing=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "9" * 5000], ["999 ... 999", "no such configuration file: File name too long"]),
        (["train", str(LLAMA.with_name("llama_tinny.yaml"))], ["did you mean llama_tiny.yaml"]),
        (["train", str(LLAMA), "--with", "configs/clusters/slum.yaml"], ["did you mean slurm.yaml"]),
        (["train", str(LLAMA), "megatron.seed=[1"], ["megatron.seed=[1: ", "expected"]),
        (["train", str(LLAMA), "--out", "OUT", "compression.seed=1.0"], ["compression.seed: 1.0"]),
        (["train", str(LLAMA), "compression.warmup_steps=5"], ["warmup_steps: 5", "with method loco"]),
        (
            ["train", str(LLAMA), "--dry-run", "data.path=/nowhere", "data.source=null"],
            ["/nowhere.bin does not exist"],
        ),
        (
            ["train", str(LLAMA), "--dry-run", *(f"data.{x}=null" for x in ("path", "source")), NOWHERE],
            ["/nowhere.bin does not exist"],
        ),
        (["train", str(LLAMA), "lr=1"], ["'lr=1'", "section.key=value"]),
        (["train", str(LLAMA), "--fast"], ["--fast", "--help"]),
        (["tarin", str(LLAMA)], ["'tarin'"]),
        (["compare", str(LLAMA), "--methods", "none,lcoo"], ["'lcoo'", "did you mean loco"]),
        (["compare", str(LLAMA), "--methods", "none,none"], ["'none,none'", "different"]),
        (["compare", str(LLAMA), "--methods", "../methods/none"], ["'../methods/none'", "must be one of"]),
        (["train", str(LLAMA), "launch.script=nowhere.py"], ["launch.script: 'nowhere.py'", "no such file"]),
    ],
)
def test_bad_command_lines(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([word.replace("OUT", str(tmp_path / "run")) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("megatron-loco: error: ")
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err
    assert not (tmp_path / "run").exists()


def test_a_method_may_refer_to_what_another_file_says(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "data: {path: onebit_adam}\ncompression: {method: loco, bits: 4}\n")
    top = write(tmp_path, "top.yaml", 'defaults: [base.yaml]\ncompression: {method: "${data.path}"}\n')
    run = configuration.load(top)
    assert (run.compression.method, run.compression.bits) == ("onebit_adam", 1)


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    write(tmp_path, "taken", "a file")
    with pytest.raises(UserError, match="taken cannot be written"):
        run_folder.begin(tmp_path / "taken", {"config.yaml": ""})
