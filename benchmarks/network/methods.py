"""The methods that are compared, by name: stock Megatron, LoCo, 1-bit Adam and PyTorch's DDP.

fp32_reduce_scatter     stock Megatron; gloo's own reduce-scatter moves twice the ideal bytes
bf16_reduce_scatter     the same with bf16 gradients
bf16_alltoall           Megatron's reduce_scatter_with_fp32_accumulation: the honest baseline
bf16_allreduce          stock Megatron, replicated optimizer, so no weight gather: 1-bit Adam's own baseline
loco8, loco4, loco2     LoCo, flat (also naive4, error_feedback4, loco1, ...)
loco4_two_hop           LoCo within the host first, then between hosts
none_exact              bf16_alltoall with the exact weight gather
none_auto               the faster of both, by turns; loco4_trial: turns of four choices (trials.py)
loco4_exact             LoCo with the exact weight gather (also loco2_exact, loco4_two_hop_exact, ...)
outer30_loco4           outer steps every 30 steps between hosts, which are optimizer instances (also
                        outer10_none_exact, ...); a cell measures whole intervals, and their mean step;
                        outer30d10_loco4: each exchange overlaps with 10 steps
onebit_adam             1-bit Adam, replicated optimizer: after its warm-up (_two_hop: as above)
onebit_adam_warmup      the same, still in its warm-up
ddp_bf16                PyTorch DDP, its bf16 hook
ddp_powersgd_rank4      PyTorch DDP, its PowerSGD hook with matrices of rank 4 (or any other)
ddp_loco4               PyTorch DDP, LoCo (also ddp_loco2, ...)
fsdp2_bf16              PyTorch FSDP2, sharded over all ranks (fsdp2_loco4: LoCo)
hsdp_bf16               PyTorch FSDP2, sharded over a host's ranks and replicated (hsdp_loco4: LoCo)
mfsdp_bf16              Megatron-FSDP, optim_grads (mfsdp_loco4, mfsdp_loco4_exact, mfsdp_bf16_exact)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.plan.methods import low_bit

BASELINE = "bf16_alltoall"
ALL_REDUCE = "bf16_allreduce"
ONEBIT, ONEBIT_WARM_UP, ONEBIT_TWO_HOP = "onebit_adam", "onebit_adam_warmup", "onebit_adam_two_hop"
FIRST_STEPS = 3
"""The fewest unmeasured steps of a model, in which buffers are allocated and 1-bit Adam's warm-up ends."""
EXACT = "_exact"
EXACT_BITS = 2.7
"""About how many bits per weight the exact gather sends, to estimate times; the real bits are measured."""
_FOR_EVER = 10**9
_STOCK = {"fp32_reduce_scatter": 32, "bf16_reduce_scatter": 16, BASELINE: 16, ALL_REDUCE: 16}
_KNOWN = (
    *(*_STOCK, "none_exact", "loco8", "loco4", "loco2", "loco4_two_hop", "loco4_exact"),
    *(ONEBIT, ONEBIT_WARM_UP, ONEBIT_TWO_HOP, "ddp_bf16", "ddp_powersgd_rank4"),
    *("ddp_loco4", "fsdp2_bf16", "fsdp2_loco4", "hsdp_bf16", "hsdp_loco4"),
    *("mfsdp_bf16", "mfsdp_loco4", "mfsdp_loco4_exact"),
)
_MEGATRON_FSDP = re.compile(r"mfsdp_(bf16|loco([8421]))(_exact)?")
_WRAPPERS = ("ddp", "fsdp2", "hsdp", "mfsdp")
_TORCH_LOCO = re.compile(r"(ddp|fsdp2|hsdp)_loco([8421])")
_OUTER = re.compile(r"outer([1-9]\d*)(?:d([1-9]\d*))?_(.+)")
_POWERSGD = re.compile(r"ddp_powersgd_rank([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class Method:
    """One compared method.

    `name` is the user's text; `method`, `bits` and `topology` are written to the rows. `topology` is
    "two_hop" if hosts sum first, else "flat", which is one exchange over all ranks. PowerSGD has no `bits`,
    and the warm-up of 1-bit Adam has 16.
    """

    name: str
    method: str
    bits: int | None
    topology: str = "flat"
    powersgd_rank: int | None = None
    exact: bool = False
    """Whether weights are gathered exactly, from their changes."""
    turns: int = 0
    """Whether steps with and without compression are compared: the steps of `compression.trial`, or 1."""
    outer: int = 1
    """The steps after which hosts exchange weights; 1: gradients are summed over hosts in every step."""
    outer_delay: int = 0
    """The steps with which the exchange between hosts overlaps."""

    @property
    def kind(self) -> str:
        """One of stock, attached, ddp, fsdp2, hsdp and mfsdp."""
        if self.method in _STOCK:
            return "stock"
        first = self.method.partition("_")[0]
        return first if first in _WRAPPERS else "attached"

    @property
    def fp32_accumulation(self) -> bool:
        """Whether gradients are exchanged by Megatron's all-to-all with a sum in fp32."""
        # Megatron has it for one instance only.
        return (self.method in (BASELINE, "none") or self.turns > 0) and self.outer == 1

    @property
    def replicated(self) -> bool:
        """Whether hosts hold all of the optimizer's state, so that they all-reduce and gather no weights."""
        return self.kind in ("ddp", "hsdp") or self.method in (ALL_REDUCE, ONEBIT)

    @property
    def guessed_bits(self) -> float:
        """About how many bits a parameter costs on a host's link, to estimate a cell's time."""
        gradient = 1.0 if self.bits is None else self.bits * (1 if self.bits >= 16 else 1.04)
        if self.replicated or self.method.endswith("reduce_scatter"):
            gradient *= 2
        if self.outer > 1:
            return (64 if self.bits == 16 else 2 * gradient) / self.outer
        weights = EXACT_BITS if self.exact else 16
        return gradient + (0 if self.replicated else weights)

    def settle(self, steps: int) -> int:
        """Return the number of unmeasured steps: `steps`, or few if no changes of weights are gathered."""
        return FIRST_STEPS if self.kind in _WRAPPERS and not self.exact else steps

    def compression(self, ranks_per_host: int, settle: int = FIRST_STEPS) -> CompressionConfig | None:
        """Return the options to attach with; None if nothing is attached.

        Args:
            ranks_per_host: the ranks of a host, for two hops.
            settle: the unmeasured steps, in which 1-bit Adam's warm-up ends.
        """
        options: dict[str, Any]
        if self.kind in _WRAPPERS:
            low = self.method.partition("_")[2].startswith("loco")
            options = {"method": "loco", "bits": self.bits} if low else {"method": "none"}
            options["weight_gather"] = "exact" if self.exact else "stock"
            return CompressionConfig(start_step=0, **options) if low or self.kind != "ddp" else None
        if self.kind != "attached":
            return None
        if self.turns:
            if self.method == "none":
                return CompressionConfig(method="none", weight_gather="auto")
            return CompressionConfig(
                method=self.method,
                bits=self.bits or 4,
                trial=self.turns,
                start_step=0,
                weight_gather="auto",
            )
        outer: dict[str, Any] = {"outer_interval": self.outer, "outer_delay": self.outer_delay}
        if self.method == "none":
            return CompressionConfig(method="none", weight_gather="exact", **outer)
        options = {"weight_gather": "exact" if self.exact else "stock", **outer}
        if self.method == ONEBIT:
            options["warmup_steps"] = _FOR_EVER if self.name == ONEBIT_WARM_UP else settle - 1
        else:
            options["bits"] = self.bits
        if self.topology == "two_hop":
            options |= {"ranks_per_node": ranks_per_host}
        return CompressionConfig(method=self.method, topology=self.topology, start_step=0, **options)


_OWN = {
    **{name: Method(name, name, bits) for name, bits in _STOCK.items()},
    "none_exact": Method("none_exact", "none", 16, exact=True),
    "none_auto": Method("none_auto", "none", 16, exact=True, turns=1),
    "loco4_trial": Method("loco4_trial", "loco", 4, exact=True, turns=96),
    ONEBIT: Method(ONEBIT, ONEBIT, 1),
    ONEBIT_WARM_UP: Method(ONEBIT_WARM_UP, ONEBIT, 16),
    ONEBIT_TWO_HOP: Method(ONEBIT_TWO_HOP, ONEBIT, 1, "two_hop"),
    **{name: Method(name, name, 16) for name in ("ddp_bf16", "fsdp2_bf16", "hsdp_bf16")},
}


def parse(name: str) -> Method:
    """Return the method of a name; the planner parses names with bits in them.

    Raises:
        UserError: there is no method of that name.
    """
    if own := _own(name):
        return own
    if outer := _OUTER.fullmatch(name):
        interval, delay, inner = int(outer[1]), int(outer[2] or 0), parse(outer[3])
        if (
            inner.kind != "attached"
            or inner.method == ONEBIT
            or inner.topology != "flat"
            or not delay < interval > 1
        ):
            raise UserError(
                f"--methods: {name!r} must be outerH_METHOD or outerHdD_METHOD, with H of 2 or more, a delay "
                "D below H, and a METHOD such as none_exact or loco4_exact"
            )
        return replace(inner, name=name, outer=interval, outer_delay=delay)
    low = low_bit(name)
    if low and low.hops != "flat":
        topology = "two_hop" if low.hops == "two_hop" else "flat"
        return Method(name, low.method, low.bits, topology, exact=low.exact)
    stock = _own(name.removesuffix(EXACT))
    if stock and stock.replicated:
        why = "every rank updates all weights, so there is no weight gather; leave out _exact"
        raise UserError(f"--methods: {name!r} is not possible: {why}")
    if stock and stock.kind == "stock":
        why = "Megatron's own exchange with the exact weight gather is none_exact"
        raise UserError(f"--methods: {name!r} is not possible: {why}")
    raise UserError(f"--methods: {name!r} must be one of {', '.join(_KNOWN)}{nearest(name, _KNOWN)}")


def _own(name: str) -> Method | None:
    """Return a method that only the benchmark has, and not the planner; None for other names."""
    if parts := _TORCH_LOCO.fullmatch(name):
        return Method(name, name, int(parts[2]))
    if parts := _MEGATRON_FSDP.fullmatch(name):
        return Method(name, name.removesuffix(EXACT), int(parts[2] or 16), exact=bool(parts[3]))
    if parts := _POWERSGD.fullmatch(name):
        return Method(name, name, None, powersgd_rank=int(parts[1]))
    return _OWN.get(name)
