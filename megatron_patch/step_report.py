"""StepReport: what `megatron_patch.report()` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank sent in its last optimizer step, summed over the buckets of its model chunks.

    Bytes are those that this rank sent to other ranks; norms are L2 norms over this rank's own numbers. In
    Megatron's training loop `error_norm`, `gradient_norm`, `snr_db` and `non_finite_blocks` are None for
    steps that Megatron does not log. `str(report)` is one line.
    """

    step: int
    """Optimizer steps since compression was attached, skipped steps included; a resumed run counts on."""
    skipped_steps: int
    """Of these, the steps that used no gradients: an optimizer found an overflow, the loop cleared gradients
    before a step, or called `skip_step`. Each sets e to zero."""
    method: str
    """The method that is used (`CompressionConfig.method`)."""
    bits: int | None
    """The bits of a code (`CompressionConfig.bits`); None with method none."""
    weight_gather: str
    """`CompressionConfig.weight_gather`."""
    compressed: bool
    """Whether gradients (1-bit Adam: momentum) were sent in low bits in this step. They are not with method
    none, before `start_step`, in a warm-up, or on a single rank."""
    gradient_bytes: float
    """Bytes sent to reduce gradients; with two hops, the bytes sent to other nodes."""
    gradient_bytes_inside_node: float
    """With two hops, bytes sent within the node; with hybrid FSDP2, within the shard group; else 0."""
    bits_per_gradient: float
    """Bits sent per gradient element, with scales and uncompressed vectors included."""
    weight_bytes: float
    """Bytes sent to gather updated weights; 0 with the replicated optimizer. `overlap_param_gather` gathers
    the weights of the previous step, in this step's forward pass."""
    bits_per_weight: float
    """Bits sent per weight."""
    error_bytes: int
    """Memory of the error state e on this rank, on the device or in host memory."""
    device_bytes: int
    """Device memory in use now for error states, the exact gather's old shards and messages, 1-bit Adam's
    momentum, outer steps' anchors, and payload buffers."""
    error_norm: float | None
    """Norm of decode(e), the error that was added to this step's gradients (docs/numerics.md, "The error").
    It is 0 without error feedback."""
    gradient_norm: float | None
    """Norm of the compressed gradients g, with the scaling that Megatron applies before the exchange."""
    snr_db: float | None
    """10 log10(sum h^2 / sum r^2), where r is what rounding lost of h = g + e; None if a sum is 0."""
    non_finite_blocks: int | None
    """The number of blocks with a NaN or an infinity, which are sent as NaN."""
    compression_seconds: float
    """Time spent compressing and decompressing."""
    bytes_between_nodes: float
    """Bytes sent to ranks of other nodes, gradients and weights, where Megatron's own collectives are counted
    as rings; all bytes where the launcher does not say how many ranks a node has."""
    bytes_inside_node: float
    """Bytes sent to ranks of the same node."""
    wait_seconds: float | None
    """The part of the step that waited for exchanges of gradients and weights (exposed communication); None
    outside Megatron's DistributedDataParallel, and in steps of Megatron's training loop in which it is not
    measured."""

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
        waited = "" if self.wait_seconds is None else f"; waited {self.wait_seconds:.3f} s for exchanges"
        return (
            f"step {self.step}: {method}{state}: {bits}; this rank sent {sent}{waited}; error state {error}"
        )
