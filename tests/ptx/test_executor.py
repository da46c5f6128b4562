"""The executor of PTX itself: its arithmetic, and what it must find."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from ptx.executor import THREADS, Program, _fma32
from ptx.memory import Fault, Global

_HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
{
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r9, %ctaid.x;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b32 	%r2, [kernel_param_1];
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
	shl.b32 	%r3, %r1, 2;
"""


def run(body: str, value: int = 0, grid: tuple[int, ...] = (1,), written: bool = True) -> np.ndarray:
    """The numbers, uint32 [128], that a kernel leaves."""
    numbers, memory = np.zeros(THREADS, np.uint32), Global()
    start = memory.put("numbers", numbers.view(np.uint8), written)
    lines = "".join(
        f"\t{line.strip()};\n" if not line.endswith(":") else line + "\n" for line in body.split("; ")
    )
    Program(_HEAD + lines + "\tret;\n}\n").launch(grid, [start, value], 1024, memory)
    return numbers


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shfl.sync.bfly.b32 %r4, %r1, 4, 31, -1", lambda t: t ^ 4),
        ("shfl.sync.up.b32 %r4, %r1, 1, 0, -1", lambda t: np.where(t % 32 < 1, t, t - 1)),
        ("shfl.sync.idx.b32 %r4, %r1, 3, 31, -1", lambda t: t // 32 * 32 + 3),
        ("redux.sync.max.s32 %r4, %r1, -1", lambda t: t // 32 * 32 + 31),
        ("prmt.b32 %r4, %r1, 0x80, 0x7740U", lambda t: (t & 255) | 0x80 << 8),
        ("bfe.u32 %r4, %r1, 2, 3", lambda t: t >> 2 & 7),
        ("popc.b32 %r4, %r1", lambda t: sum(t >> place & 1 for place in range(32))),
        (
            "cvt.rn.f32.u32 %r5, %r1; mul.rn.f32 %r5, %r5, 0fBFC00000; cvt.rzi.s32.f32 %r4, %r5",
            lambda t: -(3 * t // 2) & 0xFFFFFFFF,
        ),
        (
            "cvt.rn.f32.u32 %r5, %r1; mul.rn.f32 %r5, %r5, 0f7F000000; cvt.rzi.s32.f32 %r4, %r5",
            lambda t: np.where(t > 0, 2**31 - 1, 0),
        ),
        ("mov.b32 %r5, 0x7FC00000; cvt.rzi.s32.f32 %r4, %r5", lambda t: 0 * t),
        ("max.u32 %r4, %r1, 60, 90", lambda t: np.maximum(t, 90)),
        ("add.s16x2 %r4, %r1, 0x1FFFF", lambda t: 1 << 16 | (t - 1) & 0xFFFF),
        (
            "cvt.rn.f32.u32 %r5, %r1; mov.b64 %rd3, { %r5, %r5 }; "
            "fma.rn.f32x2 %rd3, %rd3, %rd3, %rd3; mov.b64 { _, %r4 }, %rd3",
            lambda t: (t * t + t).astype(np.float32).view(np.uint32),
        ),
    ],
)
def test_instructions_between_and_within_threads(instruction: str, expected: object) -> None:
    found = run(f"{instruction}; st.global.b32 [ %rd2 + 0 ], {{ %r4 }}")
    assert found.tolist() == expected(np.arange(THREADS)).tolist()  # type: ignore[operator]


def test_fused_products_are_rounded_once() -> None:
    draw = np.random.default_rng(1)
    a, b, c = (
        (draw.integers(-(2**23), 2**23, 500) * 2.0 ** draw.integers(-30, 30, 500)).astype(np.float32)
        for _ in range(3)
    )
    c[::2] = -(a[::2].astype(np.float64) * b[::2]).astype(np.float32)
    for x, y, z, found in zip(a, b, c, _fma32(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))
        distances = [abs(Fraction(float(one)) - exact) for one in (below, found, above)]
        assert distances[1] == min(distances)


_TO_SHARED = "st.shared.b32 [%r3], %r1; "
_NEIGHBOUR = "xor.b32 %r5, %r3, 128; ld.shared.b32 %r4, [%r5]; st.global.b32 [ %rd2 + 0 ], { %r4 }"
_LANE = "xor.b32 %r5, %r3, 64; ld.shared.b32 %r4, [%r5]; st.global.b32 [ %rd2 + 0 ], { %r4 }"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("ld.global.b32 { %r4 }, [ %rd2 + 4 ]", "byte 512 and 3 more of numbers, which has 512"),
        ("ld.global.b32 { %r4 }, [ %rd2 + -4 ]", "no buffer"),
        ("ld.global.b32 { %r4 }, [ %rd2 + 2 ]", "no multiple of 4|which has 512"),
        ("ld.global.v2.b32 { %r4, %r5 }, [ %rd2 + 0 ]", "no multiple of 8|which has 512"),
        ("ld.shared.b32 %r4, [%r3]", "nothing was written"),
        (_TO_SHARED + _NEIGHBOUR, "no barrier"),
        (_TO_SHARED + "bar.warp.sync -1; " + _NEIGHBOUR, "no barrier"),
        (_TO_SHARED + "bar.sync 0; " + _NEIGHBOUR + "; " + _TO_SHARED[:-2], "overwritten"),
        ("setp.lt.u32 %p1, %r1, 3; @%p1 bra $L1; bar.sync 0; $L1:", "not all threads"),
        ("st.global.b32 [ %rd1 + 0 ], { %r1 }", "unlike values"),
        ("cp.async.ca.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x4, 4; ld.shared.b32 %r4, [%r3]", "cp.async"),
        ("cp.async.ca.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x4, 4; cp.async.commit_group", "ends"),
        ("frobnicate.b32 %r4, %r1", "not known"),
        ("mul.f32 %r4, %r1, %r1", "may be fused"),
    ],
)
def test_what_a_program_must_not_do_is_found(body: str, found: str) -> None:
    with pytest.raises(Fault, match=found):
        run(body)


def test_what_it_may_do_is_not() -> None:
    assert run(_TO_SHARED + "bar.sync 0; " + _NEIGHBOUR).tolist() == [t ^ 32 for t in range(THREADS)]
    assert run(_TO_SHARED + "bar.warp.sync -1; " + _LANE).tolist() == [t ^ 16 for t in range(THREADS)]
    copied = (
        "st.global.b32 [ %rd2 + 0 ], { %r1 }; cp.async.ca.shared.global [ %r3 + 0 ], [ %rd2 + 0 ], 0x4, 4; "
        "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; "
    )
    assert run(copied + _LANE).tolist() == [t ^ 16 for t in range(THREADS)]


def test_programs_of_a_launch_do_not_share_bytes() -> None:
    with pytest.raises(Fault, match="two programs write"):
        run("st.global.b32 [ %rd2 + 0 ], { %r1 }", grid=(2,))
    with pytest.raises(Fault, match="another program"):
        run(
            "setp.eq.u32 %p1, %r9, 0; @%p1 st.global.b32 [ %rd2 + 0 ], { %r1 }; "
            "ld.global.b32 { %r4 }, [ %rd2 + 0 ]",
            grid=(2,),
        )
    with pytest.raises(Fault, match="nothing was written"):
        run("ld.global.b32 { %r4 }, [ %rd2 + 0 ]", written=False)
