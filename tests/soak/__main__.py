"""`python -m tests.soak`: kills runs, compares them with an undisturbed one, and prints what happened."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

from .comparison import differences
from .harness import Runs, Soak, Tally

KILLS_PER_RUN = 6


def soak(asked: Soak, kills: int) -> Tally:
    """Disturb runs until `kills` kills have happened."""
    runs, tally = Runs(asked), Tally()
    undisturbed = runs.undisturbed()
    while tally.kills < kills:
        disturbed = runs.disturbed(runs.plan(min(KILLS_PER_RUN, kills - tally.kills)), tally)
        found = differences(undisturbed, disturbed)
        tally.differences += found
        if not found:
            shutil.rmtree(disturbed)
    return tally


def table(tally: Tally, seconds: float) -> str:
    """The result, for people."""
    failed = {text.partition(":")[0] for text in tally.differences}
    rows = [
        *(("killed", ""), *((f"  {name}", count) for name, count in sorted(tally.points.items()))),
        ("kills", tally.kills),
        ("restarts by the launcher", tally.restarts),
        ("continued with --resume", tally.resumed),
        ("steps made again", tally.repeated_steps),
        ("runs", tally.runs),
        ("runs that ended bit-identical", tally.runs - len(failed)),
        ("minutes", f"{seconds / 60:.1f}"),
    ]
    return "\n".join(f"{name:<40}{value:>6}" for name, value in rows)


def main() -> int:
    """Returns 1 if any run ended otherwise than the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="loco", help="a name in configs/methods")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks: twice as many")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # Megatron's, of what is not installed
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    settings = tuple(args.overrides)
    asked = Soak(folder, args.method, args.tensor_parallel, seed=args.seed, settings=settings)
    tally = soak(asked, args.kills)
    print(table(tally, time.monotonic() - begin))
    if tally.differences:
        print("\n".join(tally.differences), f"runs are left in {folder}", sep="\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
