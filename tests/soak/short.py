"""The short form of the soak, for `make test`: four kills, and a run that must be found to differ.

python -m tests.soak.short FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from .board import Kill
from .comparison import differences
from .harness import Runs, Soak, Tally

# The aimed three need two saves after the first, whose step depends on the processor: step 30 is late enough.
STEPS = 36
KILLS = [
    Kill(rank=1, seconds=0.5),
    Kill(rank=1, point="exchange: under way", nth=12),
    Kill(rank=0, point="save: tracker emptied", nth=1),
    Kill(rank=0, point="save: files complete", nth=1),
]


def main(folder: Path) -> None:
    """Raises AssertionError."""
    runs, tally = Runs(Soak(folder, steps=STEPS)), Tally()
    undisturbed = runs.undisturbed()
    assert differences(undisturbed, runs.disturbed(KILLS, tally)) == []
    assert tally.kills == len(KILLS), tally
    assert tally.points["exchange: under way"] == 1, tally

    # The comparison sees what it must: here the senders' errors are not put back after step 9.
    from megatron_patch.megatron.checkpoint import dist_checkpointing

    dist_checkpointing.restore = lambda *args: None
    found = differences(undisturbed, runs.disturbed([Kill(rank=0, point="step done", nth=10)], tally))
    assert any("step 10" in line for line in found), found
    print(f"{tally.kills} kills, and each run compared")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
