"""What a host runs: torchrun's agent, which meets the other hosts' and starts this one's ranks."""

from __future__ import annotations

from benchmarks.network.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
