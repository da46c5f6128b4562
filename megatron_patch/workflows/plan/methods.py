"""The methods that can be planned, by name: Megatron's own exchange, and this package's methods."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from megatron_patch.config import CompressionConfig
from megatron_patch.errors import UserError, nearest
from megatron_patch.workflows.plan.job import Group, Job

STOCK, BF16, REPLICATED = "stock", "stock_bf16", "stock_allreduce"
ONEBIT = "onebit_adam"
_OUTER = re.compile(r"outer([1-9]\d*)(?:d([1-9]\d*))?_(.+)")
_LOW = re.compile(r"(loco|naive|error_feedback)([84321])(_flat|_two_hop)?(_intra8)?(_exact)?")


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
    intra_bits: int | None = None
    exact: bool = False
    keeps_errors: bool = False
    gradient_bytes: int | None = None
    distributed: bool | None = None
    options: str = ""
    """The overrides of a recipe that switch the method on."""
    outer_interval: int = 1
    """Steps between two outer steps of the nodes, which are optimizer instances; 1: they train together."""
    outer_delay: int = 0
    """The optimizer steps with which the exchange of an outer step overlaps."""
    free: bool = False
    """Whether nothing is sent or coded, to simulate a step without communication."""

    @property
    def stock(self) -> bool:
        """Whether Megatron's own code does everything."""
        return self.bits is None and not self.exact

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
_KNOWN = (*DEFAULT, REPLICATED, "loco8_exact", "loco3_exact", "loco4_two_hop_intra8_exact")


def parse(name: str) -> Method:
    if outer := outer_parts(name):
        interval, delay, inside = outer
        return _with_outer_steps(name, interval, delay, parse(inside))
    none = "compression.method=none compression.weight_gather="
    fixed = {
        STOCK: Method(STOCK, options=f"{none}stock"),
        BF16: Method(BF16, gradient_bytes=2, options=f"{none}stock megatron.grad_reduce_in_bf16=true"),
        REPLICATED: Method(
            REPLICATED, distributed=False, options=f"{none}stock megatron.use_distributed_optimizer=false"
        ),
        "none_exact": Method("none_exact", exact=True, options=f"{none}exact"),
        ONEBIT: Method(
            ONEBIT, ONEBIT, bits=1, momentum=True, exact=True, keeps_errors=True,
            options="--with configs/methods/onebit_adam.yaml",
        ),
    }  # fmt: skip
    if name in fixed:
        return fixed[name]
    if (found := low_bit(name)) is None:
        raise UserError(f"--methods: {name!r} must be one of {', '.join(_KNOWN)}{nearest(name, _KNOWN)}")
    return found


def outer_parts(name: str) -> tuple[int, int, str] | None:
    """Return H, D (0 if not given) and METHOD of outerH_METHOD or outerHdD_METHOD; None for other names."""
    found = _OUTER.fullmatch(name)
    return (int(found[1]), int(found[2] or 0), found[3]) if found else None


def _with_outer_steps(name: str, interval: int, delay: int, inside: Method) -> Method:
    refused = inside.outer_interval > 1 or inside.momentum or inside.distributed is not None
    if refused or interval == 1 or delay >= interval:
        raise UserError(
            f"--methods: {name!r} must be outerH_METHOD or outerHdD_METHOD, with H of 2 or more, a delay D "
            "below H, and a METHOD of Megatron's distributed optimizer other than 1-bit Adam, e.g. "
            "outer30_error_feedback4_exact"
        )
    options = f"{inside.options} compression.outer_interval={interval}"
    options += f" compression.outer_delay={delay}" if delay else ""
    return dataclasses.replace(inside, name=name, outer_interval=interval, outer_delay=delay, options=options)


def low_bit(name: str) -> Method | None:
    """Return the method of a name that contains its bits, as loco4_two_hop_exact; None for other names."""
    found = _LOW.fullmatch(name)
    if found is None or (found[4] and found[3] == "_flat"):
        return None
    config = CompressionConfig(method=found[1], bits=int(found[2]))
    exact = bool(found[5])
    options = f"compression.method={found[1]} compression.bits={found[2]}"
    options += f" compression.topology={found[3][1:]}" if found[3] else ""
    options += " compression.intra_bits=8" if found[4] else ""
    options += f" compression.weight_gather={'exact' if exact else 'stock'}"
    return Method(
        name,
        config.method,
        bits=config.bits,
        hops=found[3][1:] if found[3] else "auto",
        intra_bits=8 if found[4] else None,
        exact=exact,
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
        found = [parse(name.strip()) for name in names.split(",") if name.strip()]
        if not found or len({method.name for method in found}) != len(found):
            raise UserError(f"--methods: {names!r} must be different names, separated by commas")
        if found[0].name != STOCK:
            found = [parse(STOCK), *(method for method in found if method.name != STOCK)]
    else:
        left_out = {BF16} if one_precision else set()
        left_out |= set() if several_hops else {"loco4_flat_exact"}
        left_out |= set() if gathers else {"none_exact", "loco4_exact", "loco4_flat_exact", "loco2_exact"}
        names_ = [name for name in DEFAULT if name not in left_out]
        if not gathers:
            names_.insert(names_.index("loco4") + 1, "loco2")
        found = [parse(name) for name in names_]
    return found if gathers else [dataclasses.replace(method, exact=False) for method in found]


def of_config(config: CompressionConfig) -> Method:
    """Return the method that a run's options choose."""
    exact = config.codes_weights
    if not config.compresses:
        return parse("none_exact" if exact else STOCK)
    if config.is_onebit_adam:
        return dataclasses.replace(parse(ONEBIT), exact=exact, hops=config.topology)
    return Method(
        f"{config.method}{config.bits}",
        config.method,
        bits=config.bits,
        hops=config.topology,
        exact=exact,
        keeps_errors=config.keeps_errors,
    )
