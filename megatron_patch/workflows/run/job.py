"""Describes what every rank of a run executes: the torchrun command, its environment and its logs."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SAVE_SECONDS = 600
"""How long torchrun's agent waits for ranks that were asked to stop and save a checkpoint first."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
FSDPS = {"--use-megatron-fsdp", "--use-torch-fsdp2"}


@dataclass(frozen=True)
class Launch:
    """The `launch:` section: how a run's processes are started."""

    device: str = "cuda"
    """`cuda`, or `cpu` to run Megatron over gloo on this machine's processor."""
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    """The first node's host:port, which nnodes > 1 needs when a run starts, but not in a dry run."""
    script: str = "pretrain_scripts/pretrain_gpt.py"
    """The path of the training script, absolute or relative to the repository."""
    max_restarts: int = 0
    """How often all ranks are restarted from the last checkpoint after one of them has died."""
    imports: tuple[str, ...] = ()
    """The absolute paths of Python files that register the user's codecs and exchanges."""

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes


@dataclass(frozen=True)
class Job:
    """The job of a run: every rank executes `script` with `flags`; logs and failures go below `folder`."""

    launch: Launch
    script: Path
    flags: list[str]
    folder: Path

    @property
    def logs(self) -> Path:
        """The folder of this node's logs; several nodes share the run's folder."""
        logs = self.folder / "logs"
        return logs / f"node-{self.launch.node_rank}" if self.launch.nnodes > 1 else logs

    @property
    def failures(self) -> Path:
        return self.folder / "failures"

    @property
    def forked(self) -> bool:
        """Whether the ranks are forked from the launcher's process."""
        return self.launch.device == "cpu" and self.launch.nnodes == 1

    def torchrun(self) -> list[str]:
        """Return the torchrun command of this job for this node."""
        launch = self.launch
        command = ["torchrun", f"--nproc-per-node={launch.nproc_per_node}"]
        if launch.nnodes > 1:
            command += [
                f"--nnodes={launch.nnodes}",
                f"--node-rank={launch.node_rank}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={launch.rdzv_endpoint or 'FIRST_NODE:29500'}",
                "--rdzv-id=megatron-loco",
            ]
        else:
            command += ["--standalone"]
        if launch.max_restarts:
            command += [f"--max-restarts={launch.max_restarts}"]
        return [*command, "-m", "megatron_patch.launch", str(self.script), *self.flags]

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the torchrun command needs."""
        variables: dict[str, str] = {}
        if self.launch.device == "cpu":
            from megatron_patch.megatron.cpu.device import CPU_ENVIRONMENT

            variables = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
            if FSDPS & set(self.flags):
                variables[_CONNECTIONS] = "8"  # CUDA's default: both refuse 1
            if self.launch.nnodes > 1:  # The loopback interface reaches no other node (see prepare.py).
                variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "INTERFACE")
        elif _wants_one_connection(self.flags):
            variables[_CONNECTIONS] = os.environ.get(_CONNECTIONS, "1")
        if "--exit-signal-handler" in self.flags:
            variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_SAVE_SECONDS)
        if self.launch.max_restarts:
            # Otherwise restarted ranks find the addresses of the dead ones: pytorch/pytorch#135712.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return variables

    def command_text(self) -> str:
        """Return the command, with its environment variables, as a user would type it."""
        variables = [f"{name}={value}" for name, value in self.variables().items()]
        return " ".join([*variables, shlex.join(self.torchrun())]) + "\n"


def _wants_one_connection(flags: Sequence[str]) -> bool:
    """Whether ranks with these flags need CUDA_DEVICE_MAX_CONNECTIONS, or have it set already.

    Megatron asserts 1 with tensor or context parallelism up to Hopper, and more than 1 with FSDP. In other
    cases a single queue would only delay exchanges, which have their own streams, behind backward passes.
    """
    if FSDPS & set(flags):
        return False
    if _CONNECTIONS in os.environ:
        return True
    sizes = ("--tensor-model-parallel-size", "--context-parallel-size")
    if all(flag not in sizes or int(value) == 1 for flag, value in itertools.pairwise(flags)):
        return False
    import torch

    # Without a GPU here, the job is planned for Hopper (prepare.py).
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10
