"""Exchanges of several hops: the first sender rotates blocks, the last owner rotates them back."""

from __future__ import annotations

from typing import Any

import pytest
from seeds import seeded

RANKS = 4
ROWS = {"whole blocks": (64, 128), "short rows": (80, 96)}


def exchanged(kind: str, shape: tuple[int, int], options: dict[str, Any]) -> dict[str, Any]:
    """One exchange of a bucket of one matrix, a vector and padding; what is lost of it, and who rotated."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives.makers import make_all_reduces, make_reduce_scatters
    from megatron_patch.quantization.blocks import Contents, Span

    rank, matrix = dist.get_rank(), shape[0] * shape[1]
    numel = matrix + 512
    contents = Contents(numel, (Span.of(0, shape), Span.of(matrix, (200,), exact=True)))
    make = make_reduce_scatters if kind == "reduce-scatter" else make_all_reduces
    gradients = []
    for other in range(RANKS):
        generator = torch.Generator().manual_seed(seeded(other))
        gradient = torch.zeros(numel)
        gradient[: matrix + 200] = torch.randn(matrix + 200, generator=generator)
        gradients.append(gradient * torch.linspace(0.5, 2, numel))
    exact = torch.stack(gradients).double().mean(0)
    setup = setup_of(method="naive", ranks_per_node=2, **options)
    (exchange,) = make([contents], dist.group.WORLD, setup).exchanges
    senders = exchange.senders
    bucket = gradients[rank].clone()
    size = numel // RANKS
    output, here = bucket, slice(None)
    if kind == "reduce-scatter":
        here = slice(rank * size, (rank + 1) * size)
        output = bucket[here]
    exchange.start(bucket, output, True).wait()
    lost = (output - exact[here]).double()
    return {
        "coded": float(lost[:matrix].square().sum()) if kind == "all-reduce" else float(lost.square().sum()),
        "energy": float(exact[here].square().sum()),
        "vector": bool(kind == "reduce-scatter" or (lost[matrix:].abs().max() < 1e-6)),
        "rotates": sum(sender.codec.rotation.sender for sender in senders),
        "rotates back": sum(sender.codec.rotation.owner for sender in senders),
        "rotated": all(sender.codec.rotation.rotated for sender in senders),
        "hops": len(senders),
    }


@pytest.mark.parametrize("kind", ["reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("topology", ["flat", "two_hop"])
def test_one_rotation_and_one_back_whatever_the_hops(pool: Any, kind: str, rows: str, topology: str) -> None:
    options = {"bits": 4, "topology": topology}
    reports = pool.run(exchanged, kind, ROWS[rows], options, world_size=RANKS)
    for report in reports:
        assert report["rotated"]
        assert (report["rotates"], report["rotates back"]) == (1, 1)
        assert report["hops"] == (kind == "all-reduce") + 1
        assert report["vector"]
    lost = sum(report["coded"] for report in reports) / sum(report["energy"] for report in reports)
    # Each hop of 4 bits loses as much.
    assert lost == pytest.approx(0.0087 if kind == "reduce-scatter" else 0.0174, rel=0.1)
