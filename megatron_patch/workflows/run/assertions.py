"""What Megatron's own code raised about a configuration, as one line in our words.

An assertion becomes the line that `_WORDS` has for it, or else says its condition and the values in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from megatron_patch.errors import UserError, failed_assert


def multiple(name: str, of: str) -> Callable[[argparse.Namespace], str]:
    """The words for a flag that must be a multiple of another one."""
    return lambda args: f"{_is(args, name)} must be a multiple of megatron.{of}, {getattr(args, of)}"


def _not_above(name: str, of: str) -> Callable[[argparse.Namespace], str]:
    return lambda args: f"{_is(args, name)} must not be above megatron.{of}, {getattr(args, of)}"


def _is(args: argparse.Namespace, name: str) -> str:
    return f"megatron.{name}: {getattr(args, name, None)}"


def _long_warm_up(args: argparse.Namespace) -> str:
    if args.lr_warmup_fraction is not None:
        return f"{_is(args, 'lr_warmup_fraction')} must be below 1"
    unit = "iters" if args.train_iters else "samples"
    end = f"lr_decay_{unit}"
    if getattr(args, end) in (None, getattr(args, f"train_{unit}")):
        end = f"train_{unit}"
    return f"{_is(args, f'lr_warmup_{unit}')} must be below megatron.{end}, {getattr(args, end)}"


_WORDS: list[tuple[str, Callable[[argparse.Namespace], str]]] = [
    ("lr_warmup_steps < self.lr_decay_steps", _long_warm_up),
    ("init_lr <= self.max_lr", _not_above("lr_warmup_init", "lr")),
    ("max_lr >= self.min_lr", _not_above("min_lr", "lr")),
    ("args.min_lr <= args.lr", _not_above("min_lr", "lr")),
    ("end_wd >= self.start_wd", _not_above("start_weight_decay", "end_weight_decay")),
    ("wsd_decay_steps is not None", lambda args: "megatron.lr_wsd_decay_iters: lr_decay_style WSD needs it"),
    ("hidden_size % args.num_attention_heads == 0", multiple("hidden_size", "num_attention_heads")),
    ("must be greater than or equal to seq_length", _not_above("seq_length", "max_position_embeddings")),
    ("num_attention_heads (", multiple("num_attention_heads", "tensor_model_parallel_size")),
    ("Number of experts should be a multiple", multiple("num_experts", "expert_model_parallel_size")),
    ("lr_decay_steps > 0", lambda args: f"{_is(args, 'lr_decay_samples')} must be 1 or more"),
    (
        "expected iteration-based training",
        lambda args: "megatron.train_iters and megatron.train_samples: only one of them may be given",
    ),
    (
        "expected sample-based learn",
        lambda args: (
            f"{_is(args, 'lr_warmup_iters')} must be left out with train_samples (lr_warmup_samples)"
        ),
    ),
    ("not args.bf16", lambda args: "megatron.fp16 and megatron.bf16: only one of them may be true"),
    ("not args.fp16", lambda args: "megatron.fp16 and megatron.bf16: only one of them may be true"),
]
"""A piece of an assertion, or of its message, and what the user should read instead."""
_STAGES = "Number of layers should be divisible by the pipeline-model-parallel size"


def refusal(error: Exception, args: argparse.Namespace) -> UserError:
    """One line for what Megatron's own code raised about `args`."""
    condition, values = _asserted(error) if isinstance(error, AssertionError) else ("", {})
    message = (str(error).strip().splitlines() or [""])[0]
    for piece, words in _WORDS:
        if piece in (message or condition):
            return UserError(words(args))
    missing = re.fullmatch(r"(\w+) argument is None", message) or re.fullmatch(
        r"args\.(\w+) is not None", condition if not message else ""
    )
    if missing:
        return UserError(f"megatron.{missing[1].removeprefix('encoder_')}: must be given")
    uneven = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    if _STAGES in message and uneven == (None, None):
        return UserError(multiple("num_layers", "pipeline_model_parallel_size")(args))
    if message:
        kind = "" if isinstance(error, AssertionError | ValueError) else f"{type(error).__name__}: "
        return UserError(f"megatron: {kind}{message}")
    if not condition:
        return UserError(f"megatron: {type(error).__name__}")
    stated = ", ".join(f"{name} is {value!r}" for name, value in values.items())
    condition = condition.replace("args.", "").replace("self.", "")
    return UserError(f"megatron: Megatron requires {condition}" + (f", but {stated}" if stated else ""))


def _asserted(error: AssertionError) -> tuple[str, dict[str, Any]]:
    """The condition of a bare assert, on one line, and the values of the fields that it names."""
    condition = failed_assert(error)[1].removeprefix("assert ")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    local = trace.tb_frame.f_locals if trace is not None else {}
    values = {}
    for owner, name in sorted(set(re.findall(r"\b(args|self)\.(\w+)", condition))):
        values[name] = getattr(local.get(owner), name, None)
    return condition, values
