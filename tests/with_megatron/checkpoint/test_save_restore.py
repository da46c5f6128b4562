"""Error states saved under one parallelism and restored under another, element by element.

What tells elements apart is their weights: the model that saves gives every weight a number of its own, and
Megatron's distributed checkpointing carries the weights to the model that loads. Which error belongs to which
element is then read off the buckets, on both sides, without our own bookkeeping.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import pickle
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

    from megatron_patch.megatron.attach import attachment_of

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
    from with_megatron.gpt_model import build

    import megatron_patch

    gpt = build(**parallel)
    megatron_patch.attach(
        gpt.chunks, megatron_patch.CompressionConfig(**{"method": "loco", "start_step": 0} | compression)
    )
    return gpt


def with_random_errors(gpt: Any) -> None:
    """After seven steps, weights that are numbered and random errors."""
    import torch

    from megatron_patch.megatron.attach import attachment_of

    _number_weights(gpt)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for chunk in gpt.chunks:
        state = attachment_of(chunk).state
        state.ledger.steps = state.ledger.steps_seen = 7
        for sender in state.senders:
            values = torch.randn(sender.layout.numel, generator=generator)
            sender.error.set(values * torch.rand(values.shape, generator=generator) ** 4)


def save(folder: str, parallel: dict[str, Any], compression: dict[str, Any]) -> Any:
    """In a worker: random errors, saved with the weights; returns the states."""
    from with_megatron.checkpoint.whole_checkpoints import write

    import megatron_patch

    gpt = _build(parallel, compression)
    with_random_errors(gpt)
    write(gpt, Path(folder, "iter_0000007"))
    states = _states(gpt)
    megatron_patch.disable()
    return states


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What is logged meanwhile about saved errors."""
    lines: list[str] = []
    logger = logging.getLogger("megatron_patch.megatron.checkpoint.dist_checkpointing")
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


def load(
    folder: str, parallel: dict[str, Any], compression: dict[str, Any], weights_alone: bool = False
) -> Any:
    """In a worker: another model with the weights and errors; returns its states, counters and log lines.

    `weights_alone` leaves the optimizer's state, which Megatron cannot give to another kind of optimizer.
    """
    from with_megatron.checkpoint.whole_checkpoints import read, read_weights_and_errors

    import megatron_patch
    from megatron_patch.megatron.attach import attachment_of

    gpt, checkpoint = _build(parallel, compression), Path(folder, "iter_0000007")
    with _captured() as lines:
        (read_weights_and_errors if weights_alone else read)(gpt, checkpoint)
    compressors = [attachment_of(chunk).state for chunk in gpt.chunks]
    states = _states(gpt)
    megatron_patch.disable()
    return states, [c.ledger.steps for c in compressors], lines


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
    reports = pool.run(load, str(tmp_path), {}, EXACT, weights_alone=True, world_size=2)
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


def _keys(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def _forget(folder: Path, *keys: str) -> None:
    """As if the checkpoint had been written without these keys."""
    metadata = _keys(folder)
    for key in keys:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _resize(folder: Path, key: str) -> None:
    import torch

    metadata = _keys(folder)
    metadata.state_dict_metadata[key].size = torch.Size([10])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _cut(folder: Path, key: str) -> None:
    """Cut the file short that has a key's data, where they begin."""
    places = _keys(folder).storage_data.items()
    place = next(place for index, place in places if index.fqn == key)
    os.truncate(folder / place.relative_path, place.offset + 10)


DAMAGES: dict[str, tuple[Any, str]] = {
    "no manifest": (
        lambda f: _forget(f, "megatron_loco.rank_1.manifest/shard_0_1"),
        "it has no error states of rank 1",
    ),
    "no data": (lambda f: _forget(f, "megatron_loco.rank_1"), "of rank 1 are missing or of another size"),
    "of another size": (lambda f: _resize(f, "megatron_loco.rank_1"), "missing or of another size"),
    "truncated": (lambda f: _cut(f, "megatron_loco.rank_1"), "its error states cannot be read"),
    "no files": (
        lambda f: [path.unlink() for path in f.glob("__1_*.distcp")],
        "its error states cannot be read",
    ),
}


def metadata_read(folder: str) -> int:
    """How often loading error states of another layout reads the checkpoint's metadata."""
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    original, read = dist_checkpointing._get_filesystem_reader, []

    def watched(where: Any) -> Any:
        reader = original(where)
        metadata = reader.read_metadata
        reader.read_metadata = lambda *args, **options: read.append(where) or metadata(*args, **options)
        return reader

    dist_checkpointing._get_filesystem_reader = watched
    try:
        load(folder, {}, EXACT)
    finally:
        dist_checkpointing._get_filesystem_reader = original
    return len(read)


def test_a_checkpoints_metadata_is_read_once_however_many_ranks_saved_it(pool: Any, tmp_path: Path) -> None:
    pool.run(save, str(tmp_path), {}, EXACT, world_size=4)
    assert pool.run(metadata_read, str(tmp_path), world_size=2) == [1, 1]


def load_damaged(folder: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """In a worker: what is said of every damage, strict and not, and whether errors are zero then."""
    import torch

    import megatron_patch
    from megatron_patch.megatron.attach import session_of
    from megatron_patch.megatron.checkpoint import dist_checkpointing
    from megatron_patch.megatron.checkpoint.element_map import rank_state_of

    found: dict[str, Any] = {}
    for strict in (False, True):
        gpt = _build(parallel, {"strict_load": strict})
        compressor = session_of(gpt.chunks[0])
        for name, (damage, _) in DAMAGES.items():
            copy = Path(folder, f"{name} {strict}", "iter_0000007")
            if torch.distributed.get_rank() == 0:
                shutil.copytree(Path(folder, "iter_0000007"), copy)
                damage(copy)
            torch.distributed.barrier()
            for sender in compressor.senders:
                sender.error.set(torch.ones(sender.layout.numel))
            rank = rank_state_of(gpt.chunks)
            read = functools.partial(dist_checkpointing._reader, rank, copy, "megatron_loco")
            with _captured() as lines:
                try:
                    dist_checkpointing.restore(rank, copy, read, 3, 1.0)
                except megatron_patch.UserError as error:
                    lines.append(f"refused: {error}")
            zero = not any(sender.error.flat().any() for sender in compressor.senders)
            found[f"{name} {strict}"] = (lines, zero, compressor.ledger.steps)
        megatron_patch.disable()
    return found


@pytest.mark.parametrize("layout", ["the same", "another"])
def test_damage_is_found_and_named(pool: Any, tmp_path: Path, layout: str) -> None:
    """By the rank that needs what is damaged: under the same layout that is rank 1 alone.

    It keeps the counters of the others, or it would wait for them in other exchanges than they for it.
    """
    pool.run(save, str(tmp_path), {}, {}, world_size=2)
    parallel = {} if layout == "the same" else BUCKETS
    reports = pool.run(load_damaged, str(tmp_path), parallel, world_size=2)
    for name, (_, message) in DAMAGES.items():
        for report in reports[1:] if layout == "the same" else reports:
            lines, zero, steps = report[f"{name} False"]
            assert len(lines) == 1
            assert "errors start from zero: " in lines[0]
            assert message in lines[0], name
            assert str(tmp_path) in lines[0]
            assert (zero, steps) == (True, 7)
            lines, _, _ = report[f"{name} True"]
            assert len(lines) == 1
            assert lines[0].startswith("refused: ")
            assert message in lines[0]
            assert "compression.strict_load" in lines[0]


def loaded_by_one(folder: str) -> tuple[int, bool]:
    """In a worker: rank 0 alone loads a checkpoint; returns its steps, and whether it has the errors."""
    import torch
    from megatron.core import dist_checkpointing
    from with_megatron.checkpoint.whole_checkpoints import tree, write

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    gpt = _build({}, {})
    with_random_errors(gpt)
    write(gpt, Path(folder))
    session = session_of(gpt.chunks[0])
    session.restart(0)
    state = tree(gpt)
    if torch.distributed.get_rank() == 0:
        dist_checkpointing.load(state, folder, validate_access_integrity=False)
    found = session.ledger.steps, any(bool(sender.error.flat().any()) for sender in session.senders)
    torch.distributed.barrier()
    megatron_patch.disable()
    return found


def test_a_load_waits_for_no_other_rank(pool: Any, tmp_path: Path) -> None:
    if os.environ.get("EXPECTED_MEGATRON_CORE", "").startswith("0.17"):
        pytest.skip("until 0.18 Megatron's own load gathers over all ranks")
    assert pool.run(loaded_by_one, str(tmp_path / "checkpoint"), world_size=2) == [(7, True), (0, False)]


def save_changed(folder: str, compression: dict[str, Any], changes: dict[str, Any]) -> None:
    """In a worker: a checkpoint whose manifests say something else."""
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    original = dist_checkpointing.pack

    def changed(*args: Any) -> Any:
        manifest, data = original(*args)
        return json.dumps(json.loads(manifest) | changes), data

    dist_checkpointing.pack = changed
    try:
        save(folder, {}, compression)
    finally:
        dist_checkpointing.pack = original


def save_stock(folder: str) -> None:
    """In a worker: a checkpoint of a model whose gradients are not compressed."""
    from with_megatron.checkpoint.whole_checkpoints import write

    import megatron_patch

    gpt = _build({}, {"method": "none"})
    _number_weights(gpt)
    write(gpt, Path(folder, "iter_0000007"))
    megatron_patch.disable()


def test_a_checkpoint_without_errors_says_so(pool: Any, tmp_path: Path) -> None:
    """Stock Megatron's; one with save_error: false; one from within a step; another method's; a later one."""
    pool.run(save_stock, str(tmp_path), world_size=2)
    stock, steps, lines = pool.run(load, str(tmp_path), {}, {}, world_size=2)[0]
    assert not any(errors.any() for *_, errors in stock)
    assert steps == [7]
    assert lines == ["megatron-loco: step 7: errors start from zero: the checkpoint has none"]
    for changes, line in (
        ({"mid_step": True}, "the checkpoint is from within a step, which runs again"),
        ({"config": {"method": "error_feedback", "save_error": True}}, "is of method error_feedback"),
        ({"format": 99}, "format 99; this release reads 1"),
        ({"events": {"of": "another release"}}, "what this release does not know"),
        ({"positions": 1}, "what this release does not know"),
    ):
        folder = tmp_path / next(iter(changes))
        pool.run(save_changed, str(folder), {}, changes, world_size=2)
        states, steps, lines = pool.run(load, str(folder), {}, {}, world_size=2)[0]
        assert not any(errors.any() for *_, errors in states)
        assert steps == [7]
        assert line in lines[0]
    pool.run(save, str(tmp_path / "none"), {}, {"save_error": False}, world_size=2)
    keys = pool.run(saved_keys, str(tmp_path / "none"), world_size=1)[0]
    assert keys == ["megatron_loco.rank_0.manifest/shard_0_1", "megatron_loco.rank_1.manifest/shard_0_1"]
    states, _, lines = pool.run(load, str(tmp_path / "none"), {}, {}, world_size=2)[0]
    assert not any(errors.any() for *_, errors in states)
    assert "they were not saved (compression.save_error: false)" in lines[0]


def saved_keys(folder: str) -> list[str]:
    keys = _keys(Path(folder, "iter_0000007")).state_dict_metadata
    return sorted(key for key in keys if "megatron_loco" in key)


def save_in_the_background(folder: str, constant: bool) -> list[bool]:
    """In a worker: two asynchronous saves, of which the first is written after errors have changed.

    Returns whether each was loaded as of the moment of its save.
    """
    import torch
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from with_megatron.checkpoint.whole_checkpoints import read, write

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    strategy = TorchDistSaveShardedStrategy(cached_metadata=constant)
    gpt = _build({}, {})
    with_random_errors(gpt)
    compressor = session_of(gpt.chunks[0])
    saved = []
    for place in range(2):
        request = write(
            gpt,
            Path(folder, f"iter_000000{place}"),
            async_sharded_save=True,
            async_strategy="mcore",
            sharded_strategy=strategy,
        )
        saved.append([sender.error.flat().clone() for sender in compressor.senders])
        for sender in compressor.senders:
            sender.error.set(torch.full((sender.layout.numel,), 3.0 + place))
        request.execute_sync()
    same = []
    for place in range(2):
        read(gpt, Path(folder, f"iter_000000{place}"))
        now = [sender.error.flat() for sender in compressor.senders]
        same.append(all(torch.equal(a, b) for a, b in zip(saved[place], now, strict=True)))
    megatron_patch.disable()
    return same


@pytest.mark.parametrize("constant", [False, True])
def test_an_asynchronous_save_is_of_its_moment(pool: Any, tmp_path: Path, constant: bool) -> None:
    assert pool.run(save_in_the_background, str(tmp_path), constant, world_size=2) == [[True, True]] * 2


def two_models(folder: str) -> dict[str, Any]:
    """In a worker: a policy and a critic in one checkpoint; each alone; weights without an optimizer."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
    from with_megatron.checkpoint.whole_checkpoints import tree

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    models = {name: _build({}, {}) for name in ("policy", "critic")}
    sessions = {name: session_of(gpt.chunks[0]) for name, gpt in models.items()}
    for number, (gpt, session) in enumerate(zip(models.values(), sessions.values(), strict=True)):
        with_random_errors(gpt)
        session.ledger.steps = 7 + number
        for sender in session.senders:
            sender.error.set(torch.randn(sender.layout.numel))
    kept = {name: [s.error.flat().clone() for s in session.senders] for name, session in sessions.items()}

    def both(names: list[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            found[name] = tree(models[name])
            add_prefix_for_sharding(found[name], f"{name}.")
        return found

    def cleared() -> None:
        for session in sessions.values():
            session.ledger.steps = 0
            session.clear_errors()

    def state(name: str) -> tuple[int, bool, bool]:
        now = [sender.error.flat() for sender in sessions[name].senders]
        same = all(torch.equal(a, b) for a, b in zip(kept[name], now, strict=True))
        return sessions[name].ledger.steps, same, not any(error.any() for error in now)

    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(both(["policy", "critic"]), folder)
    found: dict[str, Any] = {}
    for names in (["policy", "critic"], ["critic"]):
        cleared()
        dist_checkpointing.load(both(names), folder)
        found[" and ".join(names)] = {name: state(name) for name in models}
    cleared()
    reference = both(["policy"])
    del reference["policy"]["optimizer"]
    dist_checkpointing.load(reference, folder)
    found["reference"] = {name: state(name) for name in models}
    megatron_patch.disable()
    return found


def test_models_of_one_checkpoint_keep_apart(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(two_models, str(tmp_path / "checkpoint"), world_size=2):
        both = {"policy": (7, True, False), "critic": (8, True, False)}
        assert found["policy and critic"] == both
        assert found["critic"] == both | {"policy": (0, False, True)}
        assert found["reference"] == {"policy": (0, False, True), "critic": (0, False, True)}


def unread(folder: str) -> tuple[str, bool]:
    """In a worker: what saving raises after a gather that did not fit, of which nothing is known yet."""
    from unittest import mock

    from with_megatron.checkpoint.whole_checkpoints import write
    from with_megatron.gpt_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import attachment_of
    from megatron_patch.weights.batch import WeightsDiffer

    gpt = build(dtype="bf16")
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="none", weight_gather="exact"))
    gpt.backward(0)
    gpt.update()
    handle = mock.Mock(**{"check.side_effect": WeightsDiffer("weight gather of bucket 0")})
    attachment_of(gpt.chunks[0]).weights.unchecked.append(handle)
    with pytest.raises(WeightsDiffer) as raised:
        write(gpt, Path(folder))
    megatron_patch.disable()
    return str(raised.value), any(Path(folder).iterdir())


def test_a_gather_that_did_not_fit_is_found_before_weights_are_saved(pool: Any, tmp_path: Path) -> None:
    """On CUDA its verdict is read later than it is made, on a CPU at once: the handle is a stand-in."""
    found = pool.run(unread, str(tmp_path / "checkpoint"), world_size=2)
    assert found == [("weight gather of bucket 0", False)] * 2


def keys_to_compare() -> tuple[list[str], list[str]]:
    """In a worker: the keys of a checkpoint that Megatron compares with what is asked for."""
    from types import SimpleNamespace

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
    import torch
    from with_megatron.checkpoint.whole_checkpoints import read, write

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    gpt = _build({"dtype": "fp16"}, {"error_dtype": "fp32"})
    (sender, *_) = session_of(gpt.chunks[0]).senders
    for part in gpt.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(save_scale)
    sender.error.set(torch.arange(sender.layout.numel).float() * save_scale)
    write(gpt, Path(folder))
    before = sender.error.flat() / save_scale
    for part in gpt.optimizer.chained_optimizers:
        part.grad_scaler._scale.fill_(new_scale)
    state = read(gpt, Path(folder))
    after = sender.error.flat() / float(state["optimizer"]["grad_scaler"]["scale"])
    megatron_patch.disable()
    return before.tolist()[:50], after.tolist()[:50]


def test_errors_are_in_the_loss_scale_that_was_loaded(pool: Any, tmp_path: Path) -> None:
    """The optimizer takes it over after the errors are read."""
    for before, after in pool.run(scaled, str(tmp_path / "checkpoint"), 1024.0, 64.0, world_size=2):
        assert before == after
        assert any(before)


def as_of_0_2(folder: str, parallel: dict[str, Any], compression: dict[str, Any]) -> Any:
    """In a worker: random errors in files of release 0.2, beside a stock checkpoint; returns the states."""
    import torch
    from safetensors.torch import save_file
    from with_megatron.checkpoint.whole_checkpoints import write

    import megatron_patch
    from megatron_patch.session.sharded_state import MANIFEST

    gpt = _build(parallel, compression)
    with_random_errors(gpt)
    states, rank = _states(gpt), torch.distributed.get_rank()
    own = megatron_patch.state_dict(gpt.chunks, gpt.optimizer)
    manifest = json.loads(own.pop(MANIFEST))
    megatron_patch.disable()
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="none"))
    write(gpt, Path(folder, "iter_0000007"))
    megatron_patch.disable()
    below = Path(folder, "iter_0000007", "compression")
    below.mkdir(exist_ok=True)
    path = below / f"rank-0000{rank}.safetensors"
    save_file({name.removeprefix(f"megatron_loco_rank_{rank}."): value for name, value in own.items()}, path)
    file = {
        "file": path.name,
        "nbytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    files: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(files, file)
    for entry, listed in zip(manifest["ranks"], files, strict=True):
        entry["file"] = listed
    manifest["id"] = "0" * 32
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    if rank == 0:
        (below / "manifest.json").write_text(json.dumps(manifest, indent=1))
    torch.distributed.barrier()
    return states


def test_folders_of_earlier_releases_are_read(pool: Any, tmp_path: Path) -> None:
    old = pool.run(as_of_0_2, str(tmp_path), {}, {}, world_size=2)
    reports = pool.run(load, str(tmp_path), {}, {}, world_size=2)
    assert "error states restored exactly" in reports[0][2][0]
    for before, (after, steps, _) in zip(old, reports, strict=True):
        assert steps == [7]
        for (*_, errors), (*_, found) in zip(before, after, strict=True):
            assert (errors == found).all()
            assert errors.any()
    assert "carried over" in pool.run(load, str(tmp_path), BUCKETS, {}, world_size=2)[0][2][0]
    file = tmp_path / "iter_0000007" / "compression" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    states, _, lines = pool.run(load, str(tmp_path), {}, {}, world_size=2)[0]
    assert "rank-00000.safetensors is damaged: its checksum differs" in lines[0]
    assert not any(errors.any() for *_, errors in states)


def hooked() -> list[bool]:
    """In a worker: whether Megatron's functions are wrapped, at each turn of enable, attach and disable."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training import checkpointing, training
    from with_megatron.gpt_model import build

    import megatron_patch

    def functions() -> tuple[Any, ...]:
        core = dist_checkpointing.save, dist_checkpointing.load, DistributedOptimizer.sharded_state_dict
        return checkpointing.save_checkpoint, training.load_checkpoint, *core

    stock = functions()
    found = []

    def look() -> None:
        changed = {now is not before for now, before in zip(functions(), stock, strict=True)}
        assert len(changed) == 1
        found.append(changed.pop())

    megatron_patch.enable()
    look()
    megatron_patch.enable()
    megatron_patch.disable()
    look()
    megatron_patch.attach(build().chunks)
    look()
    megatron_patch.disable()
    look()
    return [*found, functions() == stock]


def test_switching_on_hooks_into_checkpoints_and_switching_off_out(pool: Any) -> None:
    assert pool.run(hooked, world_size=1) == [[True, False, True, False, True]]
