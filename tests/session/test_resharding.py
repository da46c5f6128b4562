"""Errors that change hands: random cuts of random tensors, against a count element by element."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from seeds import seeded

from megatron_patch.session import resharding
from megatron_patch.session.resharding import (
    ALL_REDUCE,
    OWNER,
    REDUCE_SCATTER,
    Part,
    Piece,
    Position,
    reshard,
)

Element = tuple[str, tuple[int, ...]]
TENSORS = {"a": (6, 8), "b": (12,), "c": (2, 4, 6), "d": (5, 7)}


def _boxes(rng: random.Random, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor cut along one axis into one to three boxes: (offset, shape) of each."""
    axis = rng.randrange(len(shape))
    cuts = sorted(rng.sample(range(1, shape[axis]), min(rng.randrange(3), shape[axis] - 1)))
    for low, high in itertools.pairwise([0, *cuts, shape[axis]]):
        offset = [low if a == axis else 0 for a in range(len(shape))]
        yield tuple(offset), tuple(high - low if a == axis else n for a, n in enumerate(shape))


def _buckets(rng: random.Random) -> list[tuple[tuple[Piece, ...], int]]:
    """All tensors, cut and laid into buckets in a random order, with gaps; some boxes lie transposed."""
    boxes = [(key, *box) for key, shape in TENSORS.items() for box in _boxes(rng, shape)]
    rng.shuffle(boxes)
    buckets = []
    while boxes:
        take, boxes = boxes[: (size := rng.randrange(1, 5))], boxes[size:]
        pieces, end = [], 0
        for key, offset, shape in take:
            order = list(range(len(shape)))
            if rng.random() < 0.3:
                order.reverse()
            strides, step = [0] * len(shape), 1
            for axis in reversed(order):
                strides[axis], step = step, step * shape[axis]
            end += rng.randrange(4)
            pieces.append(Piece(key, key, offset, shape, end, tuple(strides)))
            end += step
        buckets.append((tuple(pieces), end + rng.randrange(4)))
    return buckets


def _elements(part: Part) -> Iterator[tuple[int, Element]]:
    """(place in the part, element) of everything that a part is of."""
    for piece in part.pieces:
        for index in itertools.product(*map(range, piece.shape)):
            in_bucket = piece.start + sum(i * s for i, s in zip(index, piece.strides, strict=True))
            place = _place(part.position, in_bucket)
            if place is not None:
                yield place, (piece.key, tuple(o + i for o, i in zip(piece.offset, index, strict=True)))


def _place(position: Position, in_bucket: int) -> int | None:
    for row in range(position.rows):
        place = in_bucket - position.start - row * position.stride
        if 0 <= place < position.length:
            return row * position.length + place
    return None


def _senders(kind: str, buckets: list[tuple[tuple[Piece, ...], int]], n: int, average: bool) -> list[Part]:
    weight = 1 / n if average else 1.0
    return [
        Part(kind, pieces, numel, Position(0, numel), index, n, weight)
        for pieces, numel in buckets
        for index in range(n)
    ]


def _random_errors(rng: random.Random, parts: list[Part]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return [torch.randn(part.position.numel, generator=generator) for part in parts]


def _owed(parts: list[Part], errors: list[torch.Tensor]) -> dict[Element, float]:
    """What the exchange of these errors would add to each element of the reduced gradient."""
    owed: dict[Element, float] = defaultdict(float)
    for part, error in zip(parts, errors, strict=True):
        for place, element in _elements(part):
            owed[element] += float(error[place]) * part.weight
    return owed


@pytest.mark.parametrize("seed", range(12))
def test_what_is_owed_stays_owed(seed: int) -> None:
    """Sums and averages, 1 to 5 senders, any cut of the model: every element keeps what it was owed."""
    rng = random.Random(seeded(seed))
    old = _senders(REDUCE_SCATTER, _buckets(rng), rng.randrange(1, 6), rng.random() < 0.5)
    new = _senders(REDUCE_SCATTER, _buckets(rng), rng.randrange(1, 6), rng.random() < 0.5)
    errors = _random_errors(rng, old)
    saved = [(part, lambda error=error: error.clone()) for part, error in zip(old, errors, strict=True)]
    found = list(reshard(new, saved))
    assert [missing for _, missing in found] == [0] * len(new)
    expected, owed = _owed(old, errors), _owed(new, [values for values, _ in found])
    assert expected.keys() == owed.keys()
    assert len(owed) == 6 * 8 + 12 + 2 * 4 * 6 + 5 * 7
    for element, value in owed.items():
        assert value == pytest.approx(expected[element], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_as_many_senders_keep_their_own(seed: int) -> None:
    rng = random.Random(seeded(100 + seed))
    senders = rng.randrange(1, 5)
    old = _senders(REDUCE_SCATTER, _buckets(rng), senders, False)
    new = _senders(REDUCE_SCATTER, _buckets(rng), senders, False)
    errors = _random_errors(rng, old)
    own = {
        (part.index, element): float(error[place])
        for part, error in zip(old, errors, strict=True)
        for place, element in _elements(part)
    }
    saved = [(part, lambda error=error: error) for part, error in zip(old, errors, strict=True)]
    for part, (values, missing) in zip(new, reshard(new, saved), strict=True):
        assert missing == 0
        for place, element in _elements(part):
            assert float(values[place]) == pytest.approx(own[part.index, element])
        gaps = torch.ones(part.position.numel, dtype=torch.bool)
        gaps[[place for place, _ in _elements(part)]] = False
        assert not values[gaps].any()


def test_shards_and_owners_go_to_who_takes_over() -> None:
    """Two optimizer instances of two shards each become one: instances' and owners' errors are shared out."""
    rng = random.Random(7)
    bucket = _buckets(rng)[0]
    numel = bucket[1] + bucket[1] % 2
    half = numel // 2
    whole = Position(0, numel)
    new = [Part(REDUCE_SCATTER, bucket[0], numel, whole, index, 4, 1.0) for index in range(4)]
    old = list(new)
    for shard in range(2):
        start = shard * half
        mine = Position(start, half)
        old += [Part(ALL_REDUCE, bucket[0], numel, mine, index, 2, 1.0) for index in range(2)]
        old.append(Part(OWNER, bucket[0], numel, Position(start, half // 2), 0, 1, 1.0))
        old.append(Part(OWNER, bucket[0], numel, Position(start + half // 2, half - half // 2), 0, 1, 1.0))
    errors = _random_errors(rng, old)
    saved = [(part, lambda error=error: error) for part, error in zip(old, errors, strict=True)]
    found = [values for values, _ in reshard(new, saved)]
    expected, owed = _owed(old, errors), _owed(new, found)
    for element, value in owed.items():
        assert value == pytest.approx(expected[element], rel=1e-5, abs=1e-5)
    between = _owed(old[4:], errors[4:])
    for part, values, own in zip(new, found, errors[:4], strict=True):
        for place, element in _elements(part):
            assert float(values[place]) == pytest.approx(float(own[place]) + between[element] / 4, abs=1e-5)


def test_elements_that_nobody_held_are_counted_and_start_from_zero() -> None:
    piece = Piece("w", "w", (0, 0), (4, 6), 2, (6, 1))
    held = Piece("w", "w", (1, 0), (2, 6), 0, (6, 1))
    other = Piece("v", "v", (0,), (3,), 12, (1,))
    new = Part(REDUCE_SCATTER, (piece,), 30, Position(0, 30), 0, 1, 1.0)
    old = Part(REDUCE_SCATTER, (held, other), 15, Position(0, 15), 0, 1, 1.0)
    ((values, missing),) = reshard([new], [(old, lambda: torch.ones(15))])
    assert missing == 12
    assert values.view(5, 6)[:, :].sum() == 12
    assert values[2:26].view(4, 6)[1:3].eq(1).all()


def test_equal_pieces_are_compared_once_for_all_saved_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP2 each of N ranks has the chunks of all: compared for every rank they take N^3 steps."""
    rng = random.Random(3)
    new = _senders(REDUCE_SCATTER, _buckets(rng)[:1], 2, False)
    old = _senders(REDUCE_SCATTER, _buckets(random.Random(3))[:1], 8, False)
    compared, original = [], resharding._overlaps
    monkeypatch.setattr(resharding, "_overlaps", lambda *parts: compared.append(parts) or original(*parts))
    errors = _random_errors(rng, old)
    saved = [(part, lambda error=error: error) for part, error in zip(old, errors, strict=True)]
    found = list(reshard(new, saved))
    assert len(found) == 2
    assert len(compared) == 2
