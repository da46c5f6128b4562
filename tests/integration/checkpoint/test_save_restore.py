"""Error states saved under one parallelism and restored under another, element by element.

What tells elements apart is their weights: the model that saves gives every weight a number of its own, and
Megatron's distributed checkpointing carries the weights to the model that loads. Which error belongs to which
element is then read off the buckets, on both sides, without our own bookkeeping.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.config import DEFAULT_ERROR_BETA

KINDS = ("reduce_scatter", "node_sum", "all_reduce", "owner")


def _number_weights(gpt: Any) -> None:
    """Every weight of the model its own whole number, exact in fp32: data-parallel peers agree."""
    import torch
    from megatron.core import parallel_state

    for place, (_, parameter) in enumerate(sorted(gpt.parameters.items())):
        split = getattr(parameter, "tensor_model_parallel", False)
        expert = not getattr(parameter, "allreduce", True)
        part = parallel_state.get_tensor_model_parallel_rank() if split else 0
        part += 2 * parallel_state.get_expert_model_parallel_rank() if expert else 0
        part += 4 * parallel_state.get_pipeline_model_parallel_rank()
        first = 2048 * (64 * part + place)
        assert parameter.numel() <= 2048
        assert first < 2**24
        with torch.no_grad():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view(parameter.shape))


def _states(gpt: Any) -> list[tuple[str, int, Any, Any]]:
    """(kind, sender's number, elements' weights, elements' errors) of every state of this rank, unpadded."""
    import torch
    from megatron.core import parallel_state

    from megatron_patch.integration.attach import attachment_of

    found = []
    for chunk in gpt.chunks:
        attachment = attachment_of(chunk)
        for seam in attachment.seams:
            dense = not seam.expert
            data_rank = (
                parallel_state.get_data_parallel_rank(with_context_parallel=True)
                if dense
                else parallel_state.get_expert_data_parallel_rank()
            )
            for place, bucket in enumerate(seam.group.buckets):
                numbers = torch.full((bucket.grad_data.numel(),), -1.0)
                for parameter, (start, end) in bucket.param_to_index.items():
                    numbers[start:end] = parameter.detach().flatten()
                shards = seam.group.intra_distributed_optimizer_instance_size if seam.scatter_group else 1
                shard = data_rank % shards
                own = numbers.view(shards, -1)[shard]
                exchanges = {s.kind: s.made.exchanges[place] for s in seam.stages if s.made.exchanges}
                scatter, both = exchanges.get("reduce-scatter"), exchanges.get("all-reduce")
                if hasattr(scatter, "hops"):
                    hops = scatter.hops
                    node, local = divmod(shard, hops.local)
                    column = numbers.view(hops.nodes, hops.local, -1)[:, local].flatten()
                    node += hops.nodes * (data_rank // shards)  # of which instance
                    found.append(("node_sum", node, column, scatter.sender.error.flat()))
                elif scatter is not None:
                    found.append(("reduce_scatter", data_rank, numbers, scatter.sender.error.flat()))
                if both is not None:
                    group = seam.reduce_group
                    found.append(("all_reduce", group.rank(), own, both.sender.error.flat()))
                    owned = own.split(both.sender.layout.shard_size)
                    if group.rank() < len(owned):
                        found.append(("owner", 0, owned[group.rank()], both.owner.error.flat()))
    return [(kind, index, n[n >= 0].numpy(), e[n >= 0].numpy()) for kind, index, n, e in found]


def _build(parallel: dict[str, Any], compression: dict[str, Any]) -> Any:
    from integration.gpt_model import build

    import megatron_patch

    gpt = build(**parallel)
    megatron_patch.attach(
        gpt.chunks, megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    )
    return gpt


def _weights(gpt: Any) -> dict[str, Any]:
    return {str(n): chunk.module.sharded_state_dict() for n, chunk in enumerate(gpt.chunks)}


def with_random_errors(gpt: Any, folder: str) -> None:
    """After seven steps, weights that are numbered and random errors; an empty folder for the weights."""
    import torch

    from megatron_patch.integration.attach import attachment_of

    _number_weights(gpt)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for chunk in gpt.chunks:
        state = attachment_of(chunk).state
        state.steps = state.steps_seen = 7
        for sender in state.senders:
            values = torch.randn(sender.layout.numel, generator=generator)
            sender.error.set(values * torch.rand(values.shape, generator=generator) ** 4)
    if torch.distributed.get_rank() == 0:
        Path(folder, "weights").mkdir(parents=True)
    torch.distributed.barrier()


def save(folder: str, parallel: dict[str, Any], compression: dict[str, Any]) -> Any:
    """In a worker: random errors, saved with the weights; returns the states."""
    import torch
    from megatron.core import dist_checkpointing

    import megatron_patch
    from megatron_patch.integration.checkpoint.save import ErrorSave

    gpt = _build(parallel, compression)
    with_random_errors(gpt, folder)
    dist_checkpointing.save(_weights(gpt), str(Path(folder, "weights")))
    saving = ErrorSave(gpt.chunks, Path(folder, "iter_0000007"), 7, gpt.optimizer)
    saving.write()
    saving.complete()
    if torch.distributed.get_rank() == 0:
        Path(folder, "iter_0000007").mkdir()
        saving.publish()
    torch.distributed.barrier()
    states = _states(gpt)
    megatron_patch.disable()
    return states


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What is logged meanwhile about saved errors."""
    lines: list[str] = []
    logger = logging.getLogger("megatron_patch.integration.checkpoint.restore")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def load(folder: str, parallel: dict[str, Any], compression: dict[str, Any]) -> Any:
    """In a worker: another model with the weights and errors; returns its states, counters and log lines."""
    from megatron.core import dist_checkpointing

    import megatron_patch
    from megatron_patch.integration.attach import attachment_of
    from megatron_patch.integration.checkpoint.restore import Checkpoint, restore

    gpt = _build(parallel, compression)
    if Path(folder, "weights").exists():
        state = dist_checkpointing.load(_weights(gpt), str(Path(folder, "weights")))
        for number, chunk in enumerate(gpt.chunks):
            chunk.module.load_state_dict(state[str(number)], strict=False)
    with _captured() as lines:
        restore(gpt.chunks, Checkpoint(Path(folder, "iter_0000007"), 7), gpt.optimizer)
    compressors = [attachment_of(chunk).state for chunk in gpt.chunks]
    states = _states(gpt)
    megatron_patch.disable()
    return states, [c.steps for c in compressors], lines


def _by_element(ranks: list[Any]) -> dict[str, dict[float, dict[int, list[float]]]]:
    """kind -> element -> sender's number -> the errors of all who are that sender for it (copies)."""
    found: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(list)) for kind in KINDS}
    for kind, index, numbers, errors in itertools.chain.from_iterable(ranks):
        for number, error in zip(numbers.tolist(), errors.tolist(), strict=True):
            found[kind][number][index].append(error)
    return found


def near(errors: list[float], expected: float, rel: float = 1e-5, tolerance: float = 1e-6) -> bool:
    """All of them, by pytest.approx's rule; that itself takes seconds for so many elements."""
    return all(abs(error - expected) <= max(rel * abs(expected), tolerance) for error in errors)


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


EXACT = {"error_dtype": "fp32"}
BUCKETS = {"ddp": {"bucket_size": 1500, "overlap_grad_reduce": True}}
MOE = {"experts": 4, "layers": 1}

SAME_SENDERS = {
    "another bucket size": (4, {}, 4, BUCKETS),
    "tensor parallel 2 -> 1": (4, {"tp": 2}, 2, {}),
    "tensor parallel 1 -> 2": (2, {}, 4, {"tp": 2, "sequence_parallel": True}),
    "pipeline 2 -> 1": (4, {"pp": 2}, 2, {}),
    "pipeline 1 -> 2 x 2 virtual": (2, {"layers": 4}, 4, {"layers": 4, "pp": 2, "vpp": 2}),
    "another bucket size, two instances": (4, {"instances": 2}, 4, {"instances": 2, **BUCKETS}),
}
OTHER_SENDERS = {
    "data parallel 4 -> 2": (4, {}, 2, {}),
    "data parallel 2 -> 4": (2, {}, 4, {}),
    "4 -> 3 with buckets": (4, {}, 3, BUCKETS),
    "averaged in the collective": (
        4,
        {"ddp": {"average_in_collective": True}},
        2,
        {"ddp": {"average_in_collective": True}},
    ),
    "expert parallel 2 -> 1": (4, {"ep": 2, **MOE}, 4, MOE),
    "expert parallel 1 -> 2": (4, MOE, 4, {"ep": 2, **MOE}),
    "tensor 2 x data 2 -> data 4": (4, {"tp": 2}, 4, {}),
}


@pytest.mark.parametrize("case", SAME_SENDERS)
def test_errors_follow_their_parameters(pool: Any, tmp_path: Path, case: str) -> None:
    ranks, saved_as, new_ranks, loaded_as = SAME_SENDERS[case]
    old = _by_element(pool.run(save, str(tmp_path), saved_as, EXACT, world_size=ranks))
    reports = pool.run(load, str(tmp_path), loaded_as, EXACT, world_size=new_ranks)
    assert "every sender keeps its own" in reports[0][2][0]
    assert "start from zero" not in reports[0][2][0]
    compared = 0
    for kind, elements in _by_element([states for states, *_ in reports]).items():
        for number, senders in elements.items():
            for index, errors in senders.items():
                expected = _mean(old[kind][number][index])
                assert near(errors, expected), (kind, number, index)
                compared += 1
    assert compared > 5_000


@pytest.mark.parametrize("case", OTHER_SENDERS)
def test_another_number_of_senders_starts_from_their_mean(pool: Any, tmp_path: Path, case: str) -> None:
    ranks, saved_as, new_ranks, loaded_as = OTHER_SENDERS[case]
    averaged = "ddp" in saved_as
    old = _by_element(pool.run(save, str(tmp_path), saved_as, EXACT, world_size=ranks))["reduce_scatter"]
    reports = pool.run(load, str(tmp_path), loaded_as, EXACT, world_size=new_ranks)
    assert "senders start from the mean" in reports[0][2][0]
    assert all(set(steps) == {7} for _, steps, _ in reports)
    compared = 0
    for number, senders in _by_element([states for states, *_ in reports])["reduce_scatter"].items():
        before = old[number]
        if len(before) == len(senders):  # dense parameters, where only the experts' groups changed
            for index, errors in senders.items():
                assert near(errors, _mean(before[index])), (number, index)
            continue
        owed = _mean(itertools.chain.from_iterable(before.values())) * (1 if averaged else len(before))
        share = 1 if averaged else 1 / len(senders)
        for errors in senders.values():
            assert near(errors, owed * share, 1e-4, 1e-5), number
            compared += 1
    assert compared > 3_000


def test_what_an_instance_owes_is_not_lost(pool: Any, tmp_path: Path) -> None:
    """From two optimizer instances to one: senders keep theirs, and share what instances and owners held."""
    old = _by_element(pool.run(save, str(tmp_path), {"instances": 2}, EXACT, world_size=4))
    reports = pool.run(load, str(tmp_path), {}, EXACT, world_size=4)
    new = _by_element([states for states, *_ in reports])
    compared = 0
    for number, senders in new["reduce_scatter"].items():
        between = sum(_mean(errors) for errors in old["all_reduce"][number].values())
        owner = _mean(old["owner"][number][0])
        for index, errors in senders.items():
            own = _mean(old["reduce_scatter"][number][index])
            assert near(errors, own + (between + owner) / 4, 1e-4, 1e-5), (number, index)
            compared += 1
    assert compared > 5_000


TWO_HOPS = {"ranks_per_node": 2}
TOPOLOGIES = {
    "flat -> two hops": (4, {}, {}, 4, {}, TWO_HOPS),
    "two hops -> flat": (4, {}, TWO_HOPS, 4, {}, {}),
    "two hops, other buckets": (4, {}, TWO_HOPS, 4, BUCKETS, TWO_HOPS),
    "two hops, 2 -> 4 nodes": (4, {}, TWO_HOPS, 8, {}, TWO_HOPS),
    "two hops, tensor parallel": (8, {"tp": 2}, {"ranks_per_node": 4}, 4, {}, TWO_HOPS),
    "two hops, two instances -> one": (8, {"instances": 2}, TWO_HOPS, 4, {}, TWO_HOPS),
}


@pytest.mark.parametrize("case", TOPOLOGIES)
def test_what_is_owed_stays_owed_under_another_topology(pool: Any, tmp_path: Path, case: str) -> None:
    ranks, saved_as, compression, new_ranks, loaded_as, change = TOPOLOGIES[case]
    saved = pool.run(save, str(tmp_path), saved_as, EXACT | compression, world_size=ranks)
    reports = pool.run(load, str(tmp_path), loaded_as, EXACT | change, world_size=new_ranks)
    old, new = _owed(saved), _owed([states for states, *_ in reports])
    assert old.keys() == new.keys()
    assert len(new) > 3_000
    for number, owed in new.items():
        assert near([owed], old[number], 1e-4, 1e-5), number
    if "other buckets" in case:
        assert "every sender keeps its own" in reports[0][2][0]


def _owed(ranks: list[Any]) -> dict[float, float]:
    """What sums of gradients are owed by all senders together."""
    owed: dict[float, float] = defaultdict(float)
    for elements in _by_element(ranks).values():
        for number, senders in elements.items():
            owed[number] += sum(_mean(errors) for errors in senders.values())
    return owed


def test_from_a_replicated_to_the_distributed_optimizer(pool: Any, tmp_path: Path) -> None:
    replicated = {"ddp": {"use_distributed_optimizer": False}}
    old = _by_element(pool.run(save, str(tmp_path), replicated, EXACT, world_size=2))
    reports = pool.run(load, str(tmp_path), {}, EXACT, world_size=2)
    new = _by_element([states for states, *_ in reports])["reduce_scatter"]
    assert len(new) > 2_000
    for number, senders in new.items():
        owed = sum(_mean(errors) for errors in old["all_reduce"][number].values())
        owed += _mean(old["owner"][number][0])
        assert near([sum(_mean(errors) for errors in senders.values())], owed, 1e-4, 1e-5), number


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"error_dtype": "bf16"},
        {"error_dtype": "fp32"},
        {"block_size": "shard"},
        {"codec": "uniform"},
        {"rotation": "none"},
    ],
    ids=str,
)
def test_another_encoding_keeps_the_values(pool: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    """Up to what the new encoding can hold: 1/254 of a rotated block's largest value, 1/256 of the value;
    and to fp32's roundings in the rotation."""
    old = pool.run(save, str(tmp_path), {}, {}, world_size=2)
    reports = pool.run(load, str(tmp_path), {}, change, world_size=2)
    assert "every sender keeps its own" in reports[0][2][0]
    for before, (after, *_) in zip(old, reports, strict=True):
        for (_, _, numbers, errors), (_, _, same, found) in zip(before, after, strict=True):
            assert (numbers == same).all()
            tolerance = abs(errors).max() * (1e-6 if change.get("error_dtype") == "fp32" else 1 / 125)
            assert abs(errors - found).max() <= tolerance
            assert errors.any()


@pytest.mark.parametrize(
    ("parallel", "change"),
    [
        *(({}, change) for change in ({"bits": 2, "reset_interval": 3}, {"error_beta": 0.3})),
        ({}, TWO_HOPS),
        *((parallel, {}) for parallel in ({"tp": 2}, {"instances": 2}, {"ep": 2, **MOE}, BUCKETS)),
    ],
    ids=str,
)
def test_the_same_layout_is_restored_exactly(
    pool: Any, tmp_path: Path, parallel: dict[str, Any], change: dict[str, Any]
) -> None:
    topology = change if change == TWO_HOPS else {}
    old = pool.run(save, str(tmp_path), parallel, topology, world_size=4)
    reports = pool.run(load, str(tmp_path), parallel, change, world_size=4)
    assert "error states restored exactly" in reports[0][2][0]
    assert [lines for _, _, lines in reports[1:]] == [[]] * 3
    for before, (after, steps, _) in zip(old, reports, strict=True):
        assert set(steps) == {7}
        for (kind, index, numbers, errors), (*what, same, found) in zip(before, after, strict=True):
            assert what == [kind, index]
            assert (numbers == same).all()
            if "error_beta" in change:  # what is pending, e / (1 - beta), stays; int8's scales are bf16
                factor = (1 - change["error_beta"]) / (1 - DEFAULT_ERROR_BETA)
                assert found == pytest.approx(factor * errors, rel=2**-8)
            else:
                assert (errors == found).all()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _swap(folder: Path) -> None:
    first, second = (folder / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def _rewrite_manifest(folder: Path, **changes: Any) -> None:
    from megatron_patch.integration.checkpoint import files as sidecar

    content = sidecar.read_manifest(folder)
    sidecar.write_manifest(folder, {**content, **changes})
    if "format" in changes:  # write_manifest puts its own
        content = {**content, **changes}
        content["checksum"] = sidecar._checksum(content)
        (folder / "manifest.json").write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Any, str]] = {
    "truncated": (
        lambda f: os.truncate(f / "rank-00001.safetensors", 1000),
        "rank-00001.safetensors is damaged: it has 1000 bytes, not",
    ),
    "empty": (lambda f: os.truncate(f / "rank-00000.safetensors", 0), "rank-00000.safetensors is damaged"),
    "bit flipped": (
        lambda f: _flip(f / "rank-00001.safetensors"),
        "rank-00001.safetensors is damaged: its checksum differs",
    ),
    "missing": (lambda f: (f / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is missing"),
    "of another rank": (_swap, "is damaged: its checksum differs"),
    "not to be read": (
        lambda f: ((f / "rank-00001.safetensors").unlink(), (f / "rank-00001.safetensors").mkdir()),
        "rank-00001.safetensors cannot be read: Is a directory",
    ),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest flipped": (lambda f: _flip(f / "manifest.json"), "manifest.json is damaged"),
    "manifest truncated": (lambda f: os.truncate(f / "manifest.json", 300), "manifest.json is damaged"),
    "manifest empty": (lambda f: os.truncate(f / "manifest.json", 0), "manifest.json is damaged"),
    "manifest is a list": (lambda f: (f / "manifest.json").write_text("[1]"), "manifest.json is damaged"),
    "all missing": (shutil.rmtree, "manifest.json is missing"),
    "another checkpoint's": (lambda f: _rewrite_manifest(f, id="0" * 32), "is of another checkpoint"),
    "unknown content": (
        lambda f: _rewrite_manifest(f, layouts=[{"buckets": [], "states": [{"kind": "sum"}]}]),
        "holds what this release does not know: states is not as a save writes it",
    ),
    "a later format": (
        lambda f: _rewrite_manifest(f, format=99),
        "format 99; this release reads format 1",
    ),
}


def load_damaged(folder: str, ids: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """In a worker: what restore says of every damage, strict and not, and whether errors are zero then."""
    import torch

    import megatron_patch
    from megatron_patch.integration.attach import session_of
    from megatron_patch.integration.checkpoint.restore import Checkpoint, restore

    found: dict[str, Any] = {}
    for strict in (False, True):
        gpt = _build(parallel, {"strict_load": strict})
        compressor = session_of(gpt.chunks[0])
        for name, (damage, _) in DAMAGES.items():
            copy = Path(folder, f"{name} {strict}", "iter_0000007")
            if torch.distributed.get_rank() == 0:
                shutil.copytree(Path(folder, "iter_0000007"), copy)
                damage(copy / "compression")
            torch.distributed.barrier()
            for sender in compressor.senders:
                sender.error.set(torch.ones(sender.layout.numel))
            with _captured() as lines:
                try:
                    restore(gpt.chunks, Checkpoint(copy, 7, ids), gpt.optimizer)
                except megatron_patch.UserError as error:
                    lines.append(f"refused: {error}")
            zero = not any(sender.error.flat().any() for sender in compressor.senders)
            found[f"{name} {strict}"] = (lines, zero, compressor.steps)
        megatron_patch.disable()
    return found


@pytest.mark.parametrize("layout", ["the same", "another"])
def test_damage_is_found_and_named(pool: Any, tmp_path: Path, layout: str) -> None:
    pool.run(save, str(tmp_path), {}, {}, world_size=2)
    saved_id = json.loads((tmp_path / "iter_0000007" / "compression" / "manifest.json").read_text())["id"]
    parallel = {} if layout == "the same" else BUCKETS
    reports = pool.run(load_damaged, str(tmp_path), saved_id, parallel, world_size=2)
    for name, (_, message) in DAMAGES.items():
        lines, zero, steps = reports[0][f"{name} False"]
        assert len(lines) == 1
        assert "errors start from zero: " in lines[0]
        assert message in lines[0], name
        assert str(tmp_path) in lines[0]
        assert (zero, steps) == (True, 7)
        assert reports[1][f"{name} False"] == ([], True, 7)
        for report in reports:  # every rank refuses, with one cause
            lines, zero, _ = report[f"{name} True"]
            assert [line for line in lines if line.startswith("refused: ")] == lines
            assert message in lines[0]
            assert "--compression-strict-load" in lines[0]


def test_a_checkpoint_without_errors_says_so(pool: Any, tmp_path: Path) -> None:
    """Stock Megatron's; one with save_error: false; one from within a step; another method's."""
    (tmp_path / "iter_0000007").mkdir()
    stock, steps, lines = pool.run(load, str(tmp_path), {}, {}, world_size=2)[0]
    assert not any(errors.any() for *_, errors in stock)
    assert steps == [7]
    assert lines == ["megatron-loco: iteration 7: errors start from zero: the checkpoint has none"]
    for changes, line in (
        ({"mid_step": True}, "the checkpoint is from within a step, which runs again"),
        ({"config": {"method": "error_feedback", "save_error": True}}, "is of method error_feedback"),
    ):
        folder = tmp_path / line
        pool.run(save, str(folder), {}, {}, world_size=2)
        _rewrite_manifest(folder / "iter_0000007" / "compression", **changes)
        states, steps, lines = pool.run(load, str(folder), {}, {}, world_size=2)[0]
        assert not any(errors.any() for *_, errors in states)
        assert steps == [7]
        assert line in lines[0]
    pool.run(save, str(tmp_path / "none"), {}, {"save_error": False}, world_size=2)
    assert [path.name for path in (tmp_path / "none" / "iter_0000007" / "compression").iterdir()] == [
        "manifest.json"
    ]
    states, _, lines = pool.run(load, str(tmp_path / "none"), {}, {}, world_size=2)[0]
    assert not any(errors.any() for *_, errors in states)
    assert "they were not saved (compression.save_error: false)" in lines[0]


def save_twice(folder: str) -> tuple[list[str], list[str]]:
    """In a worker: a save that begins before the one before it is final, and a folder that a kill left."""
    import torch

    import megatron_patch
    from megatron_patch.integration.checkpoint.save import ErrorSave

    gpt = _build({}, {})
    first_rank = torch.distributed.get_rank() == 0
    if first_rank:
        Path(folder, ".compression-left").mkdir(parents=True)
    saves = []
    for iteration in (7, 8):
        saves.append(ErrorSave(gpt.chunks, Path(folder, f"iter_{iteration:07d}"), iteration, gpt.optimizer))
        saves[-1].start()
    for saving in saves:
        saving.complete()
        if first_rank:
            saving.checkpoint.mkdir()
            saving.publish()
    torch.distributed.barrier()
    megatron_patch.disable()
    found = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return [path for path in found if path.endswith(".json")], [p for p in found if p[0] == "."]


def test_a_save_leaves_one_that_is_not_final_alone(pool: Any, tmp_path: Path) -> None:
    for manifests, staging in pool.run(save_twice, str(tmp_path), world_size=2):
        assert manifests == [f"iter_000000{n}/compression/manifest.json" for n in (7, 8)]
        assert staging == []


class OnGpu:
    """A tensor of a GPU, as far as a save asks: how often it is copied, and its copies are."""

    def __init__(self, tensor: Any, copies: list[str]) -> None:
        self.tensor, self.copies = tensor, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def cpu(self) -> Any:
        return self.to("cpu")

    def to(self, device: str, copy: bool = False) -> Any:
        import torch

        copies = self.copies

        class Copied(torch.Tensor):
            def clone(self) -> Any:
                copies.append("clone")
                return super().clone().as_subclass(torch.Tensor)

        copies.append(device)
        return self.tensor.to(device, copy=True).as_subclass(Copied)


def copies_of_a_save(folder: str, background: bool) -> list[list[str]]:
    """In a worker: how each state of a GPU is copied."""
    import torch

    import megatron_patch
    from megatron_patch.integration.checkpoint.save import ErrorSave
    from megatron_patch.session.rank_state import RankState

    gpt = _build({}, {})
    tensors, copies = RankState.tensors, []

    def counted(self: RankState) -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors(self):
            copies.append([])
            yield name, OnGpu(tensor, copies[-1])

    RankState.tensors = counted
    try:
        saving = ErrorSave(gpt.chunks, Path(folder, "iter_0000007"), 7, gpt.optimizer)
        if background:
            saving.start()
        else:
            saving.write()
        saving.complete()
    finally:
        RankState.tensors = tensors
    torch.distributed.barrier()
    megatron_patch.disable()
    return copies


@pytest.mark.parametrize("background", [False, True])
def test_a_save_copies_each_state_once(pool: Any, tmp_path: Path, background: bool) -> None:
    for copies in pool.run(copies_of_a_save, str(tmp_path), background, world_size=2):
        assert copies
        assert all(of_one == ["cpu"] for of_one in copies)


@contextlib.contextmanager
def _full_disk(after: int) -> Iterator[None]:
    """No file of this process grows beyond `after` bytes: writing more fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_where_it_fails(folder: str, rank: int, compression: dict[str, Any]) -> tuple[str, list[str]]:
    """In a worker: a save while the disk of one rank is full; the refusal, and what is left on disk."""
    import torch

    import megatron_patch
    from megatron_patch.integration.checkpoint.save import ErrorSave

    gpt = _build({}, compression)
    full = torch.distributed.get_rank() == rank
    refusal = ""
    try:
        saving = ErrorSave(gpt.chunks, Path(folder, "iter_0000007"), 7, gpt.optimizer)
        with _full_disk(1000) if full else contextlib.nullcontext():
            saving.write()
            saving.complete()
    except megatron_patch.UserError as error:
        refusal = str(error)
    torch.distributed.barrier()
    megatron_patch.disable()
    return refusal, sorted(path.name for path in Path(folder).rglob("*"))


@pytest.mark.parametrize(
    ("rank", "compression"),
    [(0, {}), (1, {}), (0, {"save_error": False})],
    ids=["rank 0's file", "rank 1's file", "the manifest"],
)
def test_a_full_disk_is_told_by_every_rank_and_leaves_nothing(
    pool: Any, tmp_path: Path, rank: int, compression: dict[str, Any]
) -> None:
    for refusal, left in pool.run(save_where_it_fails, str(tmp_path), rank, compression, world_size=2):
        assert f"the error state of rank {rank} could not be saved below {tmp_path}" in refusal
        assert "File too large" in refusal
        assert "the last complete checkpoint is still the latest" in refusal
        assert left == []


def test_a_folder_that_cannot_be_made_is_told_too(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for refusal, _ in pool.run(save_where_it_fails, str(tmp_path / "file"), 9, {}, world_size=2):
        assert "the error state of rank 0 could not be saved" in refusal
        assert "Not a directory" in refusal


def hooked() -> list[bool]:
    """In a worker: whether Megatron's functions are wrapped, at each turn of enable, attach and disable."""
    from integration.gpt_model import build
    from megatron.training import checkpointing, training

    import megatron_patch

    stock = checkpointing.save_checkpoint, training.load_checkpoint
    found = []

    def look() -> None:
        now = checkpointing.save_checkpoint, training.load_checkpoint
        found.append(now[0] is not stock[0] and now[1] is not stock[1])

    megatron_patch.enable()
    look()
    megatron_patch.enable()
    megatron_patch.disable()
    look()
    megatron_patch.attach(build().chunks)
    look()
    megatron_patch.disable()
    look()
    return [*found, (checkpointing.save_checkpoint, training.load_checkpoint) == stock]


def test_switching_on_hooks_into_checkpoints_and_switching_off_out(pool: Any) -> None:
    assert pool.run(hooked, world_size=1) == [[True, False, True, False, True]]
