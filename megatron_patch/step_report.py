"""StepReport: what `megatron_patch.report()` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank sent in its last optimizer step, summed over the buckets of its model chunks.

    Bytes are those that this rank sends to other ranks; norms are Euclidean, over this rank's own numbers.
    In Megatron's own training loop what needs the gradients' numbers is None for steps that it does not log.
    `str(report)` is one line.
    """

    step: int
    """Optimizer steps since compression was attached, skipped ones counted; a resumed run counts on."""
    method: str
    """`CompressionConfig.method`, resolved."""
    bits: int | None
    """`CompressionConfig.bits`, resolved; None with method none."""
    weight_gather: str
    """`CompressionConfig.weight_gather`."""
    compressed: bool
    """Whether gradients (1-bit Adam: momentum) were sent in low bits in this step: not with method none,
    before `start_step`, in a warm-up, or on a single rank."""
    gradient_bytes: float
    """Bytes sent to reduce gradients; with two hops, between nodes."""
    gradient_bytes_inside_node: float
    """With two hops, bytes sent to ranks of the same node; with hybrid FSDP2, of a shard group; else 0."""
    bits_per_gradient: float
    """Bits on the wire for every gradient element sent: scales, and vectors sent as they are, counted."""
    weight_bytes: float
    """Bytes sent to gather updated weights. With `overlap_param_gather` those of the step before, whose
    gather runs in this step's forward pass. 0 with the replicated optimizer."""
    bits_per_weight: float
    """Bits on the wire for every weight sent."""
    error_bytes: int
    """Memory of the error state e on this rank, wherever it lies."""
    device_bytes: int
    """Memory on the device now: error states, old shards and messages of the exact gather, 1-bit Adam's
    momentum, and payload buffers."""
    error_norm: float | None
    """Norm of decode(e), the error that was added to this step's gradients (docs/numerics.md, "The error");
    0 without error feedback."""
    gradient_norm: float | None
    """Norm of the gradients g that were compressed, as they entered the exchange, scaled as Megatron does."""
    snr_db: float | None
    """10 log10 of the energy of what was to be sent over that of what rounding lost; None if nothing was."""
    non_finite_blocks: int | None
    """Blocks with a NaN or an infinity; they are sent as NaN."""
    compression_seconds: float
    """Time spent in compressing and decompressing."""

    def __str__(self) -> str:
        method = self.method if self.bits is None else f"{self.method}, {self.bits} bits"
        state = "" if self.compressed or self.bits is None else " (not compressed in this step)"
        gradients, inside, weights, error = (
            f"{nbytes / 1e6:.3g} MB"
            for nbytes in (
                self.gradient_bytes,
                self.gradient_bytes_inside_node,
                self.weight_bytes,
                self.error_bytes,
            )
        )
        bits, sent = f"{self.bits_per_gradient:.2f} bits/gradient", f"{gradients} of gradients"
        if self.gradient_bytes_inside_node:
            sent += f" (and {inside} inside)"
        if self.weight_bytes:
            bits += f", {self.bits_per_weight:.2f} bits/weight"
            sent += f" and {weights} of weights"
        return f"step {self.step}: {method}{state}: {bits}; this rank sent {sent}; error state {error}"
