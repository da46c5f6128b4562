"""The releases of torch and Triton that are served."""

from __future__ import annotations

from megatron_patch.errors import UserError

OLDEST = {"torch": (2, 8), "FSDP2": (2, 9), "triton": (3, 4)}
"""The oldest releases that work: of torch, of torch for FSDP2, and of Triton."""


def too_old(what: str, version: str) -> str | None:
    """Return a line if a release is older than OLDEST; None if it is not.

    In a container of NVIDIA torch's version is "2.9.0a0+50eac811a6.nv25.09", and counts as 2.9.
    """
    oldest, (major, minor, *_) = OLDEST[what], version.split(".")
    if (int(major), int(minor)) >= oldest:
        return None
    package, of = ("torch", " with FSDP2") if what == "FSDP2" else (what, "")
    return f"{package} {version} is older than {oldest[0]}.{oldest[1]}, the oldest that is served{of}"


def refuse_old(what: str, version: str, way_out: str) -> None:
    """Raise a UserError if a release is older than OLDEST."""
    if old := too_old(what, version):
        raise UserError(f"{old}: {way_out}")


def refuse_old_torch() -> None:
    import torch

    refuse_old("torch", torch.__version__, "install a newer one")
