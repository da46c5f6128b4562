"""The exact code of weights' changes: every bit pattern comes back, and what is not whole is told.

The bytes are those of `by_hand`, written from the description in weight_code.py with Python's integers.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from simulation.weight_sums import sums_by_hand
from weights.weight_coders import (
    GPU,
    NO_INTERPRETER,
    SPECIAL,
    Coder,
    Waiting,
    as_bits,
    before_a_wall,
    decode_one,
    parametrized,
)

from megatron_patch.quantization import native
from megatron_patch.weights import code as weight_code
from megatron_patch.weights import native as native_weights
from megatron_patch.weights import triton_kernels as triton_weights
from megatron_patch.weights.code import HEADER_BYTES, Mismatch, bound

CODERS = {
    "reference": Coder(weight_code),
    **{name: Coder(native_weights, variant=index) for index, name in enumerate(native.variants())},
    "triton-interpreted": Coder(triton_weights, fewer=4, without=NO_INTERPRETER),
    "triton-gpu": Coder(triton_weights, "cuda", without=GPU),
}


every_coder = parametrized(CODERS, [*CODERS])
triton_coders = parametrized(CODERS, [name for name in CODERS if name.startswith("triton")])


def coded(name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    one = CODERS[name]
    message = torch.full((bound(old.numel()) + 8,), 0xA5, dtype=torch.uint8, device=one.device)
    with one.chosen():
        size = one.coder.encode(old.to(one.device), new.to(one.device), message[: bound(old.numel())])
    assert size <= bound(old.numel())
    assert (message[size:] == 0xA5).all(), "nothing is written behind the message"
    return message[:size].cpu()


def decoded(name: str, message: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    one = CODERS[name]
    weights = old.to(one.device, copy=True)
    found = torch.full((1,), -1, dtype=torch.int32, device=one.device)
    with one.chosen():
        decode_one(one.coder, message.to(one.device), weights, found)
    weight_code.check(int(found))
    return weights.cpu()


def examples(name: str, number: int) -> int:
    return max(number // CODERS[name].fewer, 1)


def line(x: int) -> int:
    return x ^ 0x7FFF if x & 0x8000 else x


def changed(numel: int, seed: int, spread: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights, and the same with a `share` of them up to `spread` representable numbers further."""
    random = torch.Generator().manual_seed(seed)
    old = torch.randint(0x10000, (numel,), generator=random)
    old[torch.rand(numel, generator=random) < 0.1] = SPECIAL[seed % len(SPECIAL)]
    step = torch.randint(-spread, spread + 1, (numel,), generator=random)
    step[torch.rand(numel, generator=random) >= share] = 0
    new = [line((line(x) + d) % 0x10000) for x, d in zip(old.tolist(), step.tolist(), strict=True)]
    return as_bits(old.tolist()), as_bits(new)


def by_hand(old: torch.Tensor, new: torch.Tensor) -> list[int]:
    """The message as its description says."""
    x, y = ([n & 0xFFFF for n in one.tolist()] for one in (old, new))
    tiles, planes = [], [[], [], [], [], []]

    def put(plane: list[int], codes: list[int], bits: int) -> None:
        number = sum(code << (place * bits) for place, code in enumerate(codes))
        plane += number.to_bytes(-(-len(codes) * bits // 8), "little")

    for start in range(0, len(x), 2048):
        pairs = list(zip(x[start : start + 2048], y[start : start + 2048], strict=True))
        d = [((line(b) - line(a) + 0x8000) % 0x10000) - 0x8000 for a, b in pairs]
        moved = [n for n in d if n]
        bitmap = 2 * len(moved) < len(d)
        said = moved if bitmap else d
        far = [n for n in said if n not in (0, 1, -1)]
        z = [2 * (abs(n) - 2) + (n < 0) for n in far]
        eights, sixteens = [one - 15 for one in z if one >= 15], [n for n in far if abs(n) >= 137]
        if bitmap:
            put(planes[0], [int(n != 0) for n in d], 1)
        put(planes[1], [{0: 0, 1: 1, -1: 2}.get(n, 3) for n in said], 2)
        put(planes[2], [min(one, 15) for one in z], 4)
        put(planes[3], [min(one, 255) for one in eights], 8)
        put(planes[4], [n & 0xFFFF for n in sixteens], 16)
        counts = (len(moved) if bitmap else 0xFFFF, len(far), len(eights), len(sixteens))
        tiles += [byte for count in counts for byte in count.to_bytes(2, "little")]
    sums = [value for one in (x, y) for value in sums_by_hand(one)]
    body = [*tiles, *(byte for plane in planes for byte in plane)]
    kind = 1 if HEADER_BYTES + len(body) < bound(len(x)) else 2
    if kind == 2:
        body = [byte for n in y for byte in n.to_bytes(2, "little")]
    same = sum(a == b for a, b in zip(x, y, strict=True))
    header = [byte for number in (kind, len(x), same, *sums) for byte in number.to_bytes(8, "little")]
    return header + body


SPREADS = st.sampled_from([0, 1, 2, 9, 10, 137, 500, 40_000])
LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([2047, 2048, 2049, 4096, 5000]))


@every_coder
def test_the_bytes_are_those_of_the_description_and_come_back(name):
    @given(LENGTHS, st.integers(0, 1000), SPREADS, st.floats(0, 1))
    @settings(max_examples=examples(name, 80), deadline=None)
    def check(numel, seed, spread, share):
        old, new = changed(numel, seed, spread, share)
        message = coded(name, old, new)
        assert message.tolist() == by_hand(old, new)
        assert torch.equal(decoded(name, message, old), new)

    check()


@every_coder
def test_any_bits_become_any_bits(name):
    patterns = st.one_of(st.integers(0, 0xFFFF), st.sampled_from(SPECIAL))

    @given(st.lists(st.tuples(patterns, patterns), min_size=1, max_size=200))
    @settings(max_examples=examples(name, 150), deadline=None)
    def check(pairs):
        old, new = (as_bits([pair[k] for pair in pairs]) for k in (0, 1))
        assert torch.equal(decoded(name, coded(name, old, new), old), new)

    check()


@every_coder
def test_no_weights_are_a_header(name):
    nothing = torch.empty(0, dtype=torch.int16)
    assert coded(name, nothing, nothing).numel() == HEADER_BYTES
    assert decoded(name, coded(name, nothing, nothing), nothing).numel() == 0


@every_coder
def test_every_difference_there_is_comes_back(name):
    new = as_bits(list(range(0x10000)))
    for first in (0x0000, 0x8000, 0x7FFF, 0x3F80):
        old = as_bits([first] * 0x10000)
        assert torch.equal(decoded(name, coded(name, old, new), old), new)


@every_coder
def test_a_message_is_never_longer_than_the_weights_and_a_header(name):
    old, new = changed(10_000, 3, 40_000, 1.0)
    assert coded(name, old, new).numel() == bound(10_000) == 2 * 10_000 + 56
    same = coded(name, old, old)
    assert same.numel() == 56 + 5 * 8 + 10_000 // 8  # tiles and bitmaps


@every_coder
def test_one_flipped_bit_of_the_weights_is_found(name):
    old, new = changed(5000, 1, 3, 0.5)
    message = coded(name, old, new)
    random = torch.Generator().manual_seed(5)
    for _ in range(examples(name, 100)):
        other = old.clone()
        place, bit = (int(torch.randint(n, (), generator=random)) for n in (5000, 16))
        other[place] ^= as_bits([1 << bit])[0]
        with pytest.raises(Mismatch, match="before its step"):
            decoded(name, message, other)


@every_coder
def test_a_message_that_is_truncated_longer_or_changed_is_an_error(name):
    old, new = changed(5000, 2, 200, 0.7)
    message = coded(name, old, new)
    raw = coded(name, *changed(300, 2, 40_000, 1.0))
    random = torch.Generator().manual_seed(6)
    for size in [0, 1, 55, 56, 70, 100, *torch.randint(message.numel(), (20,), generator=random).tolist()]:
        with pytest.raises(Mismatch):
            decoded(name, message[:size].clone(), old)
    for whole, weights in ((message, old), (raw, changed(300, 2, 40_000, 1.0)[0])):
        with pytest.raises(Mismatch):
            decoded(name, torch.cat([whole, whole[:1]]), weights)
        wanted = decoded(name, whole, weights)
        for _ in range(examples(name, 300)):
            broken = whole.clone()
            place, bit = (int(torch.randint(n, (), generator=random)) for n in (broken.numel(), 8))
            broken[place] ^= 1 << bit
            try:
                # The zeros behind a tile's last code say nothing: what is decoded is right, or an error.
                assert torch.equal(decoded(name, broken, weights), wanted)
            except Mismatch:
                continue
    with pytest.raises(Mismatch):
        decoded(name, message, old[:4999].clone())


@every_coder
def test_a_message_that_its_sender_calls_stale_is_told_apart(name):
    old, new = changed(300, 2, 3, 0.5)
    message = coded(name, old, new)
    message[:8].view(torch.int64)[0] = weight_code.STALE
    with pytest.raises(Mismatch, match="between its step and their gather"):
        decoded(name, message, old)


@every_coder
def test_sums_are_those_of_the_description(name):
    one = CODERS[name]
    for numel in (0, 1, 255, 5000, 70_001):
        x = changed(max(numel, 1), numel, 9, 0.5)[1][:numel]
        numbers = [n & 0xFFFF for n in x.tolist()]
        wanted = [n - (1 << 64) if n >> 63 else n for n in sums_by_hand(numbers)]
        with one.chosen():
            assert one.coder.sums(x.to(one.device)).tolist() == wanted
            rows = x.to(one.device).expand(3, -1).contiguous()
            assert one.coder.sums(rows).tolist() == [wanted] * 3


def structured(draw: random.Random, numel: int) -> list[tuple[int, int]]:
    """(place, move) of weights that move by as much up as down, in a pattern."""
    at, size = draw.randrange(numel - 64), draw.choice([1, 1, 2, 16, 0x100, 0x7FFF])
    gap = draw.choice([1, 1, 2, 4, 7, 16])
    kind = draw.randrange(4)
    if kind == 0:  # +1 -1 -1 +1, and such patterns of them
        signs = [1, -1, -1, 1, -1, 1, 1, -1][: draw.choice([4, 8])]
    elif kind == 1:  # binomials: the sums of x, i*x and i^2*x stay
        signs = draw.choice([[1, -3, 3, -1], [1, -4, 6, -4, 1], [1, -2, 1]])
    elif kind == 2:  # equal moves far apart
        return [(at, size), (draw.randrange(numel - 64), -size)]
    else:
        signs = [draw.choice([1, -1]) for _ in range(4)]
    return [(at + gap * place, size * sign) for place, sign in enumerate(signs)]


@every_coder
def test_structured_differences_change_both_sums(name):
    """Differences that cancel in sums of the weights, and of the weights times their places."""
    one, draw, numel = CODERS[name], random.Random(seeded(11)), 5000
    whole = changed(numel, 7, 9, 0.5)[1]
    differences = [[(100 + k, sign) for k, sign in enumerate(signs)]
                   for signs in itertools.product([1, -1], repeat=4)]  # fmt: skip
    differences += [structured(draw, numel) for _ in range(examples(name, 1000))]
    rows = [whole]
    for moves in differences:
        row = whole.clone()
        for place, move in moves:
            row[place] = as_bits([(int(row[place]) + move) % 0x10000])[0]
        if not torch.equal(row, whole):
            rows.append(row)
    for _ in range(examples(name, 300)):  # permutations
        low = draw.randrange(numel - 64)
        length = draw.choice([2, 4, 32])
        row = whole.clone()
        row[low : low + length] = row[low : low + length].roll(draw.randrange(1, length))
        if not torch.equal(row, whole):
            rows.append(row)
    rows += [whole.roll(shift) for shift in (1, 2, 2048, -1)]
    tiles = whole.clone()
    tiles[:2048], tiles[2048:4096] = whole[2048:4096], whole[:2048].clone()
    rows.append(tiles)
    with one.chosen():
        found = one.coder.sums(torch.stack(rows).to(one.device)).cpu()
    for column in found.T:
        assert len(set(column.tolist())) == len({tuple(row.tolist()) for row in rows})


@every_coder
def test_every_nan_comes_back_with_its_payload(name):
    """Quiet and signalling ones of both signs and all payloads, in bf16 and fp16, old and new."""
    nans = [n for n in range(0x10000) if (n & 0x7FFF) > 0x7F80 or (n & 0x7FFF) > 0x7C00]
    draw = random.Random(seeded(12))
    old = as_bits([*nans, *draw.choices(range(0x10000), k=2000)])
    new = as_bits([*draw.sample(nans, len(nans)), *draw.choices(nans, k=2000)])
    assert torch.equal(decoded(name, coded(name, old, new), old), new)


@every_coder
def test_weights_and_messages_may_begin_inside_others(name):
    one = CODERS[name]
    old, new = changed(3000, 4, 40, 0.6)
    inside = [torch.zeros(3009, dtype=torch.int16, device=one.device) for _ in range(2)]
    for whole, weights in zip(inside, (old, new), strict=True):
        whole[1:3001].copy_(weights)
    message = torch.zeros(16 + bound(3000), dtype=torch.uint8, device=one.device)
    found = torch.full((3,), 7, dtype=torch.int32, device=one.device)
    with one.chosen():
        size = one.coder.encode(inside[0][1:3001], inside[1][1:3001], message[8 : 8 + bound(3000)])
        decode_one(one.coder, message[8 : 8 + size], inside[0][1:3001], found[1:2])
    assert message[8 : 8 + size].tolist() == by_hand(old, new)
    assert found.tolist() == [7, 0, 7]
    assert torch.equal(*inside)


@every_coder
@pytest.mark.parametrize("numel", [0, 1, 700, 5000])
def test_messages_of_all_ranks_at_once(name, numel):
    """Each somewhere in its row, of any kind; one broken, the own one not looked at but for being stale."""
    one = CODERS[name]
    generator = torch.Generator().manual_seed(numel)
    kinds = [(0.0, 1), (0.3, 500), (1.0, 1), (1.0, 30000), (0.02, 3), (0.5, 100)]  # the fourth is RAW
    pairs = [changed(numel, seed, spread, share) for seed, (share, spread) in enumerate(kinds)]
    sent = [coded(name, old, new) for old, new in pairs]
    if numel:
        sent[4][HEADER_BYTES - 1] ^= 1  # one of the sums
    own = 2
    for stale in (False, True):
        if stale:
            sent[own][:8].view(torch.int64)[0] = weight_code.STALE
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
        verdicts[own] = weight_code.OWNER_CHANGED if stale else 0
        if numel:
            raw = int(sent[4][:8].view(torch.int64)) == weight_code.RAW
            verdicts[4] = weight_code.MESSAGE_CHANGED if raw else weight_code.WEIGHTS_DIFFER
        assert found.tolist() == verdicts
        for sender, (_, new) in enumerate(pairs):
            if sender == own:
                assert (on_device[2][sender] == 77).all(), "the own shard is not written"
            elif not verdicts[sender]:
                assert torch.equal(on_device[2][sender].cpu(), new), sender


@parametrized(CODERS, [name for name in CODERS if CODERS[name].device == "cpu"])
def test_nothing_outside_a_message_and_its_weights_is_read_or_written(name):
    """Whatever counts and codes say."""
    one = CODERS[name]
    random = torch.Generator().manual_seed(8)
    for share, spread in ((0.3, 500), (0.9, 200), (0.05, 1), (0.9, 1)):  # the last plane is another one
        pairs = [changed(4500 + 4 * seed, seed, spread, share) for seed in range(30)]
        old, new = next(pair for pair in pairs if len(by_hand(*pair)) % 8 == 0)
        message = coded(name, old, new)
        for start, stop in [(HEADER_BYTES, HEADER_BYTES + 24), (HEADER_BYTES + 24, message.numel())]:
            for _ in range(examples(name, 60)):
                broken = message.clone()
                for at in torch.randint(start, stop, (3,), generator=random).tolist():
                    broken[at] = int(torch.randint(256, (), generator=random))
                weights = before_a_wall(old.view(torch.uint8)).view(torch.int16)
                found = torch.full((1,), -1, dtype=torch.int32)
                with one.chosen():
                    decode_one(one.coder, before_a_wall(broken), weights, found)
                assert int(found) >= 0


@triton_coders
def test_decoding_does_not_wait_for_the_gpu(name):
    one = CODERS[name]
    old, new = changed(2500, 1, 200, 0.7)
    message, weights = coded(name, old, new).to(one.device), old.to(one.device, copy=True)
    found = torch.full((1,), -1, dtype=torch.int32, device=one.device)
    with pytest.raises(AssertionError), Waiting():
        int(found)
    places = torch.tensor([[0, message.numel()]], device=one.device)
    with Waiting():
        one.coder.decode(message[None], places, weights[None], -1, found)
    assert int(found) == 0
    assert torch.equal(weights.cpu(), new)


def test_no_bit_that_flips_makes_a_message_stale():
    """One rank alone would then gather in full, and wait for the others for ever."""
    flipped = {kind ^ 1 << bit for kind in (weight_code.CODED, weight_code.RAW) for bit in range(64)}
    assert weight_code.STALE not in flipped


@triton_coders
def test_a_message_whose_header_or_counts_are_wrong_leaves_the_weights_alone(name):
    one = CODERS[name]
    old, new = changed(5000, 2, 200, 0.7)
    message = coded(name, old, new)
    stale, short, counts, other = message.clone(), message[:-1], message.clone(), message.clone()
    stale[0], counts[HEADER_BYTES + 2], other[8] = weight_code.STALE, counts[HEADER_BYTES + 2] ^ 1, 1
    for broken in (stale, short, counts, other, message[:40], message[:HEADER_BYTES]):
        weights = old.to(one.device, copy=True)
        found = torch.full((1,), -1, dtype=torch.int32, device=one.device)
        decode_one(one.coder, broken.to(one.device), weights, found)
        assert int(found) == (weight_code.OWNER_CHANGED if broken is stale else weight_code.MESSAGE_CHANGED)
        assert torch.equal(weights.cpu(), old)
