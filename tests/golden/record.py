"""What the exchanges send and keep, recorded before the package is rearranged and compared after every step.

    python -m tests.golden.record          writes exchanges.json: a digest of all that a rank sends, of the
                                           sums and errors, over 20 steps of gradients

The gradients are made of whole numbers and powers of two, so that no library's random numbers enter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).with_name("exchanges.json")
RANKS, PER_NODE, STEPS = 4, 2, 20
NUMEL = 4 * 2176
"""17 blocks of 128 a shard."""

# (place, shape, exact): rows of 200, rows shorter than a block's share, a vector, and padding at the end.
ROWS = [(0, (20, 200), False), (4000, (40, 24), False), (4960, (96,), True), (5056, (7, 300), False)]
EVEN = [(0, (34, 256), False)]
CONTENTS: dict[str, list[tuple[int, tuple[int, ...], bool]] | None] = {
    "unknown": None,
    "even rows": EVEN,
    "uneven rows": ROWS,
}
METHODS: dict[str, dict[str, Any]] = {
    "loco 8": {"bits": 8},
    "loco 4": {"bits": 4},
    "loco 3": {"bits": 3},
    "loco 2": {"bits": 2},
    "loco 1": {"bits": 1},
    "uniform 4": {"bits": 4, "codec": "uniform"},
    "uniform 3": {"bits": 3, "codec": "uniform"},
    "uniform 2 rotated": {"bits": 2, "codec": "uniform", "rotation": "hadamard"},
    "levels 4 plain": {"bits": 4, "rotation": "none"},
    "loco 4 bf16 errors": {"bits": 4, "error_dtype": "bf16"},
    "loco 2 fp32 errors": {"bits": 2, "error_dtype": "fp32"},
    "naive 4": {"method": "naive", "bits": 4},
    "error feedback 4": {"method": "error_feedback", "bits": 4},
    "blocks of 32": {"bits": 4, "block_size": 32},
    "blocks of shards": {"bits": 4, "block_size": "shard"},
}


def gradient(rank: int, step: int) -> np.ndarray:
    """[NUMEL] of fp32, about normal, with blocks of unlike size; exact in any arithmetic."""
    random = np.random.Generator(np.random.PCG64((rank, step)))
    sums = random.integers(-(2**15), 2**15, (4, NUMEL)).sum(axis=0)
    exponents = random.integers(-8, 3, -(-NUMEL // 64)).repeat(64)[:NUMEL]
    return np.ldexp(sums.astype(np.float64), exponents - 20).astype(np.float32)


def digest(values: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of tensors' bytes."""
    import torch

    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def exchanged(kind: str, topology: str, dtype: str, method: dict[str, Any], contents: Any) -> dict[str, str]:
    """Digests of one rank's payloads, sums and errors after STEPS steps."""
    import torch
    import torch.distributed as dist
    from collectives.setups import setup_of

    from megatron_patch.collectives import makers
    from megatron_patch.quantization.blocks import Contents, Span

    spans = None if contents is None else tuple(Span.of(*span) for span in contents)
    options = method | {"topology": topology, "ranks_per_node": PER_NODE}
    make = makers.make_all_reduces if kind == "all_reduce" else makers.make_reduce_scatters
    (exchange,) = make([Contents(NUMEL, spans)], dist.group.WORLD, setup_of(**options)).exchanges
    sent, sums, rank = [], [], dist.get_rank()
    collectives = dist.all_to_all_single, dist.all_gather_into_tensor

    def recorded(collective: Any) -> Any:
        def run(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.clone())
            return collective(output, tensor, *args, **kwargs)

        return run

    dist.all_to_all_single, dist.all_gather_into_tensor = map(recorded, collectives)
    try:
        for step in range(STEPS):
            tensor = torch.from_numpy(gradient(rank, step)).to(getattr(torch, dtype))
            output = tensor.clone()
            size = NUMEL // RANKS
            part = output if kind == "all_reduce" else output[rank * size : (rank + 1) * size]
            exchange.start(output, part, True).wait()
            sums.append(part.clone())
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = collectives
    states = [tensor for state in exchange.states() for tensor in state.sender.state().values()]
    return {"sent": digest(sent), "sums": digest(sums), "errors": digest(states)}


def all_ranks(reports: list[dict[str, str]]) -> dict[str, list[str]]:
    """Of every digest those of all ranks."""
    return {key: [report[key] for report in reports] for key in reports[0]}


def several(setups: list[tuple[Any, ...]]) -> list[dict[str, str]]:
    """`exchanged` for each set-up, in one worker."""
    return [exchanged(*setup) for setup in setups]


def setups() -> dict[str, tuple[Any, ...]]:
    """Arguments of `exchanged` under the names of the record."""
    found = {}
    for kind, topology, dtype in itertools.product(
        ("reduce_scatter", "all_reduce"), ("flat", "two_hop"), ("float32", "bfloat16")
    ):
        for (method, options), (name, contents) in itertools.product(METHODS.items(), CONTENTS.items()):
            # bfloat16 and two hops change what enters an exchange, not how it is coded.
            if (dtype, topology) != ("float32", "flat") and method not in ("loco 4", "loco 2", "loco 1"):
                continue
            found[f"{kind}, {topology}, {dtype}: {method}, {name}"] = kind, topology, dtype, options, contents
    return found


def main() -> None:
    from worker_pool import WorkerPool

    from golden import record

    chosen = setups()
    with WorkerPool(RANKS) as pool:
        of_ranks = pool.run(record.several, list(chosen.values()))
    found = {name: all_ranks([rank[at] for rank in of_ranks]) for at, name in enumerate(chosen)}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{RECORD.name}: {len(found)} set-ups")


if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]
    main()
