"""The releases of torch and Triton that are served."""

from __future__ import annotations

from megatron_patch.errors import UserError

TORCH, FSDP2, TRITON = (2, 8), (2, 9), (3, 4)
"""The oldest releases that work: of torch, of torch for FSDP2, and of Triton."""
NEWEST = (2, 15)
"""The newest release of torch that was run."""


def release_of(version: str) -> tuple[int, int]:
    """Return (2, 9) for "2.9.0a0+50eac811a6.nv25.09", the version in a container of NVIDIA."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def refuse_old(what: str, version: str, oldest: tuple[int, int], wanted: str) -> None:
    """Raise a UserError if a package is older than `oldest`; `wanted` says what to do."""
    if release_of(version) < oldest:
        raise UserError(f"{what} {version} is older than {oldest[0]}.{oldest[1]}: {wanted}")


def refuse_old_torch() -> None:
    import torch

    refuse_old("torch", torch.__version__, TORCH, "install a newer one")
