"""The two sums of a shard: those of the description, and no pattern of moves leaves them as they were."""

from __future__ import annotations

import itertools
import random

import torch
from seeds import seeded
from simulation.weight_sums import sums_by_hand
from weights.weight_coders import CODERS, as_bits, changed, every_coder, patterns

FEWER = {"triton-interpreted": 4}
"""By how much a coder's tests are fewer than those of the others."""


@every_coder
def test_sums_are_those_of_the_description(name):
    one = CODERS[name]
    for numel in (0, 1, 255, 5000, 70_001):
        x = changed(max(numel, 1), numel, 9, 0.5)[1][:numel]
        wanted = [n - (1 << 64) if n >> 63 else n for n in sums_by_hand(patterns(x))]
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
    differences += [structured(draw, numel) for _ in range(1000 // FEWER.get(name, 1))]
    rows = [whole]
    for moves in differences:
        row = whole.clone()
        for place, move in moves:
            row[place] = as_bits([(int(row[place]) + move) % 0x10000])[0]
        if not torch.equal(row, whole):
            rows.append(row)
    for _ in range(300 // FEWER.get(name, 1)):  # permutations
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
