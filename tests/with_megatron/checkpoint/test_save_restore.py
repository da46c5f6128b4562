"""Error states in Megatron's checkpoints: exact in the same layout, else zero; damage is named."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from coded_values import flat_error, set_error
from torch.distributed.checkpoint import FileSystemReader
from with_megatron.checkpoint.whole_checkpoints import (
    attached,
    errors_of,
    load,
    read,
    save,
    tree,
    with_random_errors,
    write,
)
from with_megatron.gpt_model import OVERLAP, build
from with_megatron.seam_runs import attachment_of, core_before, logged, refusal
from with_megatron.test_optimizers import muon, needs_muon

import megatron_patch
from megatron_patch.config import DEFAULT_ERROR_BETA
from megatron_patch.session.states import sealed
from megatron_patch.weights.batch import WeightsDiffer

BUCKETS = {"ddp": OVERLAP}
MOE = {"experts": 4, "layers": 1}
REPLICATED = {"ddp": {"use_distributed_optimizer": False}}
TWO_HOPS = {"ranks_per_node": 2}
INSTANCES = {"instances": 2}

ONEBIT = {"method": "onebit_adam", "warmup_steps": 4, "error_dtype": "fp32"}

# (ranks, model, compression) before and after, and what the line says of them
OTHER_LAYOUTS: dict[str, tuple[tuple[int, Any, Any], tuple[int, Any, Any], str]] = {
    "data parallel": ((4, {}, {}), (2, {}, {}), "layout (data 4 -> 2)"),
    "tensor parallel": ((4, {"tp": 2}, {}), (4, {}, {}), "layout (tensor 2 -> 1, data 2 -> 4)"),
    "pipeline": ((2, {"pp": 2}, {}), (2, {}, {}), "layout (pipeline 2 -> 1, data 1 -> 2)"),
    "experts": ((4, {"ep": 2, **MOE}, {}), (4, MOE, {}), "layout (expert 2 -> 1)"),
    "instances": ((4, INSTANCES, {}), (4, {}, {}), "layout (instances 2 -> 1)"),
    "two hops": ((4, {}, {}), (4, {}, TWO_HOPS), "layout"),
    "rotation": ((2, {}, {}), (2, {}, {"rotation": "none"}), "layout"),
    "replicated": ((2, REPLICATED, {}), (2, {}, {}), "layout"),
    "onebit_adam": ((4, {}, ONEBIT), (2, BUCKETS, ONEBIT), "layout"),
    "onebit_adam, replicated": ((4, REPLICATED, ONEBIT), (2, {}, ONEBIT), "layout"),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_in_another_layout_errors_start_from_zero_and_counters_go_on(
    pool: Any, tmp_path: Path, case: str
) -> None:
    (ranks, saved_as, options), (new_ranks, loaded_as, new_options), layout = OTHER_LAYOUTS[case]
    pool.run(save, str(tmp_path), saved_as, options, world_size=ranks)
    # Megatron cannot give an optimizer's state to another kind of optimizer.
    alone = {"weights_alone": True} if "replicated" in case else {}
    reports = pool.run(load, str(tmp_path), loaded_as, new_options, **alone, world_size=new_ranks)
    line = f"INFO: megatron-loco: step 7: errors start from zero: the checkpoint is of another {layout}"
    for rank, (errors, steps, lines) in enumerate(reports):
        assert len(lines) == (rank == 0)
        assert all(said == line or (layout == "layout" and said.startswith(line)) for said in lines)
        assert steps == ([7, 4, 4] if "onebit" in case else [7])
        assert errors
        assert not any(error.any() for error in errors)


def layouts_told_apart() -> list[bool]:
    """Whether a layout's digest changes with what tells elements of equal sizes apart."""
    from megatron_patch.megatron.checkpoint.states import rank_state_of

    gpt = build()
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="loco"))
    (chunk,) = gpt.chunks
    attachment = attachment_of(chunk)
    first = rank_state_of(gpt.chunks).layout
    told = [rank_state_of(gpt.chunks).layout == first]
    layer = chunk.module.decoder.layers[0]
    layer.layer_number += 1  # as where the stages before have another number of layers
    told.append(rank_state_of(gpt.chunks).layout != first)
    layer.layer_number -= 1
    groups = attachment.groups_of_ranks()
    attachment.groups_of_ranks = lambda: groups | {"tensor": (1, 1)}  # as in another order of ranks
    told.append(rank_state_of(gpt.chunks).layout != first)
    return told


def test_layouts_of_equal_sizes_are_told_apart(pool: Any) -> None:
    assert pool.run(layouts_told_apart, world_size=2) == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("parallel", "before", "change"),
    [
        ({}, {}, {"error_beta": 0.3}),
        (BUCKETS, {}, {"bits": 2, "reset_interval": 3}),
        (INSTANCES, {}, {}),
        ({"ep": 2, **MOE}, TWO_HOPS, TWO_HOPS),
        pytest.param(
            muon("layout"), {"method": "error_feedback"}, {"method": None}, marks=needs_muon
        ),  # of which error_feedback is the default
    ],
    ids=str,
)
def test_the_same_layout_is_restored_exactly(
    pool: Any, tmp_path: Path, parallel: dict[str, Any], before: dict[str, Any], change: dict[str, Any]
) -> None:
    old = pool.run(save, str(tmp_path), parallel, before, world_size=4)
    reports = pool.run(load, str(tmp_path), parallel, change, world_size=4)
    assert "error states restored exactly" in reports[0][2][-1]
    assert [lines for _, _, lines in reports[1:]] == [[]] * 3
    for saved, (after, steps, _) in zip(old, reports, strict=True):
        assert steps == [7]
        assert len(saved) == len(after)
        for errors, restored in zip(saved, after, strict=True):
            assert errors.any()
            if "error_beta" in change:  # what is pending, e / (1 - beta), stays; int8's scales are bf16
                factor = (1 - change["error_beta"]) / (1 - DEFAULT_ERROR_BETA)
                assert restored.tolist() == pytest.approx((factor * errors).tolist(), rel=2**-8)
            else:
                assert (errors == restored).all()


def _keys(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


def _forget(folder: Path, *keys: str) -> None:
    """As if the checkpoint had been written without these keys."""
    metadata = _keys(folder)
    for key in keys:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _resize(folder: Path, key: str) -> None:
    metadata = _keys(folder)
    metadata.state_dict_metadata[key].size = torch.Size([10])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _cut(folder: Path, key: str) -> None:
    """Cut the file short that has a key's data, where they begin."""
    file, start, _ = _place(folder, key)
    os.truncate(file, start + 10)


def _place(folder: Path, key: str) -> tuple[Path, int, int]:
    """The file that has a key's data, where they begin there, and where they end."""
    places = _keys(folder).storage_data.items()
    place = next(place for index, place in places if index.fqn == key)
    return folder / place.relative_path, place.offset, place.offset + place.length


def _change(folder: Path, key: str, behind: bytes = b"") -> None:
    """Change a byte of a key's data: the one behind these, or in the middle."""
    file, start, end = _place(folder, key)
    content = bytearray(file.read_bytes())
    content[content.index(behind, start) + len(behind) if behind else (start + end) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Any, str]] = {
    "no manifest": (
        lambda f: _forget(f, "megatron_loco.rank_1.manifest/shard_0_1"),
        "it has no error states of rank 1",
    ),
    "no data": (lambda f: _forget(f, "megatron_loco.rank_1"), "of rank 1 are missing"),
    "of another size": (lambda f: _resize(f, "megatron_loco.rank_1"), "of another size than its manifest"),
    "changed": (lambda f: _change(f, "megatron_loco.rank_1"), "error states have changed since"),
    "manifest": (
        lambda f: _change(f, "megatron_loco.rank_1.manifest/shard_0_1", b'"steps": '),
        "its manifest has changed since it was saved",
    ),
    "truncated": (lambda f: _cut(f, "megatron_loco.rank_1"), "its error states cannot be read"),
}


def load_damaged(folder: str) -> dict[str, Any]:
    """In a worker: what is said of every damage, strict and not, and whether errors are zero then."""
    from megatron_patch.megatron.checkpoint import dist_checkpointing
    from megatron_patch.megatron.checkpoint.states import rank_state_of

    found: dict[str, Any] = {}
    for strict in (False, True):
        gpt, compressor = attached({}, {"strict_load": strict})
        for name, (damage, _) in DAMAGES.items():
            copy = Path(folder, f"{name} {strict}", "iter_0000007")
            if torch.distributed.get_rank() == 0:
                shutil.copytree(Path(folder, "iter_0000007"), copy)
                damage(copy)
            torch.distributed.barrier()
            for sender in compressor.senders:
                set_error(sender.error, torch.ones(sender.layout.numel))
            rank = rank_state_of(gpt.chunks)
            read = functools.partial(dist_checkpointing._saved, copy, "megatron_loco")
            with logged() as lines:
                try:
                    dist_checkpointing.restore(rank, copy, read, 3, 1.0)
                except megatron_patch.UserError as error:
                    lines.append(f"refused: {error}")
            zero = not any(flat_error(sender.error).any() for sender in compressor.senders)
            found[f"{name} {strict}"] = (lines, zero, compressor.ledger.steps)
        megatron_patch.disable()
    return found


def test_damage_is_found_and_named(pool: Any, tmp_path: Path) -> None:
    """By the rank that needs what is damaged, rank 1 alone.

    It keeps the counters of the others, or it would wait for them in other exchanges than they for it.
    """
    pool.run(save, str(tmp_path), {}, {}, world_size=2)
    intact, damaged = pool.run(load_damaged, str(tmp_path), world_size=2)
    assert all("restored exactly" in lines[0] for lines, *_ in intact.values())
    for name, (_, message) in DAMAGES.items():
        lines, zero, steps = damaged[f"{name} False"]
        assert len(lines) == 1
        assert "errors start from zero: " in lines[0]
        assert message in lines[0], name
        assert str(tmp_path) in lines[0]
        assert (zero, steps) == (True, 7)
        lines, _, _ = damaged[f"{name} True"]
        assert len(lines) == 1
        assert lines[0].startswith("refused: ")
        assert message in lines[0]
        assert "compression.strict_load" in lines[0]


def begun_from_damaged(folder: Path) -> dict[str, tuple[str, bool]]:
    """In a worker: what is said when rank 3's outer steps are damaged, and whether the next step has v."""
    from megatron_patch.megatron.attach import outer_steps_of

    options, found = {"outer_interval": 2, "outer_momentum": 0.9}, {}
    for name, damage in {"": None, "changed": _change, "truncated": _cut, "missing": _forget}.items():
        gpt, _ = attached(INSTANCES, options | {"strict_load": name == "truncated"})
        if damage is not None and torch.distributed.get_rank() == 0:
            damage(shutil.copytree(folder / "intact", folder / name), "megatron_loco_outer.rank_3")
        torch.distributed.barrier()
        with logged() as lines:
            if damage is not None and (error := refusal(read, gpt, folder / name)):
                lines.append(error)
            for step in range(1 if damage else 2):
                gpt.step(step)
        if damage is None:
            write(gpt, folder / "intact")
        (outer,) = outer_steps_of(gpt.chunks)
        found[name] = "\n".join(lines), any(shard.velocity.any() for shard in outer._shards)
        megatron_patch.disable()
    return found


def test_damaged_outer_steps_begin_anew_and_v_on_all_its_owners(pool: Any, tmp_path: Path) -> None:
    reports = pool.run(begun_from_damaged, tmp_path, world_size=4)
    for name in ("changed", "truncated", "missing"):
        assert [v for _, v in (report[name] for report in reports)] == [True, False, True, False], name
    said = reports[3]
    assert re.search("WARNING: .* begin anew, .*/changed: .* have changed since", said["changed"][0])
    assert re.search("/truncated: .* cannot be read.*compression.strict_load", said["truncated"][0])


def saved_by_the_loop(folder: str, steps: int, killed: bool = False) -> list[str]:
    """In a worker: Megatron's loop saves random errors in the format torch, and may be killed meanwhile."""
    from megatron_patch.megatron.checkpoint import training_loop

    def save_checkpoint(iteration, model, optimizer, non_persistent_ckpt=False, release=False) -> None:
        """Megatron's own."""

    gpt, _ = attached({}, {})
    with_random_errors(gpt, steps)
    ends = mock.patch.object(torch.distributed, "barrier", side_effect=KeyboardInterrupt)
    flags = SimpleNamespace(ckpt_format="torch", save=folder)
    with (
        mock.patch("megatron.training.get_args", return_value=flags),
        ends if killed else contextlib.nullcontext(),
        contextlib.suppress(KeyboardInterrupt),
        logged() as lines,
    ):
        training_loop._save_checkpoint(save_checkpoint, 7, gpt.chunks, gpt.optimizer)
    return lines


def loaded_by_the_loop(folder: str, kind: str = "LEGACY", error: float = 0.0) -> tuple[bool, int, list[str]]:
    """In a worker: Megatron's loop loads iteration 7; whether there are errors, the steps, and the log.

    `error` is what dist_checkpointing has restored, if Megatron has called it.
    """
    from megatron.training import checkpointing

    from megatron_patch.megatron.checkpoint import training_loop

    gpt, session = attached({}, {})
    for sender in session.senders:
        set_error(sender.error, torch.full((sender.layout.numel,), error))

    def load_checkpoint(ddp_model, optimizer, load_arg="load") -> tuple[int, int]:
        checkpointing._load_base_checkpoint(folder, None)
        return 7, 0

    name = f"{folder}/iter_0000007" + ("/mp_rank_00/model_optim_rng.pt" if kind == "LEGACY" else "")
    found = None, name, False, checkpointing.CheckpointType[kind]
    flags = SimpleNamespace(
        load=folder, finetune=False, no_load_optim=False, non_persistent_global_ckpt_dir=None
    )
    with (
        mock.patch("megatron.training.get_args", return_value=flags),
        mock.patch.object(checkpointing, "_load_base_checkpoint", return_value=found),
        logged() as lines,
    ):
        training_loop._load_checkpoint(load_checkpoint, gpt.chunks, gpt.optimizer)
    return any(bool(error.any()) for error in errors_of(gpt)), session.ledger.steps, lines


def test_what_a_killed_save_has_left_is_not_read(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool.run(saved_by_the_loop, folder, 9, True, world_size=4)
    pool.run(saved_by_the_loop, folder, 8, world_size=2)
    for rank, (errors, steps, lines) in enumerate(pool.run(loaded_by_the_loop, folder, world_size=4)):
        assert (errors, steps, len(lines)) == (False, 8, rank == 0)
        assert all("of another layout (data 2 -> 4)" in line for line in lines)
    pool.run(saved_by_the_loop, folder, 9, True, world_size=2)
    pool.run(saved_by_the_loop, folder, 9, True, world_size=1)
    for errors, steps, _ in pool.run(loaded_by_the_loop, folder, world_size=2):
        assert (errors, steps) == (True, 8)


def test_errors_in_an_object_store_s_checkpoint_stay_restored(pool: Any) -> None:
    """Megatron's dist_checkpointing has read them, which no path of a file system shows."""
    assert pool.run(loaded_by_the_loop, "msc://bucket", "GLOBAL", 1.0, world_size=2) == [(True, 0, [])] * 2


def test_a_format_of_folders_says_that_an_object_store_gets_no_errors(pool: Any) -> None:
    first, second = pool.run(saved_by_the_loop, "msc://bucket", 7, world_size=2)
    assert [line for line in first if "--ckpt-format torch keeps no error states" in line] == first != []
    assert second == []
    assert not Path("msc:").exists()


def loaded_by_one(folder: str) -> tuple[int, bool]:
    """In a worker: rank 0 alone loads a checkpoint; returns its steps, and whether it has the errors."""
    from megatron.core import dist_checkpointing

    gpt, session = attached({}, {})
    with_random_errors(gpt)
    write(gpt, Path(folder))
    session.restart(0)
    state = tree(gpt)
    if torch.distributed.get_rank() == 0:
        dist_checkpointing.load(state, folder, validate_access_integrity=False)
    found = session.ledger.steps, any(bool(error.any()) for error in errors_of(gpt))
    torch.distributed.barrier()
    return found


def test_a_load_waits_for_no_other_rank(pool: Any, tmp_path: Path) -> None:
    if core_before("0.18"):
        pytest.skip("until 0.18 Megatron's own load gathers over all ranks")
    assert pool.run(loaded_by_one, str(tmp_path / "checkpoint"), world_size=2) == [(7, True), (0, False)]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "within a step": ({"mid_step": True}, "the checkpoint is from within a step, which runs again"),
    "another method": (
        {"config": {"method": "error_feedback", "save_error": True}},
        "is of method error_feedback",
    ),
    "format": ({"format": 99}, "format 99; this release reads 3"),
    "unknown": ({"events": {"of": "another release"}}, "what this release does not know"),
}


def load_changed(folder: str) -> dict[str, tuple[bool, int, list[str]]]:
    """In a worker: checkpoints whose manifests say something else; errors or not, steps and lines."""
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    gpt, session = attached({}, {})
    original, found = dist_checkpointing.pack, {}
    for name, (changes, _) in CHANGES.items():

        def changed(*args: Any, changes: dict[str, Any] = changes) -> Any:
            manifest, data = original(*args)
            whole = json.loads(manifest)
            for part in (whole, *whole["sessions"]):
                part |= {name: value for name, value in changes.items() if name in part}
            return sealed(whole), data

        with_random_errors(gpt)
        with mock.patch.object(dist_checkpointing, "pack", changed):
            write(gpt, Path(folder, name, "iter_0000007"))
        session.ledger.steps = 0
        with logged() as lines:
            read(gpt, Path(folder, name, "iter_0000007"))
        found[name] = any(bool(error.any()) for error in errors_of(gpt)), session.ledger.steps, lines
    return found


def test_a_checkpoint_without_errors_that_fit_says_so(pool: Any, tmp_path: Path) -> None:
    """One from within a step, another method's, a later release's; stock Megatron's; without save_error."""
    first, _ = pool.run(load_changed, str(tmp_path), world_size=2)
    for name, (_, line) in CHANGES.items():
        has_errors, steps, lines = first[name]
        assert (has_errors, steps) == (False, 7), name
        assert line in lines[0]
    for options, line in (
        ({"method": "none"}, "the checkpoint has none"),
        ({"save_error": False}, "they were not saved (compression.save_error: false)"),
    ):
        folder = str(tmp_path / next(iter(options)))
        pool.run(save, folder, {}, options, world_size=2)
        errors, steps, lines = pool.run(load, folder, {}, {}, world_size=2)[0]
        assert not any(error.any() for error in errors)
        assert steps == [7]
        assert line in lines[0]
    assert pool.run(load, folder, {}, {"method": "none"}, world_size=2)[0][0] == []
    assert pool.run(saved_keys, folder, world_size=1)[0] == [
        "megatron_loco.rank_0.manifest/shard_0_1",
        "megatron_loco.rank_1.manifest/shard_0_1",
    ]


def saved_keys(folder: str) -> list[str]:
    keys = _keys(Path(folder, "iter_0000007")).state_dict_metadata
    return sorted(key for key in keys if "megatron_loco" in key)


def save_in_the_background(folder: str, constant: bool) -> list[bool]:
    """In a worker: two asynchronous saves, of which the first is written after errors have changed.

    Returns whether each was loaded as of the moment of its save.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy(cached_metadata=constant)
    gpt, session = attached({}, {})
    with_random_errors(gpt)
    saved = []
    for place in range(2):
        request = write(
            gpt,
            Path(folder, f"iter_000000{place}"),
            async_sharded_save=True,
            async_strategy="mcore",
            sharded_strategy=strategy,
        )
        saved.append(errors_of(gpt))
        for sender in session.senders:
            set_error(sender.error, torch.full((sender.layout.numel,), 3.0 + place))
        request.execute_sync()
    same = []
    for place in range(2):
        read(gpt, Path(folder, f"iter_000000{place}"))
        same.append(all(map(torch.equal, saved[place], errors_of(gpt))))
    return same


@pytest.mark.parametrize("constant", [False, True])
def test_an_asynchronous_save_is_of_its_moment(pool: Any, tmp_path: Path, constant: bool) -> None:
    assert pool.run(save_in_the_background, str(tmp_path), constant, world_size=2) == [[True, True]] * 2


def two_models(folder: str) -> dict[str, Any]:
    """In a worker: a policy and a critic in one checkpoint; each alone; weights without an optimizer.

    Of each model its steps, whether it has the saved errors, and whether it has none.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    models = {name: attached({}, {}) for name in ("policy", "critic")}
    for number, (gpt, _) in enumerate(models.values()):
        with_random_errors(gpt, steps=7 + number)
    kept = {name: errors_of(gpt) for name, (gpt, _) in models.items()}

    def trees(*names: str) -> dict[str, Any]:
        found = {}
        for name in names:
            found[name] = tree(models[name][0])
            add_prefix_for_sharding(found[name], f"{name}.")
        return found

    def loaded(asked: dict[str, Any]) -> dict[str, tuple[int, bool, bool]]:
        for _, session in models.values():
            session.ledger.steps = 0
            session.clear_errors()
        dist_checkpointing.load(asked, folder)
        found = {}
        for name, (gpt, session) in models.items():
            same = all(map(torch.equal, kept[name], errors_of(gpt)))
            found[name] = session.ledger.steps, same, not any(error.any() for error in errors_of(gpt))
        return found

    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(trees("policy", "critic"), folder)
    found = {"both": loaded(trees("policy", "critic")), "critic": loaded(trees("critic"))}
    reference = trees("policy")
    del reference["policy"]["optimizer"]
    return found | {"reference": loaded(reference)}


def test_models_of_one_checkpoint_keep_apart(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(two_models, str(tmp_path / "checkpoint"), world_size=2):
        both = {"policy": (7, True, False), "critic": (8, True, False)}
        assert found["both"] == both
        assert found["critic"] == both | {"policy": (0, False, True)}
        assert found["reference"] == {"policy": (0, False, True), "critic": (0, False, True)}


def unread(folder: str) -> tuple[str, bool]:
    """In a worker: what saving raises after a gather that did not fit, of which nothing is known yet."""
    gpt = build(dtype="bf16")
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="none", weight_gather="exact"))
    gpt.step(0)
    handle = mock.Mock(**{"check.side_effect": WeightsDiffer("weight gather of bucket 0")})
    attachment_of(gpt.chunks[0]).weights.unchecked.append(handle)
    with pytest.raises(WeightsDiffer) as raised:
        write(gpt, Path(folder))
    return str(raised.value), any(Path(folder).iterdir())


def test_a_gather_that_did_not_fit_is_found_before_weights_are_saved(pool: Any, tmp_path: Path) -> None:
    """On CUDA its verdict is read later than it is made, on a CPU at once: the handle is a stand-in."""
    found = pool.run(unread, str(tmp_path / "checkpoint"), world_size=2)
    assert found == [("weight gather of bucket 0", False)] * 2


def keys_to_compare() -> tuple[list[str], list[str]]:
    """In a worker: the keys of a checkpoint that Megatron compares with what is asked for."""
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    ours = ["megatron_loco.rank_0", "policy.megatron_loco.rank_12.manifest", "megatron_loco_2.rank_0"]
    entries = {key: SimpleNamespace(key=key) for key in ["weight", "a.megatron_loco.weight", *ours]}
    return ours, list(dist_checkpointing._without_ours(lambda: entries))


def test_a_strict_load_does_not_find_our_keys_unexpected(pool: Any) -> None:
    """The comparison itself fails in Megatron with torch 2.15, whose tensors' properties have strides."""
    ((_, compared),) = pool.run(keys_to_compare, world_size=1)
    assert compared == ["weight", "a.megatron_loco.weight"]


def scaled(folder: str, save_scale: float, new_scale: float) -> tuple[list[float], list[float]]:
    """In a worker: fp16's errors saved with one loss scale, loaded where the optimizer has another one.

    Returns errors over the scale that they are in, saved and loaded.
    """
    gpt, session = attached({"dtype": "fp16"}, {"error_dtype": "fp32"})
    (sender, *_) = session.senders
    for part in gpt.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(save_scale)
    set_error(sender.error, torch.arange(sender.layout.numel).float() * save_scale)
    write(gpt, Path(folder))
    before = flat_error(sender.error) / save_scale
    for part in gpt.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(new_scale)
    state = read(gpt, Path(folder))
    after = flat_error(sender.error) / float(state["optimizer"]["grad_scaler"]["scale"])
    return before.tolist()[:50], after.tolist()[:50]


def test_errors_are_in_the_loss_scale_that_was_loaded(pool: Any, tmp_path: Path) -> None:
    """The optimizer takes it over after the errors are read."""
    for before, after in pool.run(scaled, str(tmp_path / "checkpoint"), 1024.0, 64.0, world_size=2):
        assert before == after
        assert any(before)
