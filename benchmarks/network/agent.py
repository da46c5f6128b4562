"""Runs torchrun's agent on a host: it meets the other hosts' agents and starts this host's ranks."""

from __future__ import annotations

from benchmarks.network.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
