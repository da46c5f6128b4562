"""1-bit Adam goes on from a checkpoint: exactly in both phases and over the switch, and on other ranks.

What must come back is the phase, the senders' and the owners' errors, and Adam's own state, which is
Megatron's to save; momentum is made of that. The engine's checkpoints are resumed in test_resume.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from seeds import seeded
from with_megatron.checkpoint.test_save_restore import near

REPLICATED = {"ddp": {"use_distributed_optimizer": False}, "optimizer": {"use_distributed_optimizer": False}}
OVERLAP = {"overlap": True, "bucket_size": 400}
RANKS = 4
CUTS = (-5, 0, 3)
"""Checkpoints, in steps after the switch."""
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "adam_beta2": 0.8}
"""The variance forgets in 5 steps."""
# name: (model, compression, the step of the switch)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "distributed, fixed": (OVERLAP, {"warmup_steps": 6}, 6),
    "replicated, auto": (REPLICATED, {}, 10),
}
SLOW = {
    "replicated, fixed, int8": (REPLICATED, {"warmup_steps": 6, "error_dtype": "int8"}, 6),
    "distributed, auto, bf16": (OVERLAP | {"dtypes": ("bfloat16", "float32")}, {}, 10),
    "replicated, auto, two hops": (REPLICATED, {"ranks_per_node": 2}, 10),
    "distributed, fixed, no errors": (OVERLAP, {"warmup_steps": 6, "error_compensation": False}, 6),
}


def start(model: dict[str, Any], compression: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """(tiny model, its attachment)."""
    from with_megatron.tiny_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import attachment_of

    optimizer = ADAM | model.get("optimizer", {})
    tiny = build(**{**model, "optimizer": optimizer, "seed": seed})
    options = {"error_dtype": "fp32", **compression}
    megatron_patch.attach([tiny.ddp], megatron_patch.CompressionConfig(method="onebit_adam", **options))
    return tiny, attachment_of(tiny.ddp)


def step_of(tiny: Any, step: int) -> None:
    """One step; the learning rate rises for 4, and gradients repeat: the variance settles."""
    for group in tiny.optimizer.param_groups:
        group["lr"] = ADAM["lr"] * min((step + 1) / 4, 1 - step / 100)
        group["weight_decay"] = ADAM["weight_decay"] * group["wd_mult"]
    tiny.optimizer.zero_grad()
    tiny.step(tiny.random_gradients(step % 5))


def state_of(tiny: Any, attachment: Any) -> dict[str, Any]:
    """Copies of everything that the next step depends on."""
    from megatron_patch.megatron.seams.optimizer_step import leaves_of

    compressor = attachment.state
    adam = [part.optimizer for part in leaves_of(tiny.optimizer)]
    found = {
        "weights": [parameter.detach() for parameter in tiny.parameters],
        "main weights": [p.detach() for a in adam for group in a.param_groups for p in group["params"]],
        "adam": [a.state_dict() for a in adam],
        "errors": [s.error.flat() for s in compressor.senders if s.error is not None],
        "momentum": [held for seam in attachment.seams for held in seam.momentum.held or ()],
        "phase": compressor.ledger.phase,
        "counts": (compressor.ledger.steps, compressor.ledger.steps_seen, compressor.ledger.events),
    }
    return copy.deepcopy(found)


def _put_back(tiny: Any, state: dict[str, Any]) -> None:
    """What Megatron's checkpoint would."""
    import torch

    from megatron_patch.megatron.seams.optimizer_step import leaves_of

    adam = [part.optimizer for part in leaves_of(tiny.optimizer)]
    main = [p for a in adam for group in a.param_groups for p in group["params"]]
    with torch.no_grad():
        for parameters, values in ((tiny.parameters, state["weights"]), (main, state["main weights"])):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
    for a, saved in zip(adam, state["adam"], strict=True):
        a.load_state_dict(copy.deepcopy(saved))


def resume(model: dict[str, Any], compression: dict[str, Any], switch: int) -> dict[str, Any]:
    """In a worker: a run left alone, saved before and after the switch, and one from every checkpoint."""
    import torch

    import megatron_patch
    from megatron_patch.megatron.checkpoint.element_map import rank_state_of
    from megatron_patch.session.packed import PackedReader, pack

    tiny, attachment = start(model, compression, seed=1234)
    kept: dict[int, tuple[dict[str, Any], tuple[str, Any]]] = {}
    steps = switch + CUTS[-1] + 3
    for step in range(steps):
        if step - switch in CUTS:
            kept[step] = state_of(tiny, attachment), pack(rank_state_of([tiny.ddp]), 1.0)
        step_of(tiny, step)
    whole = state_of(tiny, attachment)
    megatron_patch.disable()

    different = {}
    for cut, (state, (manifest, data)) in kept.items():
        tiny, attachment = start(model, compression, seed=99)
        _put_back(tiny, state)
        rank = rank_state_of([tiny.ddp])
        rank.start_from_zero(cut)
        ranks = range(torch.distributed.get_world_size())
        told = PackedReader(rank, ranks, lambda _, m=manifest: m, lambda *_, d=data: d).apply(1.0)
        assert told == "error states restored exactly" or not rank.config.keeps_errors
        for step in range(cut, steps):
            step_of(tiny, step)
        again = state_of(tiny, attachment)
        different[cut - switch] = [name for name in whole if not equal(whole[name], again[name])]
        megatron_patch.disable()
    errors = sum(float(error.abs().sum()) for error in whole["errors"])
    return {"different": different, "phase": whole["phase"], "errors": errors}


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through lists and dictionaries."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_resumed_run_is_the_undisturbed_one(pool: Any, tmp_path: Path, name: str) -> None:
    """Saved in the warm-up, as it ends, and in the compressed phase."""
    model, compression, switch = {**CASES, **SLOW}[name]
    for report in pool.run(resume, model, compression, switch, world_size=RANKS):
        phase = report["phase"]
        assert (phase.switch_step, phase.variance_steps) == (switch, switch)
        assert report["different"] == {cut: [] for cut in CUTS}
        assert (report["errors"] > 0) == compression.get("error_compensation", True)


# --- other ranks -----------------------------------------------------------------------------------------


def _owed(gpt: Any) -> list[tuple[str, int, Any, Any]]:
    """(whose, sender's number, elements' weights, elements' errors) of this rank's errors, unpadded."""
    import torch

    from megatron_patch.megatron.attach import attachment_of

    found = []
    for seam in (seam for chunk in gpt.chunks for seam in attachment_of(chunk).seams):
        rank, (stage,) = seam.momentum.group.rank(), seam.stages
        for bucket, both in zip(seam.group.buckets, stage.made.exchanges, strict=True):
            numbers = torch.full((bucket.grad_data.numel(),), -1.0)
            for parameter, (start, end) in bucket.param_to_index.items():
                numbers[start:end] = parameter.detach().flatten()
            found.append(("sender", rank, numbers, both.sender.error.flat()))
            owned = numbers.split(both.sender.layout.shard_size)
            if rank < len(owned):  # a small bucket has fewer shards than ranks
                found.append(("owner", 0, owned[rank], both.owner.error.flat()))
    return [(who, n, of[of >= 0].tolist(), error[of >= 0].tolist()) for who, n, of, error in found]


def change_ranks(folder: str, model: dict[str, Any], save: bool) -> tuple[Any, list[str], list[Any]]:
    """In a worker: save random errors with the weights that number elements; or load both."""
    import torch
    from with_megatron.checkpoint.test_save_restore import _captured, _number_weights
    from with_megatron.checkpoint.whole_checkpoints import read_weights_and_errors, write
    from with_megatron.gpt_model import build

    import megatron_patch
    from megatron_patch.megatron.attach import session_of

    gpt = build(**model)
    config = megatron_patch.CompressionConfig(method="onebit_adam", warmup_steps=4, error_dtype="fp32")
    megatron_patch.attach(gpt.chunks, config)
    compressor = session_of(gpt.chunks[0])
    lines: list[str] = []
    if save:
        _number_weights(gpt)
        generator = torch.Generator().manual_seed(seeded(torch.distributed.get_rank()))
        compressor.ledger.steps = 7
        compressor.ledger.phase.switch_step = compressor.ledger.phase.variance_steps = 4
        for sender in compressor.senders:
            sender.error.set(torch.randn(sender.layout.numel, generator=generator))
        write(gpt, Path(folder, "iter_0000007"))
    else:
        with _captured() as lines:
            read_weights_and_errors(gpt, Path(folder, "iter_0000007"))
    phase = compressor.ledger.phase
    counts = [compressor.ledger.steps, phase.switch_step, phase.variance_steps, compressor.active]
    owed = _owed(gpt)
    megatron_patch.disable()
    return owed, lines, counts


def _by_element(reports: list[Any]) -> dict[str, dict[float, dict[int, float]]]:
    """whose -> element -> sender's number -> its error."""
    found: dict[str, dict[float, dict[int, float]]] = {"sender": {}, "owner": {}}
    for owed, *_ in reports:
        for who, number, elements, errors in owed:
            for element, error in zip(elements, errors, strict=True):
                found[who].setdefault(element, {})[number] = error
    return found


SHARDED: dict[str, Any] = {}
WHOLE = {"ddp": {"use_distributed_optimizer": False}}
BUCKETS = {"ddp": {"bucket_size": 1500, "overlap_grad_reduce": True}}


@pytest.mark.parametrize(
    ("ranks", "saved_as", "new_ranks", "loaded_as"),
    [
        (4, SHARDED, 2, BUCKETS),
        (2, WHOLE, 4, WHOLE),
        (4, WHOLE, 2, SHARDED),
        (4, SHARDED, 4, WHOLE),
    ],
    ids=[
        "distributed 4 -> 2",
        "replicated 2 -> 4",
        "replicated 4 -> distributed 2",
        "distributed -> replicated",
    ],
)
def test_other_ranks_keep_the_mean_of_the_senders_errors_and_the_owners_own(
    pool: Any, tmp_path: Path, ranks: int, saved_as: Any, new_ranks: int, loaded_as: Any
) -> None:
    old = _by_element(pool.run(change_ranks, str(tmp_path), saved_as, True, world_size=ranks))
    reports = pool.run(change_ranks, str(tmp_path), loaded_as, False, world_size=new_ranks)
    said = "every sender keeps its own" if ranks == new_ranks else "senders start from the mean"
    assert said in reports[0][1][0]
    assert all(counts == [7, 4, 4, True] for *_, counts in reports)
    new = _by_element(reports)
    assert new["sender"].keys() == old["sender"].keys() == new["owner"].keys()
    assert len(new["sender"]) > 5_000
    for element, errors in new["sender"].items():
        before = old["sender"][element]
        mean = sum(before.values()) / ranks
        expected = before if ranks == new_ranks else dict.fromkeys(range(new_ranks), mean)
        assert errors.keys() == expected.keys()
        assert all(near([error], expected[sender]) for sender, error in errors.items()), element
        assert near([new["owner"][element][0]], old["owner"][element][0], tolerance=1e-12), element
