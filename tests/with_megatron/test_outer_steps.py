"""Outer steps between optimizer instances: instances are apart, and what they exchange is the simulation's.

Between outer steps an instance must train, bit for bit, as stock Megatron trains it alone on its data. An
outer step is compared with float64: the mean of how far the instances moved, or its low-bit all-reduce, then
SGD with Nesterov momentum from the formulas of its paper and of torch.optim.SGD.
"""

from __future__ import annotations

import functools
import gc
import re
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from coded_values import keep_sent
from simulation.all_reduce_float64 import AllReduceAgreement
from simulation.loco_float64 import block_labels
from with_megatron.gpt_model import GATHERED, MOE, OVERLAP, build
from with_megatron.recording import weights
from with_megatron.seam_runs import attach, attachment_of, logged, refusal

import megatron_patch
from megatron_patch.releases import too_old

NEVER = {"method": "none", "outer_interval": 1000}
BF16 = {"dtype": "bf16", "ddp": {"grad_reduce_in_fp32": False, **GATHERED}}
CLIP = {"clip_grad": 0.1}
RATE, MOMENTUM = 0.7, 0.9
DELAYED = {"outer_interval": 4, "outer_delay": 3}
IN_TURNS = {"outer_interval": 7, "outer_delay": 2}
PLAIN = {"outer_rate": 1.0, "outer_momentum": 0.0}
STEPS = 5


def trained(model: dict[str, Any], compression: dict[str, Any] | None, instance: int) -> dict[str, Any]:
    """In a worker: weights and norms after STEPS steps; without instances, on the data of `instance`."""
    gpt = build(**model)
    if compression is None:
        from megatron.core import parallel_state

        gpt.seed += 100_003 * parallel_state.get_data_parallel_world_size() * instance  # gpt_model.batches
    else:
        megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**compression))
    norms = []
    for step in range(STEPS):
        gpt.backward(step)
        norms.append(gpt.optimizer.step()[1])
    gpt.gather()
    return {"weights": weights(gpt), "norms": norms, "rank": torch.distributed.get_rank()}


ALONE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "bf16, overlap": (4, BF16 | {"optimizer": CLIP}, {"weight_gather": "exact"}),
    "experts, average": (4, MOE | {"ddp": {"average_in_collective": True}}, {}),
    "tensor parallel, one rank an instance": (4, {"tp": 2, "sequence_parallel": True}, {}),
}


@pytest.mark.parametrize("case", ALONE)
def test_between_outer_steps_an_instance_trains_as_a_job_of_its_own(pool, case: str) -> None:
    ranks, model, compression = ALONE[case]
    together = pool.run(trained, model | {"instances": 2}, NEVER | compression, 0, world_size=ranks)
    for instance in (0, 1):
        alone = pool.run(trained, model, None, instance, world_size=ranks // 2)
        for rank, one in enumerate(alone):
            mine = together[instance * (ranks // 2) + rank]
            assert mine["norms"] == one["norms"]
            for name, values in one["weights"].items():
                assert np.array_equal(mine["weights"][name].numpy(), values.numpy()), (instance, name)
    assert together[0]["norms"] != together[-1]["norms"]


def exchanged(model: dict[str, Any], compression: dict[str, Any], steps: int) -> dict[str, Any]:
    """In a worker: fp32 weights before and after every outer step, and what senders sent."""
    gpt = build(**model)
    config = {"start_step": 0, "outer_rate": RATE, "outer_momentum": MOMENTUM} | compression
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**config))
    found: dict[str, Any] = {"shards": [], "weights": [], "bytes": [], "outer_bytes": []}
    for chunk in gpt.chunks:
        outer = attachment_of(chunk).outer
        for shard in outer._shards:
            spans = [(start, tuple(p.shape)) for p, (start, _) in shard.bucket.param_to_index.items()]
            entry = {"start": shard.start, "numel": shard.numel, "spans": spans, "steps": []}
            entry["bucket"] = shard.bucket.grad_data.numel()
            (entry["turn"],) = (start for start, turn in outer.turns.items() if shard in turn)
            found["shards"].append(entry)
        _watch(outer, found["shards"][-len(outer._shards) :])
    for step in range(steps):
        gpt.step(step)
        since = step + 1 - config.get("outer_delay", 0)
        if since > 0 and since % config["outer_interval"] == 0:
            gpt.gather()
            found["weights"].append(weights(gpt))
        sent = sum(attachment_of(chunk).outer.sent.nbytes for chunk in gpt.chunks)
        found["outer_bytes"].append(sent)
        found["bytes"].append(megatron_patch.report(gpt.chunks).gradient_bytes - sent)
    megatron_patch.disable()
    found["stock"] = [g.ddp_config.num_distributed_optimizer_instances for g in gpt.chunks[0].bucket_groups]
    found["peers"] = torch.distributed.get_process_group_ranks(gpt.chunks[0].inter_dist_opt_group)
    return found


def _watch(outer: Any, entries: list[dict[str, Any]]) -> None:
    """Keep what every outer step of a chunk starts from, sends, and leaves."""
    for name in ("begin", "step", "start"):
        _before_call(outer, name, functools.partial(_noted, outer, entries, name))
    for shard, entry in zip(outer._shards, entries, strict=True):
        for name, sender in zip(
            ("sent", "owned"), shard.exchange.senders if shard.exchange else (), strict=False
        ):
            keep_sent(sender, lambda sent, name=name, steps=entry["steps"]: steps[-1].update({name: sent}))
        receive = shard.receive

        def receiving(masters: Any, *rates: float, shard=shard, steps=entry["steps"], own=receive) -> None:
            difference, here = shard.under_way.difference, torch.device("cpu")
            steps[-1]["now"] = shard.weights(masters, here)
            own(masters, *rates)
            steps[-1] |= {"mean": difference.clone(), "after": shard.weights(masters, here)}
            steps[-1]["anchor"] = shard.anchor.clone()

        shard.receive = receiving


def _before_call(of: Any, name: str, also: Any) -> None:
    original = getattr(of, name)

    def call(*args: Any) -> Any:
        also(args[0])
        return original(*args)

    setattr(of, name, call)


def _noted(outer: Any, entries: list[dict[str, Any]], name: str, masters: Any) -> None:
    turn = outer.turns[outer.steps] if name == "start" else outer._shards
    for shard, entry in zip(outer._shards, entries, strict=True):
        if all(shard is not one for one in turn):
            continue
        weights = shard.weights(masters, torch.device("cpu"))
        if name == "begin":
            entry["first"] = weights
        else:
            entry["steps"].append({"before": weights})


CHUNKS = {"pp": 2, "vpp": 2, "layers": 4}
EXCHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in full": ({"instances": 2}, {"method": "none"}),
    "in full, four instances, bf16": (BF16 | {"instances": 4}, {"method": "none", "weight_gather": "exact"}),
    "4 bits, error feedback, bf16": (BF16 | {"instances": 2}, {"bits": 4, "method": "error_feedback"}),
    "2 bits, experts": (MOE | {"instances": 2}, {"bits": 2, "weight_gather": "exact"}),
    "plain averaging, 4 bits": ({"instances": 2}, {"bits": 4, **PLAIN}),
    "in turns": ({"instances": 2, "ddp": GATHERED}, {"method": "none"} | IN_TURNS),
    "in turns, 4 bits, bf16": (
        BF16 | {"instances": 2},
        {"bits": 4, "weight_gather": "exact", "outer_interval": 6, "outer_delay": 3},
    ),
    "delayed by a step, 2 bits, experts": (MOE | {"instances": 2}, {"bits": 2, **DELAYED, "outer_delay": 1}),
    "delayed, 4 bits, virtual chunks": ({"instances": 2, **CHUNKS}, {"bits": 4, **DELAYED, **PLAIN}),
}


@pytest.mark.parametrize("case", EXCHANGED)
def test_an_outer_step_is_the_simulation_s(pool, case: str) -> None:
    model, compression = EXCHANGED[case]
    compression = {"outer_interval": 2} | compression
    interval, delay = compression["outer_interval"], compression.get("outer_delay", 0)
    reports = pool.run(exchanged, model, compression, 3 * interval + delay, world_size=4)
    instances = model["instances"]
    assert all(set(report["stock"]) == {instances} for report in reports), "detached, DDP is as before"
    for report in reports:
        assert len(set(report["bytes"])) == 1, "outer steps apart, every step sends the same gradients"
        of_turns = np.reshape(report["outer_bytes"][: 3 * interval], (3, interval))
        assert (of_turns == of_turns[0]).all()
        sent, turns = of_turns[0].sum(), {shard["turn"] for shard in report["shards"]}
        assert set(np.flatnonzero(of_turns[0]) + 1) == turns <= set(range(max(1, delay), interval + 1))
        assert len(turns) > 1 or "turns" not in case
        in_full = sum(8 * shard["numel"] * (instances - 1) / instances for shard in report["shards"])
        assert sent == in_full if compression.get("method") == "none" else 0 < sent < in_full / 3
    for peers in {tuple(report["peers"]) for report in reports}:
        assert len(peers) == instances
        for shards in zip(*(reports[rank]["shards"] for rank in peers), strict=True):
            _compare(shards, compression, instances)
        first = reports[peers[0]]
        for rank in peers[1:] if not delay else ():
            for ours, theirs in zip(reports[rank]["weights"], first["weights"], strict=True):
                assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in theirs)


def _compare(shards: tuple[dict[str, Any], ...], compression: dict[str, Any], instances: int) -> None:
    """One shard of one bucket, in all instances."""
    numel = shards[0]["numel"]
    anchor = shards[0]["first"].double().numpy()
    velocity = np.zeros(numel)
    rate, momentum = compression.get("outer_rate", RATE), compression.get("outer_momentum", MOMENTUM)
    assert all(np.array_equal(shard["first"].numpy(), shards[0]["first"].numpy()) for shard in shards)
    labels = block_labels(shards[0]["bucket"], shards[0]["spans"], 128)[shards[0]["start"] :][:numel]
    padded = np.concatenate([labels, np.full(-numel % instances, -1)])
    agreement = AllReduceAgreement(
        instances,
        numel,
        labels=padded,
        average=True,
        bits=compression.get("bits", 4),
        **({"beta": 0.0} if compression.get("method") == "error_feedback" else {}),
    )
    ended = [[step for step in shard["steps"] if "after" in step] for shard in shards]
    assert len(ended[0]) == 3
    under_way = [step for shard in shards for step in shard["steps"][3:]]
    assert not under_way or compression.get("outer_delay"), "of a turn that starts with the last step"
    assert len(under_way) in (0, len(shards))
    for step in zip(*ended, strict=True):
        real_anchor = anchor.astype(np.float32)
        differences = np.stack([real_anchor - one["before"].numpy() for one in step])
        assert np.abs(differences).max() > 0 or numel == 0
        if compression.get("method") == "none":
            mean = differences.astype(np.float64).mean(axis=0)
        else:
            size = -(-numel // instances)
            lengths = [min(size, numel - start) for start in range(0, numel, size)]
            mean = agreement.exchange(
                differences,
                sent=np.stack([one["sent"].numpy() for one in step])[:, :numel],
                owned=[one["owned"].numpy()[:n] for one, n in zip(step, lengths, strict=False)],
            )
            agreement.end_step()
            assert all(np.array_equal(one["mean"].numpy(), mean) for one in step)
        velocity = momentum * velocity + mean
        expected = real_anchor - rate * (mean + momentum * velocity)
        near = 2e-6 * max(1.0, np.abs(expected).max(initial=0))
        for one in step:
            assert np.array_equal(one["anchor"].numpy(), step[0]["anchor"].numpy())
            assert np.abs(one["anchor"].numpy() - expected).max(initial=0) <= near
            learned = one["now"].double().numpy() - one["before"].double().numpy()
            assert np.abs(one["after"].numpy() - (expected + learned)).max(initial=0) <= near
            if compression.get("outer_delay", 0) > 1:
                assert np.abs(learned).max() > 0 or numel == 0
            else:
                assert np.array_equal(one["after"].numpy(), one["anchor"].numpy())
        anchor = step[0]["anchor"].double().numpy()


def detached() -> Any:
    """In a worker: what detaching after three steps says, and attaching again; weights before and after it;
    and whether the model is freed."""
    gpt = build(instances=2)
    config = megatron_patch.CompressionConfig(method="none", outer_interval=2)
    with logged() as lines:
        megatron_patch.attach(gpt.chunks, config)
        for step in range(3):
            gpt.step(step)
        megatron_patch.disable()
        apart = weights(gpt)
        megatron_patch.attach(gpt.chunks, config)
        gpt.step(3)
    (anchors,) = ([shard.anchor.clone() for shard in attachment_of(c).outer._shards] for c in gpt.chunks)
    gpt.step(4)
    together = weights(gpt)
    megatron_patch.disable()
    model = weakref.ref(gpt.chunks[0])
    del gpt
    gc.collect()
    return [line for line in lines if line.startswith("W")], model() is None, apart, anchors, together


def test_detaching_says_that_instances_differ_and_frees_the_model(pool) -> None:
    found = pool.run(detached, world_size=2)
    (said, *_), (others, *_) = found
    assert all(freed for _, freed, *_ in found), (
        "an anchor with a gradient's graph would keep the model alive"
    )
    assert len(said) == 2
    assert "optimizer instances have trained apart" in said[0]
    assert "by 1 steps" in said[0]
    assert "weights differ between optimizer instances" in said[1]
    assert not others
    apart, anchors, together = zip(*(rest for _, _, *rest in found), strict=True)
    means = torch.cat([(mine + apart[1][name]).view(-1) / 2 for name, mine in apart[0].items()])
    for mine in anchors:
        assert torch.cat(mine).double().sum() == pytest.approx(float(means.double().sum()), rel=1e-6)
    for name, mine in together[0].items():
        assert not np.array_equal(apart[0][name].numpy(), apart[1][name].numpy())
        assert np.array_equal(mine.numpy(), together[1][name].numpy())


def poisoned(rank_with_nan: int) -> list[Any]:
    """In a worker: what an outer step says of NaN in one rank's weights, and whether it changed others."""
    from megatron_patch.megatron.seams.optimizer_step import masters_of

    gpt = build(instances=2, pp=2)
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="loco", outer_interval=2))
    gpt.step(0)
    gpt.backward(1)
    masters = masters_of(gpt.optimizer)
    if torch.distributed.get_rank() == rank_with_nan:
        next(iter(masters.values()))[0].data.view(-1)[3] = float("nan")
    with pytest.raises(RuntimeError) as error:
        gpt.update()
    words = str(error.value)
    finite = [bool(torch.isfinite(master).all()) for master, _ in masters.values()]
    return [words, all(finite)]


def test_nan_in_one_instance_is_reported_on_all_ranks_and_averaged_nowhere(pool) -> None:
    said = pool.run(poisoned, 3, world_size=4)
    for words, _ in said:
        assert "weights of optimizer instance 1 (counted from 0) are NaN or infinite" in words
        assert "\n" not in words
    assert [finite for _, finite in said] == [True, True, True, False]


def skipping(delay: int, at: int, how: str, chunks: int) -> list[Any]:
    """In a worker: fp16, of which one instance skips a step, such as one at which an outer step is due."""
    from megatron_patch.megatron.attach import finish_outer_steps

    gpt = build(
        instances=2,
        **({"pp": 2, "vpp": chunks, "layers": 2 * chunks} if chunks > 1 else {}),
        dtype="fp16",
        ddp={"grad_reduce_in_fp32": False},
        optimizer={"hysteresis": 1, "initial_loss_scale": 2.0**10},
    )
    # Compressed exchanges are not over when they have started.
    method = {"method": "loco", "start_step": 0} if chunks > 1 else {"method": "none"}
    config = megatron_patch.CompressionConfig(**method, outer_interval=2, outer_delay=delay)
    megatron_patch.attach(gpt.chunks, config)
    instance, successful = torch.distributed.get_rank(gpt.chunks[0].inter_dist_opt_group), []
    for step in range(4):
        gpt.backward(step)
        skips = instance and step == at
        if skips and how == "overflow":
            gpt.chunks[0].bucket_groups[0].buckets[0].grad_data.fill_(float("inf"))
        elif skips and how == "skip_step":
            megatron_patch.skip_step(gpt.chunks)
        successful.append(gpt.update() if not skips or how == "overflow" else False)
    report = megatron_patch.report(gpt.chunks)
    if delay:
        finish_outer_steps(gpt.optimizer, gpt.chunks)
    return [instance, successful, weights(gpt), report.step]


@pytest.mark.parametrize(
    ("delay", "at", "how", "chunks"),
    [
        *((0, 1, "overflow", 1), (1, 2, "overflow", 1), (0, 1, "clears", 1), (0, 0, "clears", 1)),
        *((1, 2, "clears", 1), (1, 2, "clears", 2), (0, 3, "skip_step", 1), (1, 1, "skip_step", 1)),
        (1, 2, "skip_step", 2),
    ],
)
def test_an_instance_that_skips_a_step_takes_part_in_the_outer_step(
    pool, delay: int, at: int, how: str, chunks: int
) -> None:
    found = pool.run(skipping, delay, at, how, chunks, world_size=4)
    skips = [step != at for step in range(4)]
    assert [instance for instance, *_ in found] == ([0, 0, 1, 1] if chunks == 1 else [0, 1, 0, 1])
    for rank, (instance, successful, mine, step) in enumerate(found):
        assert successful == (skips if instance else [True] * 4)
        assert step == 4 - (not successful[0])  # Before an optimizer is seen, what it skips does not count.
        theirs = found[0 if chunks == 1 else rank // 2 * 2][2]  # of the same stage of the pipeline
        assert all(np.array_equal(mine[name].numpy(), theirs[name].numpy()) for name in mine)


CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6153"


def absent() -> list[str]:
    """In a worker: what an instance says whose outer step the other one dies in, or does not come to."""
    gpt = build(instances=2)
    megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(method="none", outer_interval=2))
    gpt.step(0)
    gpt.backward(1)
    if torch.distributed.get_rank():
        return []
    death = mock.patch.object(torch.distributed, "all_reduce", side_effect=RuntimeError(CLOSED))
    with pytest.raises(RuntimeError) as died, death:
        attachment_of(gpt.chunks[0]).outer._agreed([])
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), gpt.chunks[0].dp_cp_group)
    with pytest.raises(RuntimeError) as error:
        gpt.update()
    return [str(died.value), str(error.value)]


@pytest.mark.skipif(
    bool(too_old("FSDP2", torch.__version__)), reason="gloo keeps the timeout with which a group was made"
)
def test_an_outer_step_to_which_an_instance_does_not_come_says_what_to_do(pool) -> None:
    ((died, said), _) = pool.run(absent, world_size=2)
    assert died == CLOSED
    assert re.search("not all ranks came to an outer step .*call megatron_patch.skip_step", said)


def refused(model: dict[str, Any], compression: dict[str, Any]) -> str:
    gpt = build(**model)

    def step() -> None:
        megatron_patch.attach(gpt.chunks, megatron_patch.CompressionConfig(**compression))
        gpt.backward(0)
        for part in getattr(gpt.optimizer, "chained_optimizers", [gpt.optimizer]):
            part.step()

    return refusal(step)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one instance": ({}, "num_distributed_optimizer_instances: 1 .*set it to the number of sites"),
    "tokens": ({"instances": 2, "per_token_loss": True}, "calculate_per_token_loss: True .*leave it out"),
    "one by one": ({"instances": 2, **MOE}, "get_megatron_optimizer returns, not of those"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(pool, case: str) -> None:
    model, words = REFUSED[case]
    for line in pool.run(refused, model, {"method": "none", "outer_interval": 2}, world_size=4):
        assert re.search(words, line)
        assert "\n" not in line


def booked() -> tuple[list[int], list[bool]]:
    """In a worker: bytes of errors, reported and there; whether an outer step has left some, and loading."""
    from megatron_patch.megatron import outer_steps

    gpt = build(instances=2)
    attach(gpt.chunks, {"outer_interval": 2})
    for step in range(2):
        gpt.step(step)
    outer = attachment_of(gpt.chunks[0]).outer
    of_weights = [t for name, t in outer.state(gpt.optimizer).items() if ".error." in name]
    of_gradients = [t for s in attachment_of(gpt.chunks[0]).session.senders for t in s.state().values()]
    held = sum(tensor.nbytes for tensor in [*of_weights, *of_gradients])
    left = [any(tensor.any() for tensor in of_weights)]
    outer_steps.restore([outer], lambda: None, "")
    left.append(any(bool(tensor.any()) for tensor in of_weights))
    return [megatron_patch.report(gpt.chunks).error_bytes, held], [bool(any_left) for any_left in left]


def test_errors_of_outer_steps_are_reported_and_begin_anew(pool) -> None:
    for (reported, held), left in pool.run(booked, world_size=2):
        assert reported == held
        assert left == [True, False]


def carried(model: dict[str, Any], other: dict[str, Any], steps: int, left: int | None = None) -> list[str]:
    """In a worker: what is logged as a job of `other` takes over what one of `model` keeps, or `left` of it,
    and refuses what is damaged."""
    from megatron_patch.megatron import outer_steps
    from megatron_patch.megatron.attach import outer_steps_of

    config = {"method": "error_feedback", "outer_interval": 2, "outer_momentum": 0.9, "strict_load": True}
    saved, lines = None, []
    for parallel in (model, other):
        gpt = build(**parallel)
        attach(gpt.chunks, config)
        outer = outer_steps_of(gpt.chunks)
        with logged() as said:
            if saved is not None:
                outer_steps.restore(outer, functools.partial(torch.Tensor.clone, saved[:left]), "")
            for step in range(steps if saved is None else 1):
                gpt.step(step)
            saved = outer_steps.packed(outer, gpt.optimizer)
        lines += said
        megatron_patch.disable()
    return lines


LATE = (
    "WARNING: megatron-loco: saved between outer steps, 1 optimizer steps after one: the checkpoint mixes "
    "the weights of all optimizer instances; save after a multiple of compression.outer_interval"
)
ANEW = "INFO: megatron-loco: outer steps begin anew, without errors and momentum: the checkpoint"
UNFIT = {
    "'s ranks were placed otherwise": ({"ddp": OVERLAP}, None),
    " is of an earlier release": ({}, -4),  # Without a CRC.
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_checkpoint_that_does_not_fit_is_said(pool, why: str) -> None:
    """One that fits is carried over in test_resume.py."""
    model, (other, left) = {"instances": 2}, UNFIT[why]
    assert pool.run(carried, model, model | other, 4, left, world_size=4)[0] == [ANEW + why, LATE]
