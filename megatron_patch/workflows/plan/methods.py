"""The methods that can be planned, by name: Megatron's own exchange, and this package's methods."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.plan.cluster import Group
from megatron_patch.workflows.plan.job import Job

STOCK, BF16, REPLICATED = "stock", "stock_bf16", "stock_allreduce"
ONEBIT = "onebit_adam"
_LOW = re.compile(r"(loco|naive|error_feedback)([8421])(_flat|_two_hop)?(_exact)?")


@dataclass(frozen=True)
class Method:
    """One way to exchange gradients and to gather weights.

    `bits` is None if Megatron's own exchange is used; `momentum` marks 1-bit Adam after its warm-up. `hops`
    is auto, flat or two_hop. `gradient_bytes` and `distributed`, if given, replace the recipe's own.
    """

    name: str
    method: str = "none"
    """The method's name in CompressionConfig."""
    bits: int | None = None
    momentum: bool = False
    hops: str = "auto"
    exact: bool = False
    keeps_errors: bool = False
    gradient_bytes: int | None = None
    distributed: bool | None = None
    options: str = ""
    """The overrides of a recipe that switch the method on."""
    free: bool = False
    """Whether nothing is sent or coded, to simulate a step without communication."""

    def shards_optimizer(self, job: Job) -> bool:
        """Whether a job's optimizer is Megatron's distributed one."""
        return job.distributed if self.distributed is None else self.distributed

    def bytes_of_gradient(self, job: Job) -> int:
        """Return the bytes of a gradient element in Megatron's, or torch's, own exchange."""
        return self.gradient_bytes or job.gradient_bytes

    def two_hops(self, group: Group) -> bool:
        """Whether a group's gradients are summed inside its nodes first."""
        return group.nodes > 1 and group.local > 1 and self.hops != "flat"


FREE = Method("no communication", free=True)
# The method that changes least comes first: the exact gather changes no bit of the training.
DEFAULT = (STOCK, "none_exact", BF16, "loco4", "loco4_exact", "loco4_flat_exact", "loco2_exact", ONEBIT)
_KNOWN = (*DEFAULT, REPLICATED, "loco8_exact", "loco4_two_hop_exact")
_NONE = "compression.method=none compression.weight_gather="
_NAMED = {
    method.name: method
    for method in (
        Method(STOCK, options=f"{_NONE}stock"),
        Method(BF16, gradient_bytes=2, options=f"{_NONE}stock megatron.grad_reduce_in_bf16=true"),
        Method(
            REPLICATED, distributed=False, options=f"{_NONE}stock megatron.use_distributed_optimizer=false"
        ),
        Method("none_exact", exact=True, options=f"{_NONE}exact"),
        Method(
            ONEBIT, ONEBIT, bits=1, momentum=True, exact=True, keeps_errors=True,
            options="--with configs/methods/onebit_adam.yaml",
        ),
    )
}  # fmt: skip


def parse(name: str) -> Method:
    method = _NAMED.get(name) or low_bit(name)
    if method is None:
        raise UserError(f"--methods: {name!r} must be one of {', '.join(_KNOWN)}{nearest(name, _KNOWN)}")
    return method


def low_bit(name: str) -> Method | None:
    """Return the method of a name that contains its bits, as loco4_two_hop_exact; None for other names."""
    parts = _LOW.fullmatch(name)
    if parts is None:
        return None
    config = CompressionConfig(method=parts[1], bits=int(parts[2]))
    options = f"compression.method={parts[1]} compression.bits={parts[2]}"
    options += f" compression.topology={parts[3][1:]}" if parts[3] else ""
    options += f" compression.weight_gather={'exact' if parts[4] else 'stock'}"
    return Method(
        name,
        config.method,
        bits=config.bits,
        hops=parts[3][1:] if parts[3] else "auto",
        exact=bool(parts[4]),
        keeps_errors=config.keeps_errors,
        options=options,
    )


def chosen(names: str | None, one_precision: bool, several_hops: bool, gathers: bool) -> list[Method]:
    """Return the methods to plan; by default those that differ for the job.

    Args:
        names: names separated by commas; None chooses the default.
        one_precision: whether no flag of Megatron can send gradients in fewer bits.
        several_hops: whether two hops are possible.
        gathers: whether 16-bit weights are gathered.
    """
    if names is not None:
        methods = [parse(name.strip()) for name in names.split(",") if name.strip()]
        if not methods or len({method.name for method in methods}) != len(methods):
            raise UserError(f"--methods: {names!r} must be different names, separated by commas")
        if methods[0].name != STOCK:
            methods = [parse(STOCK), *(method for method in methods if method.name != STOCK)]
    else:
        left_out = {BF16} if one_precision else set()
        left_out |= set() if several_hops else {"loco4_flat_exact"}
        left_out |= set() if gathers else {"none_exact", "loco4_exact", "loco4_flat_exact", "loco2_exact"}
        usual = [name for name in DEFAULT if name not in left_out]
        if not gathers:
            usual.insert(usual.index("loco4") + 1, "loco2")
        methods = [parse(name) for name in usual]
    return methods if gathers else [dataclasses.replace(method, exact=False) for method in methods]
