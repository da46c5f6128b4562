"""CompressionConfig says what is compressed, and how. Options' names and defaults are defined only here.

The same fields are the keys of a configuration's `compression:` section and the command-line flags
`--compression-FIELD` (megatron/arguments.py makes them from this class).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from megatron_patch import registry
from megatron_patch.errors import UserError, nearest

METHODS = ("none", "naive", "error_feedback", "loco", "onebit_adam")
ROTATIONS = ("none", "hadamard")
ERROR_DTYPES = ("int8", "bf16", "fp32")
WEIGHT_GATHERS = ("stock", "exact", "auto")
SHARD = "shard"
AUTO = "auto"
MOST_IN_BLOCK = 65536
"""The largest `block_size`: one scale for more elements loses too much, and short blocks are padded to b."""
MOST = 1 << 62
"""The largest whole number that an option may be: steps and ranks are added to seeds in 64 bits."""
_BLOCK_SIZES = [1 << power for power in range(4, MOST_IN_BLOCK.bit_length())]
MUONS = ("muon", "dist_muon")
"""Megatron's names of Muon (--optimizer); dist_muon is muon with --use-distributed-optimizer."""
WARMUPS = ("auto", "fixed")
ONEBIT_ADAMS = {"warmup": None, "warmup_steps": None, "error_compensation": True}
"""Options of the method onebit_adam alone, with their values where they are not given."""
LEAST_TRIAL = 48
"""The fewest steps of a trial: three rounds of turns of four choices."""
DEFAULT_ERROR_BETA = 0.8
DEFAULT_BITS = 4
DEFAULT_RESET_INTERVAL = 512


def _option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Options of low-bit gradient communication, validated on construction.

    Raises:
        UserError: a value is not allowed; the message names the field, the value and what is allowed.
    """

    method: str = _option(
        None,
        "none: Megatron's own exchange; naive: quantize without error feedback; error_feedback: add the "
        "whole last error; loco: add a moving average of past errors; onebit_adam: after a warm-up, exchange "
        "Adam's momentum in 1 bit (default: error_feedback with Megatron's Muon and no error_beta, else "
        "loco)",
        METHODS,
    )
    bits: int = _option(
        None,
        f"bits per gradient element on the wire: 8, 4, 2, 1 (default {DEFAULT_BITS}; onebit_adam: 1; with "
        "a codec that has no such code, that codec's first)",
    )
    codec: str | None = _option(
        None,
        "levels: 16 or 4 unevenly spaced levels and a scale from the block's energy; uniform: multiples "
        "of a scale from the block's largest number; sign: 1 bit (default: levels for 4 and 2 bits; uniform "
        "for 8 bits and for block_size shard; sign for 1 bit); or one that your "
        "script registered",
    )
    rotation: str | None = _option(
        None,
        "hadamard: blocks are rotated before they are coded, so that all look Gaussian, and the sum is "
        "rotated back (default: hadamard with codec levels, else none)",
        ROTATIONS,
    )
    block_size: int | str = _option(
        128,
        f"elements that share one bf16 scale: a power of two from 16 to {MOST_IN_BLOCK}, or 'shard' (one "
        "scale for each shard)",
    )
    error_beta: float | None = _option(
        None,
        "weight of the OLD error in the moving average, 0 <= beta < 1; 0 is error_feedback "
        f"(default: {DEFAULT_ERROR_BETA} with loco, else 0)",
    )
    error_dtype: str = _option(
        "int8", "how the error is stored between steps; int8 has a scale per block", ERROR_DTYPES
    )
    reset_interval: int = _option(
        None,
        "optimizer steps after which the error is set to zero, 0: never "
        f"(default {DEFAULT_RESET_INTERVAL}; onebit_adam: 0)",
    )
    start_step: int | str = _option(
        None,
        "optimizer steps with Megatron's own exchange before compression starts, counted from the job's "
        "first step; auto: until the learning rate has stopped rising; 0: at once (default: auto; "
        "onebit_adam has warmup)",
    )
    warmup: str | None = _option(
        None,
        "onebit_adam: when Adam's variance is frozen and compression starts; auto: when it has settled, "
        "fixed: after warmup_steps (default: fixed where warmup_steps is given, else auto)",
        WARMUPS,
    )
    warmup_steps: int | None = _option(
        None, "onebit_adam: optimizer steps of plain Adam first; given alone it means warmup fixed"
    )
    error_compensation: bool = _option(
        True, "onebit_adam: error feedback; switch it off only to see what it is worth"
    )
    seed: int = _option(1234, "seed of onebit_adam's norm estimate")
    topology: str = _option(
        "auto",
        "flat: every rank sends to every owner; two_hop: sum inside a node first, then send between nodes; "
        "auto: two_hop where several of a group's ranks share a node and it spans several nodes; or one that "
        "your script registered",
    )
    ranks_per_node: int | None = _option(
        None,
        "ranks of the job on one node, numbered one after the other (default: LOCAL_WORLD_SIZE, or what srun "
        "or mpirun says)",
    )
    weight_gather: str = _option(
        AUTO,
        "how updated weights reach the other ranks, with any method; stock: Megatron's own all-gather, in "
        "full; exact: what the step changed, in an exact code; auto: the faster of both, by turns in the "
        "first steps; the training is the same bit for bit (bf16 and fp16 weights)",
        WEIGHT_GATHERS,
    )
    trial: int = _option(
        0,
        "steps in which the job tries Megatron's own exchange, the exact weight gather, low bits and both, "
        f"in short turns, and says what each gains; {LEAST_TRIAL} or more; 0: none",
    )
    trial_only: bool = _option(False, "end the job after the trial, without a checkpoint")
    outer_interval: int = _option(
        1,
        "experimental, with several optimizer instances (num_distributed_optimizer_instances): each trains "
        "by itself for this many optimizer steps, then all average how far their weights have moved "
        "(DiLoCo); 1: gradients are summed over all instances in every step",
    )
    outer_rate: float = _option(
        1.0, "outer_interval: the learning rate of that average, more than 0; 1 takes the average itself"
    )
    outer_momentum: float = _option(0.0, "outer_interval: its Nesterov momentum, 0 <= momentum < 1")
    outer_delay: int = _option(
        0,
        "outer_interval: the number D of steps with which an exchange overlaps; buckets are exchanged in "
        "outer_interval // D turns; 0: all at once, and training waits",
    )
    save_error: bool = _option(
        True, "save the errors with every checkpoint (int8: 1.02 bytes an element of every sender)"
    )
    strict_load: bool = _option(
        False, "refuse a checkpoint whose error state is damaged, instead of starting from zero"
    )

    _resolved: InitVar[Mapping[str, Any] | None] = None
    """The values chosen for options that were left out; dataclasses.replace passes them on to choose anew."""

    @classmethod
    def for_megatron(cls, flags: Mapping[str, Any], **options: Any) -> CompressionConfig:
        """Make the options of a job from `options` and its Megatron flags, whose names have underscores."""
        return cls(**options).for_optimizer(flags.get("optimizer"))

    def for_optimizer(self, name: object) -> CompressionConfig:
        """Return the options with the default method of Megatron's optimizer `name`: error_feedback for Muon.

        A `method` or an `error_beta` that the user gave is kept.
        """
        if name not in MUONS or not {"method", "error_beta"} <= vars(self)["_resolved"].keys():
            return self
        return replace(self, method="error_feedback", error_beta=None)

    def for_flat_fsdp(self) -> CompressionConfig:
        """Return the options with naive as the default method, for FSDP without replicas.

        There every rank would keep errors of the whole model. A `method` or an `error_beta` that the user
        gave is kept.
        """
        if not {"method", "error_beta"} <= vars(self)["_resolved"].keys():
            return self
        return replace(self, method="naive", error_beta=None)

    def without_turns(self) -> CompressionConfig:
        """Return the options with Megatron's own weight gather for `auto`, where no turns can be taken.

        Raises:
            UserError: the options ask for a trial, which is nothing but turns.
        """
        if self.trial:
            self._reject("trial", "0 with FSDP, with qk_clip and outside Megatron's DDP, which take no turns")
        return replace(self, weight_gather="stock") if self.weight_gather == AUTO else self

    def __post_init__(self, _resolved: Mapping[str, Any] | None) -> None:
        for name, value in (_resolved or {}).items():
            if getattr(self, name) == value:
                object.__setattr__(self, name, None)
        unstated = [option.name for option in dataclasses.fields(self) if getattr(self, option.name) is None]
        self._set_default("bits", 1 if self.is_onebit_adam else self._default_bits())
        widths = {width for entry in registry.codecs().values() for width in entry.bits}
        self._check_choice("bits", tuple(sorted(widths, reverse=True)))
        self._set_default("method", "loco")
        self._check_choice("method", METHODS)
        self._set_default("start_step", AUTO if self.compresses and not self.is_onebit_adam else 0)
        self._set_default("reset_interval", 0 if self.is_onebit_adam else DEFAULT_RESET_INTERVAL)
        self._check_choice("error_dtype", ERROR_DTYPES)
        self._check_choice("topology", registry.topologies())
        self._check_choice("weight_gather", WEIGHT_GATHERS)
        per_node = self.ranks_per_node
        if per_node is not None and (not _is_int(per_node) or per_node < 1):
            self._reject("ranks_per_node", "a whole number, 1 or more")
        for name in ("save_error", "strict_load", "error_compensation", "trial_only"):
            if not isinstance(getattr(self, name), bool):
                self._reject(name, "true or false")
        if not _is_int(self.trial) or not (self.trial == 0 or LEAST_TRIAL <= self.trial <= MOST):
            self._reject("trial", f"0, or a whole number of steps, {LEAST_TRIAL} or more")
        if self.trial and (self.is_onebit_adam or self.outer_interval != 1):
            self._reject("trial", "0 with method onebit_adam and with outer steps, which take no turns")
        if self.trial_only and not self.trial:
            self._reject("trial_only", "false without a trial: compression.trial says how many steps it has")
        size = self.block_size
        if size != SHARD and not (_is_int(size) and size in _BLOCK_SIZES):
            self._reject("block_size", f"a power of two from 16 to {MOST_IN_BLOCK}, or 'shard'")
        if not _is_int(self.outer_interval) or not 1 <= self.outer_interval <= MOST:
            self._reject("outer_interval", "a whole number, 1 or more")
        if not _is_number(self.outer_rate) or self.outer_rate <= 0:
            self._reject("outer_rate", "a number, more than 0")
        if not _is_number(self.outer_momentum) or not 0 <= self.outer_momentum < 1:
            self._reject("outer_momentum", "a number from 0 up to but not including 1")
        if not _is_int(self.outer_delay) or not 0 <= self.outer_delay < self.outer_interval:
            self._reject("outer_delay", "a whole number, from 0 up to but not including outer_interval")
        for name, also in (("reset_interval", ""), ("start_step", ", or auto"), ("seed", "")):
            value = getattr(self, name)
            if not (_is_int(value) and 0 <= value <= MOST) and not (also and value == AUTO):
                large = _is_int(value) and value > MOST
                self._reject(name, "2^62 at most" if large else f"a whole number, 0 or more{also}")
        self._check_codec()
        self._check_momentum()
        self._resolve_beta()
        vars(self)["_resolved"] = {name: getattr(self, name) for name in unstated}

    def _set_default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _default_bits(self) -> int:
        entry = registry.codecs().get(self.codec) if isinstance(self.codec, str) else None
        return DEFAULT_BITS if entry is None or DEFAULT_BITS in entry.bits else entry.bits[0]

    def _check_codec(self) -> None:
        codecs = registry.codecs()
        shard = self.block_size == SHARD
        levels = self.bits in codecs["levels"].bits and not shard
        self._set_default("codec", "sign" if self.bits == 1 else "levels" if levels else "uniform")
        self._check_choice("codec", tuple(codecs))
        entry = codecs[self.code]
        having = entry.bits
        if self.bits not in having:
            fitting = " or ".join(name for name, codec in codecs.items() if self.bits in codec.bits)
            which = f"{having[0]}" if len(having) == 1 else ", ".join(map(str, having))
            self._reject("codec", f"{fitting} with bits {self.bits} ({self.code} has {which})")
        self._set_default("rotation", "hadamard" if entry.rotated and not shard else "none")
        self._check_choice("rotation", ROTATIONS)
        if self.rotates and shard:
            self._reject("rotation", "none with block_size shard: a rotation would mix parameters")

    def _check_momentum(self) -> None:
        """Check the options of onebit_adam, which other methods do not have."""
        if not self.is_onebit_adam:
            for name, unset in ONEBIT_ADAMS.items():
                if getattr(self, name) != unset:
                    self._reject(name, f"left out with method {self.method}: it is an option of onebit_adam")
            return
        steps = self.warmup_steps
        if self.bits != 1:
            self._reject("bits", "1 with method onebit_adam")
        if self.start_step == AUTO:  # The warm-up ends by itself, too.
            object.__setattr__(self, "start_step", 0)
        if self.start_step:
            self._reject("start_step", "0 with method onebit_adam, which has warmup_steps")
        self._set_default("warmup", "auto" if steps is None else "fixed")
        self._check_choice("warmup", WARMUPS)
        if self.warmup == "auto" and steps is not None:
            self._reject("warmup", f"fixed, or left out, with warmup_steps {steps}")
        if self.warmup == "fixed" and (not _is_int(steps) or int(steps or 0) < 1):
            self._reject("warmup_steps", "a whole number, 1 or more, with warmup fixed")

    def _resolve_beta(self) -> None:
        beta = self.error_beta
        if beta is None:
            object.__setattr__(self, "error_beta", DEFAULT_ERROR_BETA if self.method == "loco" else 0.0)
            return
        if not _is_number(beta) or not 0 <= beta < 1:
            self._reject("error_beta", "a number from 0 up to but not including 1")
        if beta != 0 and self.method in ("error_feedback", "onebit_adam"):
            self._reject("error_beta", f"0 with method {self.method} (method loco has a moving average)")
        object.__setattr__(self, "error_beta", float(beta))

    @property
    def beta(self) -> float:
        """The weight of the old error in the moving average (docs/numerics.md, "The error")."""
        assert self.error_beta is not None
        return self.error_beta

    @property
    def code(self) -> str:
        """The name of the codec that is used."""
        assert self.codec is not None
        return self.codec

    @property
    def rotates(self) -> bool:
        """Whether blocks are rotated before they are coded."""
        return self.rotation == "hadamard"

    @property
    def keeps_errors(self) -> bool:
        """Whether the sender keeps an error state between steps."""
        return self.method in ("error_feedback", "loco") or (self.is_onebit_adam and self.error_compensation)

    @property
    def is_onebit_adam(self) -> bool:
        """Whether Adam's momentum is exchanged, by the optimizer, instead of gradients."""
        return self.method == "onebit_adam"

    @property
    def compresses(self) -> bool:
        """Whether gradients, or 1-bit Adam's momentum, are exchanged in low bits."""
        return self.method != "none"

    @property
    def outer_steps(self) -> bool:
        """Whether optimizer instances exchange what they have learned, every `outer_interval` steps."""
        return self.outer_interval > 1

    @property
    def codes_weights(self) -> bool:
        """Whether the exact weight gather replaces Megatron's all-gather of updated weights at once."""
        return self.weight_gather == "exact"

    @property
    def takes_turns(self) -> bool:
        """Whether the job compares steps with and without the exact weight gather (session/trial.py)."""
        return (self.weight_gather == AUTO or self.trial > 0) and not self.outer_steps

    def _check_choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        # 4.0 and True equal whole numbers, so that the types are compared, too.
        if type(value) not in map(type, allowed) or value not in allowed:
            own = ", or your own (--import FILE.py)" if name in ("codec", "topology") else ""
            self._reject(name, "one of " + ", ".join(map(str, allowed)) + own + nearest(value, allowed))

    def _reject(self, name: str, allowed: str) -> None:
        raise UserError(f"compression.{name}: {getattr(self, name)!r} is not allowed; it must be {allowed}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for YAML and command-line flags."""
        return dataclasses.asdict(self)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
