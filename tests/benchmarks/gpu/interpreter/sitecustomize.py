"""Corrects Triton 3.6's interpreter under NumPy 2, in every process with this folder on its path.

Its `~` of an unsigned number raises OverflowError, its fma rounds twice, and a tensor is no index. A GPU
needs none of it, and neither do other releases.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def rounded_once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c as an fma has it; fp32 or fp64 [n]."""
    if a.dtype == np.float32:
        return (a.astype(np.longdouble) * b + c).astype(np.float32)
    # The product without an error, then the sum with its own (Dekker, Knuth).
    product = a * b
    high_a, high_b = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    low_a, low_b = a - high_a, b - high_b
    rest = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    total = product + c
    part = total - product
    rest = rest + ((product - (total - part)) + (c - part))
    return np.where(np.isfinite(rest), total + rest, total)


def install() -> None:
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor

    def get_all_ones_value(self: Any, type: Any) -> Any:
        kind = interpreter._get_np_dtype(type)
        ones = np.full(1, True, np.bool_) if kind == np.bool_ else np.invert(np.zeros(1, kind))
        return interpreter.TensorHandle(ones, type.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            found = rounded_once(*np.broadcast_arrays(x.data, y.data, z.data))
        return interpreter.TensorHandle(found, z.dtype.scalar)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    builder.get_all_ones_value, builder.create_fma = get_all_ones_value, create_fma
    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    install()
