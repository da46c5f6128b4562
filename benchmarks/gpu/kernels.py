"""The kernels of this benchmark: one that takes time, and one with an error."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def twin_wire_kernel(nanoseconds, sink):
    """Be busy for that long, by the GPU's clock."""
    begin = globaltimer()
    now = begin
    rounds = 0
    # A look at the clock takes 20 ns or more: the second limit ends it if the clock stands still.
    while (now - begin < nanoseconds) & (rounds < 200_000_000):
        now = globaltimer()
        rounds += 1
    tl.store(sink, now - begin)


@triton.jit
def planted_kernel(pointer):
    """Write 64 MiB behind `pointer`, to int32: compute-sanitizer must find it."""
    tl.store(pointer + 16_777_216, 1)
