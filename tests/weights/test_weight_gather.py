"""The exact weight gather on a real process group: what arrives, what is found to differ, what is healed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from seeds import seeded

from megatron_patch.collectives.workspace import Pool, Workspace
from megatron_patch.weights.batch import Batch, WeightsDiffer, batches
from megatron_patch.weights.gather import WeightGather, agree

RANKS = 4
TRIALS = 100
SIZES = (1, 7, 300, 2047, 2048, 2049, 5000)
OWN, COPY = "own", "copy"


# --- functions that run in the workers -------------------------------------------------------------------


def gather_of(numel: int, dtype: str = "bfloat16", seed: int = 0) -> tuple[Any, Any]:
    """(bucket, its gather): the same random weights on all ranks, a few of them special."""
    generator = torch.Generator().manual_seed(seeded(seed))
    bucket = 0.02 * torch.randn(RANKS * numel, generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    chosen = torch.rand(bucket.numel(), generator=generator) < 0.1
    bucket[chosen] = special[torch.randint(5, (int(chosen.sum()),), generator=generator)]
    bucket = bucket.to(getattr(torch, dtype))
    return bucket, WeightGather(bucket, dist.group.WORLD, Workspace(torch.device("cpu")), "bucket 7")


def update(bucket: Any, step: int) -> None:
    """What an optimizer does: this rank's shard alone changes."""
    own = bucket.view(RANKS, -1)[dist.get_rank()]
    generator = torch.Generator().manual_seed(seeded(1000 * step + dist.get_rank()))
    own += 1e-4 * torch.randn(own.numel(), generator=generator).to(own.dtype)


def wanted_of(bucket: Any) -> Any:
    """What Megatron's own gather makes of it."""
    wanted = bucket.clone()
    dist.all_gather_into_tensor(wanted, wanted.view(RANKS, -1)[dist.get_rank()])
    return wanted


def same_bits(one: Any, other: Any) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def sent(gather: Any) -> Any:
    """A bucket's messages, on their way."""
    return Batch([gather]).start(gather._workspace, own_may_have_changed=True)


def steps(numel: int, dtype: str) -> list[tuple[bool, bool, float]]:
    """For each step whether the messages were sent, whether the weights are right, bits a weight."""
    bucket, gather = gather_of(numel, dtype)
    told = []
    for step in range(4):
        gather.remember()
        update(bucket, step)
        wanted = wanted_of(bucket)
        (agreed,) = agree([gather])
        assert agreed.difference is None
        if agreed.saves:
            sent(gather).wait()
        else:
            gather.gather_in_full()
        told.append((agreed.saves, same_bits(bucket, wanted), 8 * max(gather.lengths) / numel))
    return told


def flip(bucket: Any, which: str, trial: int) -> tuple[int, int]:
    """Flip a random bit of one rank's weights, in its own shard or a copy; (that rank, the shard's owner)."""
    generator = torch.Generator().manual_seed(seeded(trial))
    place, bit, rank, other = (
        int(torch.randint(n, (), generator=generator))
        for n in (bucket.numel() // RANKS, 16, RANKS, RANKS - 1)
    )
    owner = rank if which == OWN else (rank + 1 + other) % RANKS
    if dist.get_rank() == rank:
        bits = bucket.view(torch.int16).view(RANKS, -1)[owner]
        bits[place] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
    return rank, owner


def flips_before(which: str) -> list[tuple[int, int, str | None, bool]]:
    """A bit flips before a step: who, whose, what is said, and whether the weights are right after it."""
    bucket, gather = gather_of(500)
    told = []
    for trial in range(TRIALS):
        rank, owner = flip(bucket, which, trial)
        gather.remember()
        update(bucket, trial)
        wanted = wanted_of(bucket)
        (agreed,) = agree([gather])
        gather.gather_in_full()
        told.append((rank, owner, agreed.difference, same_bits(bucket, wanted)))
    return told


def flips_between(which: str) -> list[tuple[int, int, str | None, bool, bool]]:
    """A bit flips when all have agreed: who, whose, this rank's error, gathered in full, weights right."""
    bucket, gather = gather_of(500)
    told = []
    for trial in range(TRIALS):
        gather.remember()
        update(bucket, trial)
        (agreed,) = agree([gather])
        assert (agreed.saves, agreed.difference) == (True, None)
        rank, owner = flip(bucket, which, trial)
        wanted = wanted_of(bucket)
        handle, error = sent(gather), None
        try:
            handle.wait()
        except WeightsDiffer as differs:
            error = str(differs)
        told.append((rank, owner, error, handle.in_full, same_bits(bucket, wanted)))
        gather.gather_in_full()
    return told


def messages_that_change() -> list[str]:
    """A bit of a message flips on its way to rank 2: its errors; nothing where the weights are right."""
    bucket, gather = gather_of(500)
    read: Callable[..., None] = gather.read
    generator = torch.Generator().manual_seed(seeded(3))

    def changed(messages: Any, places: Any, found: Any) -> None:
        if dist.get_rank() == 2:
            place, bit = (int(torch.randint(n, (), generator=generator)) for n in (gather.sizes[1], 8))
            messages[1, int(places[1, 0]) + place] ^= 1 << bit
        read(messages, places, found)

    gather.read = changed
    told = []
    for trial in range(TRIALS):
        gather.remember()
        update(bucket, trial)
        wanted = wanted_of(bucket)
        agree([gather])
        try:
            sent(gather).wait()
            told.append("" if same_bits(bucket, wanted) else "silently wrong")
        except WeightsDiffer as error:
            told.append(str(error))
        gather.gather_in_full()
    return told


# --- the tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("numel", SIZES)
def test_every_rank_gets_the_weights_to_the_bit(pool, numel, dtype):
    for told in pool.run(steps, numel, dtype, world_size=RANKS):
        for sent, right, bits in told:
            assert right
            assert bits < 16 or not sent
            assert sent == (numel >= 300), "long messages are not sent at all"


@pytest.mark.parametrize("which", [OWN, COPY])
def test_a_bit_flipped_before_the_step_is_found_and_named_by_all_and_healed(pool, which):
    reports = pool.run(flips_before, which, world_size=RANKS)
    for told in reports:
        assert len(told) == TRIALS
        for rank, owner, difference, right in told:
            assert right
            assert difference.startswith("bucket 7: ")
            # Where the owner's own shard changed, everybody else's copy is another.
            holders = [rank] if which == COPY else [other for other in range(RANKS) if other != owner]
            named = [f"rank {holder}'s copy of rank {owner}'s shard" for holder in holders]
            assert difference == "bucket 7: " + ", ".join(named)


def test_a_copy_that_changes_between_step_and_gather_is_an_error_that_names_bucket_and_owner(pool):
    for rank, told in enumerate(pool.run(flips_between, COPY, world_size=RANKS)):
        assert len(told) == TRIALS
        for culprit, owner, error, in_full, right in told:
            assert not in_full
            if rank != culprit:
                assert error is None
                assert right
                continue
            assert (
                f"bucket 7 on rank {rank}, shard of rank {owner}: the new weights are not the owner" in error
            )


def test_an_owner_that_changes_between_step_and_gather_makes_all_gather_in_full(pool):
    for told in pool.run(flips_between, OWN, world_size=RANKS):
        assert [one[2:] for one in told] == [(None, True, True)] * TRIALS


def test_a_message_that_changes_on_its_way_is_an_error_or_says_the_same(pool):
    for rank, told in enumerate(pool.run(messages_that_change, world_size=RANKS)):
        errors = [text for text in told if text]
        assert "silently wrong" not in errors
        assert (len(errors) > TRIALS // 2) == (rank == 2)
        assert all("bucket 7 on rank 2, shard of rank 1" in text for text in errors)


def test_a_batch_s_messages_take_no_more_memory_than_the_largest_bucket():
    ranks, random, gathers = 16, np.random.default_rng(seeded(1)), []
    group, workspace = SimpleNamespace(size=lambda: ranks, rank=lambda: 3), Workspace(torch.device("cpu"))
    for shard in random.integers(64, 640, 30):
        gathers.append(WeightGather(torch.zeros(ranks * shard, dtype=torch.bfloat16), group, workspace, ""))
        assert gathers[-1].agreed(random.integers(shard // 8, shard, ranks))
    made = list(batches(gathers))
    assert [gather for batch in made for gather in batch.gathers] == gathers
    assert len(made) < len(gathers) / 2
    for batch in made:
        assert ranks * batch.width <= max(ranks * gather.shard_nbytes for gather in gathers)
        lengths = np.stack([gather.lengths for gather in batch.gathers])
        assert (lengths % 8 == 0).all()
        assert torch.equal(batch.places[1:, :, 0], torch.from_numpy(lengths.cumsum(0)[:-1]))
        assert sum(map(batch.nbytes_of, batch.gathers)) == pytest.approx(batch.width * (ranks - 1))


def test_a_buffer_that_an_evaluation_needs_first_serves_a_training_too():
    pool = Pool(torch.device("cpu"))
    with torch.inference_mode():
        first = pool.take(2, 100)
        pool.give(first)
    buffer = pool.take(2, 100)
    assert buffer.data_ptr() == first.data_ptr()
    assert not buffer.is_inference()
    assert (buffer.fill_(7) == 7).all()
