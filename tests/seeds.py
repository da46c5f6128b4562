"""The one home of the random seed from which numerics tests make their gradients and models.

    for s in 1 2 3 4 5; do MEGATRON_LOCO_TEST_SEED=$s .venv/bin/python -m pytest tests/simulation ...; done

Unset, or 0, the tests use the same numbers on every run. Worker processes (worker_pool.py) inherit the
variable from the process that starts them.
"""

from __future__ import annotations

import os

SEED = int(os.environ.get("MEGATRON_LOCO_TEST_SEED", "0"))


def seeded(number: int) -> int:
    """A test's own seed, moved apart from that of other values of the variable."""
    return number + 15_485_863 * SEED
