"""CompressionConfig: what is compressed, and how. The one home of the options' names and defaults.

The same fields are the keys of a configuration's `compression:` section and the command-line flags
`--compression-FIELD` (integration/arguments.py makes them from this class).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from megatron_patch.errors import UserError, nearest

METHODS = ("none", "naive", "error_feedback", "loco")
BITS = (8, 4, 2, 1)
ROUNDINGS = ("nearest", "stochastic")
ERROR_DTYPES = ("int8", "bf16", "fp32")
TOPOLOGIES = ("auto", "flat", "two_hop")
SHARD = "shard"
DEFAULT_ERROR_BETA = 0.8


def _option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Options of low-bit gradient communication, validated on construction.

    Raises:
        UserError: an impossible value; the message names the field, the value and what is allowed.
    """

    method: str = _option(
        "loco",
        "none: Megatron's own exchange; naive: quantize, no memory; error_feedback: add the whole last "
        "error; loco: add a moving average of past errors",
        METHODS,
    )
    bits: int = _option(4, "bits per gradient element on the wire", BITS)
    block_size: int | str = _option(
        128, "elements that share one scale: a power of two from 16, or 'shard' (one scale a shard)"
    )
    rounding: str = _option("nearest", "how a gradient is rounded to its code", ROUNDINGS)
    error_beta: float | None = _option(
        None, f"weight of the OLD error in the moving average, 0 <= beta < 1 (loco: {DEFAULT_ERROR_BETA})"
    )
    error_dtype: str = _option("int8", "how the error is stored between steps", ERROR_DTYPES)
    reset_interval: int = _option(512, "optimizer steps after which the error is set to zero (0: never)")
    start_step: int = _option(0, "optimizer steps with Megatron's own exchange before compression starts")
    seed: int = _option(1234, "seed of stochastic rounding")
    topology: str = _option(
        "auto",
        "flat: every rank sends to every owner; two_hop: sum inside a node first, then send between nodes; "
        "auto: two_hop where several of a group's ranks share a node and it spans several nodes",
        TOPOLOGIES,
    )
    ranks_per_node: int | None = _option(
        None, "ranks of the job on one node, numbered one after the other (default: LOCAL_WORLD_SIZE)"
    )
    intra_bits: int | None = _option(
        None, "two_hop: bits inside the node (default: the gradient's own precision)", (8,)
    )
    save_error: bool = _option(
        True, "save the errors with every checkpoint (int8: 1.02 bytes an element of every sender)"
    )
    strict_load: bool = _option(
        False, "refuse a checkpoint whose error state is damaged, instead of starting from zero"
    )

    def __post_init__(self) -> None:
        self._check_choice("method", METHODS)
        self._check_choice("bits", BITS)
        self._check_choice("rounding", ROUNDINGS)
        self._check_choice("error_dtype", ERROR_DTYPES)
        self._check_choice("topology", TOPOLOGIES)
        if self.intra_bits is not None:
            self._check_choice("intra_bits", (8,))
        per_node = self.ranks_per_node
        if per_node is not None and (not _is_int(per_node) or per_node < 1):
            self._reject("ranks_per_node", "a whole number, 1 or more")
        for name in ("save_error", "strict_load"):
            if not isinstance(getattr(self, name), bool):
                self._reject(name, "true or false")
        size = self.block_size
        if size != SHARD and not (_is_int(size) and int(size) >= 16 and int(size) & (int(size) - 1) == 0):
            self._reject("block_size", "a power of two from 16, or 'shard'")
        for name in ("reset_interval", "start_step", "seed"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                self._reject(name, "a whole number, 0 or more")
        if self.rounding == "stochastic" and self.bits == 1:
            self._reject("rounding", "nearest with bits 1: a 1-bit code is a sign")
        self._resolve_beta()

    def _resolve_beta(self) -> None:
        beta = self.error_beta
        if beta is None:
            object.__setattr__(self, "error_beta", DEFAULT_ERROR_BETA if self.method == "loco" else 0.0)
            return
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not math.isfinite(beta):
            self._reject("error_beta", "a number from 0 up to but not including 1")
        if not 0 <= beta < 1:
            self._reject("error_beta", "a number from 0 up to but not including 1")
        if beta != 0 and self.method == "error_feedback":
            self._reject("error_beta", "0 with method error_feedback (use method loco for a moving average)")
        object.__setattr__(self, "error_beta", float(beta))

    @property
    def beta(self) -> float:
        """Weight of the old error, resolved (DESIGN section 4, step 3)."""
        assert self.error_beta is not None
        return self.error_beta

    @property
    def has_memory(self) -> bool:
        """Whether the sender keeps an error state between steps."""
        return self.method in ("error_feedback", "loco")

    @property
    def compresses(self) -> bool:
        """Whether gradients leave in low bits at all."""
        return self.method != "none"

    def _check_choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or value not in allowed:
            self._reject(name, "one of " + ", ".join(map(str, allowed)) + nearest(value, allowed))

    def _reject(self, name: str, allowed: str) -> None:
        raise UserError(f"compression.{name}: {getattr(self, name)!r} is not allowed; it must be {allowed}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for YAML and flags."""
        return dataclasses.asdict(self)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
