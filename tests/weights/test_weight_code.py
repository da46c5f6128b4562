"""The exact code of weights' changes: every bit pattern comes back, and what is not whole is told.

The bytes are those of simulation/weight_coder.py, written from docs/weight_code.md with Python's integers.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from simulation import weight_coder as by_hand
from simulation.weight_sums import sums_by_hand
from weights.weight_coders import (
    ANY,
    CODERS,
    NARROW,
    NORMAL,
    as_bits,
    before_a_wall,
    changed,
    coded,
    coded_with_facts,
    cpu_coders,
    decode_one,
    decoded,
    every_coder,
    examples,
    expected,
    moved,
    parametrized,
    patterns,
    sized,
    told,
)

from megatron_patch.weights import code
from megatron_patch.weights.code import FACTS, HEADER_BYTES, Mismatch, bound

SPREADS = st.sampled_from([0, 1, 2, 4, 9, 30, 60, 137, 500, 520, 40_000])
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([511, 2049, 5000]))


@every_coder
def test_the_bytes_are_those_of_the_description_and_come_back(name):
    @given(
        LENGTHS,
        st.integers(0, 1000),
        SPREADS,
        st.one_of(st.floats(0, 1), st.just(1.0)),
        st.sampled_from([ANY, NORMAL, NARROW]),
        st.booleans(),
    )
    @settings(max_examples=examples(name, 120), deadline=None)
    def check(numel, seed, spread, share, kind, fp16):
        old, new = changed(sized(name, numel), seed, spread, share, kind, fp16)
        message, facts = coded_with_facts(name, old, new, fp16)
        assert message.tolist() == expected(old, new, fp16)
        sums = [n - (1 << 64) if n >> 63 else n for n in sums_by_hand(patterns(old))]
        assert facts == [int((old == new).sum()), *sums]
        assert torch.equal(decoded(name, message, old), new)

    check()


@functools.cache
def tiled(*case: Any) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    old, new = changed(*case, NORMAL, case[0] % 2 == 1)
    return old, new, expected(old, new, case[0] % 2 == 1)


@every_coder
def test_tiles_of_every_size_that_messages_have(name):
    """With the last one short; fp16 where their number is odd."""
    for numel, spread, share, tile, states in (
        (401, 2, 1.0, 15, 8),
        (600, 60, 1.0, 14, 8),
        (650, 200, 1.0, 13, 8),
        (700, 9, 0.2, 16, 8),
        (9001, 200, 1.0, 13, 32),
        (20_002, 200, 1.0, 13, 32),
        (40_001, 2, 1.0, 15, 32),
        (70_000, 1, 0.3, 16, 32),
        (140_001, 1, 0.13, 17, 32),
        (280_000, 1, 0.07, 18, 32),
        (280_001, 1, 0.01, 18, 8),
    ):
        if numel > CODERS[name].most:
            continue
        old, new, wanted = tiled(numel, 5, spread, share)
        form = tile - 12 + 8 * (states == 8) + 16 * (numel % 2)
        assert wanted[0] == code.CODED
        assert wanted[2] == form
        assert coded(name, old, new, numel % 2 == 1).tolist() == wanted
        assert torch.equal(decoded(name, torch.tensor(wanted, dtype=torch.uint8), old), new)


@every_coder
def test_frequencies_that_are_too_many(name):
    """All of a context's weights move; rare moves have more than their share, the most frequent one less."""
    sizes = by_hand.LOWEST[1:]
    for moves in (sizes + 300 * [-3], sizes + 300 * [-700], 5 * [*sizes, 513], [*sizes, 0] + 300 * [9]):
        old = torch.tensor(len(moves) * [0x3E00] + 400 * [0x3D00])
        new = moved(old, torch.tensor(moves + 400 * [0]))
        message = coded(name, old.to(torch.int16), new)
        assert message[0] == code.CODED
        assert message.tolist() == expected(old, new)
        assert torch.equal(decoded(name, message, old.to(torch.int16)), new)


@functools.cache
def many(case: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    numel = {"still": 1 << 21, "wild": (1 << 21) + 777, "all counted": (1 << 21) - 1}[case]
    old, new = changed(numel, 8, 40_000, 0.02, NORMAL)
    i = torch.arange(numel)
    counted = i // 32 % 8 == (i // 256 * 0x9E3779B1 % (1 << 32)) >> 29
    assert (numel >> 3) - 99 < int(counted.sum()) < (numel >> 3) + 99
    if case == "wild":  # nothing but escapes, in tiles of 4096
        new[~counted] = old[~counted]
        new[counted] = moved(old.to(torch.int64), 600 + i % 30_000)[counted]
    else:
        new[counted] = old[counted]
    return old, new, expected(old, new)


@pytest.mark.thorough
@parametrized(CODERS, [name for name in CODERS if not name.startswith("triton")])
@pytest.mark.parametrize("case", ["still", "wild", "all counted"])
def test_moves_that_were_not_counted(name, case):
    """From 2^21 weights on every eighth row is: here the others move, or only those do that are counted."""
    old, new, wanted = many(case)
    assert wanted[0] == code.CODED
    assert case != "wild" or wanted[2] == 0
    message = coded(name, old, new)
    assert torch.equal(message, torch.tensor(wanted, dtype=torch.uint8))
    assert torch.equal(decoded(name, message, old), new)


@every_coder
def test_a_message_is_never_longer_than_the_weights_and_a_header(name):
    numel = sized(name, 10_000)
    old, new = changed(numel, 3, 40_000, 1.0)
    assert coded(name, old, new).numel() == bound(numel) == 2 * numel + 12
    assert coded(name, old, old).numel() == 12 + 8 + 4 + 8 * 4  # tables, and one tile without words


@every_coder
@pytest.mark.parametrize("fp16", [False, True])
def test_one_flipped_bit_of_the_weights_is_found(name, fp16):
    numel = sized(name, 2000)
    old, new = changed(numel, 1, 3, 0.5, NORMAL, fp16)
    message = coded(name, old, new, fp16)
    random = torch.Generator().manual_seed(5)
    for _ in range(examples(name, 100)):
        other = old.clone()
        place, bit = (int(torch.randint(n, (), generator=random)) for n in (numel, 16))
        other[place] ^= as_bits([1 << bit])[0]
        # With another exponent, the message's codes mean other moves, and may end elsewhere.
        with pytest.raises(Mismatch, match="before its step"):
            decoded(name, message, other)


@every_coder
def test_a_message_that_is_truncated_longer_or_changed_is_an_error(name):
    numel = sized(name, 1500)
    old, new = changed(numel, 2, 200, 0.7, NORMAL)
    message = coded(name, old, new)
    assert message[0] == code.CODED
    whole_raw = changed(300, 2, 40_000, 1.0)
    raw = coded(name, *whole_raw)
    assert raw[0] == code.RAW
    random = torch.Generator().manual_seed(6)
    cut = torch.randint(message.numel(), (examples(name, 40),), generator=random).tolist()
    for size in [0, 1, 11, 12, 16, 20, *cut, message.numel() - 1]:
        with pytest.raises(Mismatch):
            decoded(name, message[:size].clone(), old)
    for whole, weights in ((message, old), (raw, whole_raw[0])):
        for more in (1, 2, 4, 64):
            with pytest.raises(Mismatch):
                decoded(name, torch.cat([whole, whole[:more]]), weights)
        wanted = decoded(name, whole, weights)
        for k in range(examples(name, 400)):
            broken = whole.clone()
            # Every other one in the header, the tables or the first tiles' counts and states.
            place = int(torch.randint(broken.numel() if k % 2 else 120, (), generator=random))
            broken[place] ^= 1 << int(torch.randint(8, (), generator=random))
            # Zeros between the parts say nothing: what is decoded is right, or an error.
            found, left = told(name, broken, weights)
            assert found in (code.MESSAGE_CHANGED, code.WEIGHTS_DIFFER) or left.equal(wanted)
    for other in (old[: numel - 1], torch.cat([old, old[:1]])):
        with pytest.raises(Mismatch):
            decoded(name, message, other.clone())


@every_coder
def test_weights_and_messages_may_begin_inside_others(name):
    one, numel = CODERS[name], sized(name, 3000)
    old, new = changed(numel, 4, 40, 0.6, NORMAL)
    inside = [torch.zeros(numel + 9, dtype=torch.int16, device=one.device) for _ in range(2)]
    for whole, weights in zip(inside, (old, new), strict=True):
        whole[1 : numel + 1].copy_(weights)
    mine, its = (whole[1 : numel + 1] for whole in inside)
    message = torch.zeros(16 + bound(numel), dtype=torch.uint8, device=one.device)
    found = torch.full((3,), 7, dtype=torch.int32, device=one.device)
    facts = torch.full((FACTS + 2,), 7, dtype=torch.int64, device=one.device)
    with one.chosen():
        size = one.coder.encode(mine, its, False, message[8 : 8 + bound(numel)], facts[1 : FACTS + 1])
        decode_one(one.coder, message[8 : 8 + size], mine, found[1:2])
    assert message[8 : 8 + size].tolist() == expected(old, new)
    assert not message[:8].any()
    assert found.tolist() == [7, 0, 7]
    assert facts.tolist() == [7, int((old == new).sum()), *code.sums(old).tolist(), 7]
    assert torch.equal(*inside)


@every_coder
@pytest.mark.parametrize("numel", [0, 1, 700, 5000])
def test_messages_of_all_ranks_at_once(name, numel):
    """Each somewhere in its row, of any kind; one broken, the own one not looked at but for being stale."""
    one, numel = CODERS[name], sized(name, numel)
    generator = torch.Generator().manual_seed(numel)
    kinds = [(0.0, 1), (0.3, 500), (1.0, 1), (1.0, 30000), (0.02, 3), (0.5, 100)]  # the fourth is RAW
    pairs = [
        changed(numel, seed, spread, share, NORMAL if seed % 2 else ANY)
        for seed, (share, spread) in enumerate(kinds)
    ]
    sent = [coded(name, old, new, fp16=seed > 3) for seed, (old, new) in enumerate(pairs)]
    if numel >= 700:
        assert [int(part[0]) == code.RAW for part in sent] == [seed == 3 for seed in range(6)]
    if numel:
        sent[4][HEADER_BYTES - 1] ^= 1  # the sum
    own = 2
    for stale in (False, True):
        if stale:
            sent[own][0] = code.STALE
        starts = [8 * int(torch.randint(5, (), generator=generator)) for _ in sent]
        row = 8 * (max(start + len(part) for start, part in zip(starts, sent, strict=True)) // 8 + 2)
        messages = torch.randint(256, (len(sent), row), generator=generator, dtype=torch.uint8)
        for sender, (start, part) in enumerate(zip(starts, sent, strict=True)):
            messages[sender, start : start + len(part)] = part
        places = torch.tensor([[start, len(part)] for start, part in zip(starts, sent, strict=True)])
        shards = torch.stack([old for old, _ in pairs])
        shards[own] = 77
        on_device = [tensor.to(one.device) for tensor in (messages, places, shards)]
        found = torch.full((len(sent),), -1, dtype=torch.int32, device=one.device)
        with one.chosen():
            one.coder.decode(*on_device, own, found)
        verdicts = [0] * len(sent)
        verdicts[own] = code.OWNER_CHANGED if stale else 0
        if numel:
            raw = sent[4][0] == code.RAW
            verdicts[4] = code.MESSAGE_CHANGED if raw else code.WEIGHTS_DIFFER
        assert found.tolist() == verdicts
        for sender, (_, new) in enumerate(pairs):
            if sender == own:
                assert (on_device[2][sender] == 77).all(), "the own shard is not written"
            elif not verdicts[sender]:
                assert torch.equal(on_device[2][sender].cpu(), new), sender


@cpu_coders
def test_nothing_outside_a_message_and_its_weights_is_read_or_written(name):
    """Whatever the tables, the counts, the states and the words say."""
    one, draw = CODERS[name], random.Random(seeded(8))
    for share, spread, many in ((0.3, 500, 500), (0.9, 200, 9300), (0.05, 1, 500), (0.9, 1, 2500)):
        pairs = [changed(sized(name, many) + seed, seed, spread, share, NORMAL) for seed in range(40)]
        old, new = next(pair for pair in pairs if coded(name, *pair).numel() % 8 == 0)
        message = coded(name, old, new)
        parts = by_hand.parts(message.tolist(), old.numel())
        # A short message of small moves has no words.
        for part in filter(len, (range(1, 4), parts.tables, parts.counts, parts.states, parts.words)):
            for _ in range(examples(name, 30)):
                broken = message.clone()
                for at in draw.choices(part, k=draw.choice([1, 3])):
                    broken[at] = draw.choice([0, 255, draw.randrange(256)])
                weights = before_a_wall(old)
                found = torch.full((1,), -1, dtype=torch.int32)
                with one.chosen():
                    decode_one(one.coder, before_a_wall(broken), weights, found)
                assert int(found) >= 0
                assert int(found) or torch.equal(weights, new)


@cpu_coders
def test_encoding_stays_inside_the_weights_and_the_message(name):
    """Whose room is no longer than the longest message's."""
    one = CODERS[name]
    for numel, share, spread in ((2, 0.0, 1), (502, 0.3, 500), (4502, 1.0, 40_000), (9302, 0.99, 510)):
        if numel > one.most:
            continue
        old, new = changed(numel, 3, spread, share, NORMAL)
        message = before_a_wall(torch.zeros(bound(numel), dtype=torch.uint8))
        facts = torch.zeros(FACTS, dtype=torch.int64)
        with one.chosen():
            size = one.coder.encode(before_a_wall(old), before_a_wall(new), True, message, facts)
        assert message[:size].tolist() == expected(old, new, True)


def test_the_kinds_of_messages_differ_in_many_bits():
    """One rank alone would call a message stale, gather in full, and wait for the others for ever."""
    kinds = [code.CODED, code.RAW, code.STALE]
    assert all((a ^ b).bit_count() >= 4 for a in kinds for b in kinds if a != b)
