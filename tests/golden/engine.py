"""Losses of Megatron's engine and predictions of the planner, before and after the package is rearranged.

    python -m tests.golden.engine FILE         writes them
    python -m tests.golden.engine OLD NEW      compares two such files; status 1 where a number differs

Losses depend on the processor, so both files are written on one machine and neither is committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PLANS = {
    "llama2_7b": ["configs/models/llama2_7b.yaml", "--nodes", "4", "--inter-gbit", "100"],
    "mixtral": ["configs/models/mixtral_8x7b.yaml", "--nodes", "8", "--inter-gbit", "50"],
    "hybrid": ["configs/models/llama2_7b.yaml", "--nodes", "4", "--strategy", "hybrid"],
    "scale": ["configs/models/llama3_8b.yaml", "--scale"],
}


def recorded(folder: Path) -> dict[str, object]:
    """Losses and gradient norms of engine runs, and the JSON of plans."""
    from workflows import engine_runs
    from workflows.engine_runs import LOCO, RUNS, UNTIED, Run
    from workflows.test_engine import losses

    start = ["--compression-start-step", "0"]
    onebit = ["--compression-method", "onebit_adam", "--compression-warmup-steps", "2"]
    hops = ["--compression-topology", "two_hop", "--compression-ranks-per-node", "2", *start]
    exact = ["--compression-bits", "2", "--compression-weight-gather", "exact", *start]
    runs = {
        "loco": RUNS["loco"],
        "loco-experts": RUNS["loco-experts"],
        "loco-parallel": RUNS["loco-parallel"],
        "exact": Run([*UNTIED, "--bf16"], exact),
        "onebit": Run(UNTIED, onebit),
        "two-hop": Run(UNTIED, [*LOCO, *hops], ranks=4),
    }
    engine_runs.engine(folder, runs)
    found: dict[str, object] = {f"losses {name}": losses(folder / name) for name in runs}
    for name, arguments in PLANS.items():
        path = folder / f"{name}.json"
        command = [sys.executable, "-m", "megatron_patch.workflows.cli", "plan", *arguments]
        subprocess.run([*command, "--json", str(path)], check=True, cwd=TESTS.parent, capture_output=True)
        found[f"plan {name}"] = json.loads(path.read_text())
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) == 2:
        old, new = (json.loads(Path(path).read_text()) for path in arguments)
        differ = [name for name in old | new if old.get(name) != new.get(name)]
        print("\n".join(differ) or f"{len(old)} records are equal")
        return 1 if differ else 0
    with tempfile.TemporaryDirectory() as folder:
        Path(arguments[0]).write_text(json.dumps(recorded(Path(folder)), indent=1))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    sys.exit(main(sys.argv[1:]))
