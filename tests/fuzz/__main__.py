"""`python -m tests.fuzz`: many random files for every loader; prints the time of each. `make fuzz`."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .loaders import LOADERS, Loader
from .outcome import outcome


def fuzz(loader: Loader, inputs: int, number: int) -> tuple[collections.Counter[str], float]:
    """How many inputs were read and refused, and the seconds of the slowest."""
    found: collections.Counter[str] = collections.Counter()
    slowest = 0.0

    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        nonlocal slowest
        drawn = data.draw(loader.inputs)
        start = time.perf_counter()
        found[outcome(loader, folder, drawn)] += 1
        slowest = max(slowest, time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run()
    return found, slowest


def main() -> int:
    """Returns 1 if a loader ended otherwise than with what it read, or one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loader", help="only this one")
    args = parser.parse_args()
    status = 0
    print(f"{'loader':<20}{'read':>8}{'refused':>9}{'seconds':>9}{'slowest':>9}")
    for loader in LOADERS:
        if args.loader not in (None, loader.name):
            continue
        start = time.perf_counter()
        try:
            found, slowest = fuzz(loader, args.inputs, args.seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            print(f"{loader.name:<20}  FAILED after {time.perf_counter() - start:.1f} s", flush=True)
            status = 1
            continue
        seconds = time.perf_counter() - start
        print(
            f"{loader.name:<20}{found['read']:>8}{found['refused']:>9}{seconds:>9.1f}{slowest:>9.3f}",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
