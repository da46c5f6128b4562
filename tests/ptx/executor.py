"""Runs PTX, as Triton compiles it for an H100, on the CPU: 128 threads at a time, in NumPy.

    program = Program(ptx)
    program.launch(grid, arguments, shared_bytes, memory)

Threads that branch apart run one after the other, those that are behind first. Arithmetic is IEEE's, and is
rounded once. A register that was not written holds anything. Where PTX promises less (div.full,
rsqrt.approx), results are a random last bit or two off: the package's results must not depend on it.
An instruction that is not known here is an error.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ptx.memory import Fault, Global, Shared

THREADS = 128
WARP = 32
_TYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("u", "uint"), ("s", "int"), ("b", "uint"))
        for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(bool),
}
_REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
_LINE = re.compile(r"^\s*(?:@(!?)%(p\d+)\s+)?([a-z_][\w.:]*)\s*([^;]*);")
_FMA = ctypes.CDLL("libm.so.6").fma
_FMA.restype, _FMA.argtypes = ctypes.c_double, [ctypes.c_double] * 3


class Program:
    """A kernel's PTX.

    Attributes:
        counts: of all launches, warp instructions, `cycles` of shared memory (32 banks of 4 bytes), shuffles,
            and `sectors`, of 32 bytes of global memory.
    """

    def __init__(self, ptx: str, seed: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.parameters = re.findall(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? (\w+_param_\d+)", ptx)
        self._random = np.random.default_rng(seed)
        self._salt = np.uint32(self._random.integers(1 << 32))
        self._labels: dict[str, int] = {}
        self._lines: list[tuple[str, str, list[str]]] = []
        self._run: list[Callable[[Any], int | None]] = []
        body = ptx[ptx.index("{\n") :].split("\n}")[0]
        for line in body.splitlines():
            line = line.split("//")[0]
            if label := re.match(r"(\$\w+):", line):
                self._labels[label[1]] = len(self._lines)
            elif (found := _LINE.match(line)) and not line.strip().startswith("."):
                guard = found[1] + found[2] if found[2] else ""
                self._lines.append((guard, found[3], _operands(found[4])))
        self.text = [f"{name} {', '.join(operands)}" for _, name, operands in self._lines]

    def launch(
        self, grid: Sequence[int], arguments: Sequence[Any], shared_bytes: int, memory: Global
    ) -> None:
        """Run all programs of a grid (x, y), one after the other; arguments as the kernel's parameters."""
        assert len(arguments) == len(self.parameters)
        memory.launch()
        number = 0
        for y in range(grid[1] if len(grid) > 1 else 1):
            for x in range(grid[0]):
                number += 1
                memory.program = number
                state = _State(self, (x, y), tuple(grid), arguments, Shared(shared_bytes, THREADS), memory)
                state.run()

    @property
    def instructions(self) -> list[tuple[str, str, list[str]]]:
        """(guard, name, operands) of each."""
        return self._lines


def _operands(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


class _State:
    """One program while it runs."""

    def __init__(
        self,
        program: Program,
        place: tuple[int, int],
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        shared: Shared,
        memory: Global,
    ) -> None:
        self.program = program
        self.shared = shared
        self.memory = memory
        self.registers: dict[str, np.ndarray] = {}
        self.known: dict[str, np.ndarray] = {}
        """Which threads' registers were written."""
        self.parameters = {
            name: np.array(value).astype(_TYPES[kind])
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }
        self.special = {
            "%tid.x": np.arange(THREADS, dtype=np.uint32),
            "%ctaid.x": np.uint32(place[0]),
            "%ctaid.y": np.uint32(place[1]),
            "%nctaid.x": np.uint32(grid[0]),
            "%nctaid.y": np.uint32(grid[1] if len(grid) > 1 else 1),
        }
        self.at = np.zeros(THREADS, dtype=np.int64)
        self.mask = np.ones(THREADS, dtype=bool)

    def run(self) -> None:
        lines, end = self.program._lines, len(self.program._lines)
        while True:
            at = int(self.at.min())
            if at >= end:
                break
            self.active = self.at == at
            self.whole = bool(self.active.all())
            guard, name, operands = lines[at]
            self.mask = self.active
            if guard:
                condition = self.value("%" + guard.lstrip("!"), np.dtype(bool))
                self.mask = self.active & (~condition if guard[0] == "!" else condition)
            warps = np.count_nonzero(self.active.reshape(-1, WARP).any(axis=1))
            self.program.counts["instructions"] += int(warps)
            self.at[self.active] = at + 1
            try:
                self.step(name, operands)
            except Fault as fault:
                raise Fault(f"{fault}: {name} {', '.join(operands)}") from None
        self.shared.end()

    # --- operands -----------------------------------------------------------------------------------------

    def value(self, text: str, dtype: np.dtype) -> np.ndarray:
        """An operand as numbers of a type, [threads] or one for all."""
        if text[0] == "%":
            if text in self.special:
                return np.broadcast_to(np.asarray(self.special[text]), THREADS).astype(dtype)
            found = self._register(text)
            if found.dtype == dtype:
                return found
            if found.dtype.itemsize == dtype.itemsize:
                return found.view(dtype)
            return found.astype(np.dtype(f"uint{8 * dtype.itemsize}")).view(dtype)  # the lower bits
        if text.startswith("0f"):
            return np.full(THREADS, int(text[2:], 16), np.uint32).view(dtype)
        if text.startswith("0d"):
            return np.full(THREADS, int(text[2:], 16), np.uint64).view(dtype)
        if text == "global_smem":
            return np.zeros(THREADS, dtype)
        number = int(text.rstrip("U"), 0)
        if dtype.kind in "iu":
            number &= (1 << 8 * dtype.itemsize) - 1
            return np.full(THREADS, number, np.dtype(f"uint{8 * dtype.itemsize}")).view(dtype)
        if dtype.kind == "b":
            return np.full(THREADS, number != 0)
        raise Fault(f"{text} as {dtype}")

    def _register(self, text: str) -> np.ndarray:
        """A register; where it was not written, anything: LLVM leaves bytes that it does not use."""
        known = self.known.get(text)
        if known is None or not known[self.mask].all():
            kind = re.match(r"%([a-z]+)", text)
            assert kind is not None, text
            drawn = self.program._random.bytes(THREADS * 8)
            anything = np.frombuffer(drawn, np.uint64).astype(_REGISTERS[kind[1]])
            if known is None:
                return anything
            return np.where(known, self.registers[text], anything)
        return self.registers[text]

    def put(self, text: str, values: np.ndarray) -> None:
        """Write a register, of the threads that run."""
        if text == "_":
            return
        kind = re.match(r"%([a-z]+)", text)
        assert kind is not None, text
        dtype = np.dtype(_REGISTERS[kind[1]])
        values = np.broadcast_to(values, THREADS)
        if values.dtype.kind == "f":
            values = np.ascontiguousarray(values).view(f"uint{8 * values.dtype.itemsize}")
        if values.dtype != dtype:
            values = values.astype(dtype)  # sign or zero extension, by the type it has
        if self.mask.all():
            self.registers[text], self.known[text] = values, self.mask
            return
        old = self.registers.get(text)
        self.registers[text] = np.where(self.mask, values, 0 if old is None else old).astype(dtype)
        self.known[text] = self.mask | self.known.get(text, np.zeros(THREADS, dtype=bool))

    def address(self, text: str, dtype: np.dtype) -> np.ndarray:
        """[%r1+16], [ %rd1 + 0 ], [global_smem+4]."""
        inside = text.strip("[] ")
        base, _, offset = inside.replace(" ", "").partition("+")
        return self.value(base, dtype) + dtype.type(int(offset or 0) % (1 << 8 * dtype.itemsize))

    # --- instructions -------------------------------------------------------------------------------------

    def step(self, name: str, operands: list[str]) -> None:
        parts = name.split(".")
        handler = getattr(self, f"do_{parts[0]}", None)
        if parts[0] in _OPERATIONS:
            handler = functools.partial(self._pairwise, operation=_OPERATIONS[parts[0]])
        if handler is None:
            raise Fault(f"{name} is not known")
        if parts[0] in _SYNCHRONIZING and not self.whole:
            raise Fault("not all threads come to it")
        if self.mask.any() or parts[0] in ("bra", "ret"):
            with np.errstate(all="ignore"):
                handler(parts, operands)

    def do_bra(self, parts: list[str], operands: list[str]) -> None:
        self.at[self.mask] = self.program._labels[operands[0]]

    def do_ret(self, parts: list[str], operands: list[str]) -> None:
        self.at[self.mask] = len(self.program._lines)

    def do_bar(self, parts: list[str], operands: list[str]) -> None:
        if parts[1:] == ["warp", "sync"] and operands == ["-1"]:
            self.shared.warp_barrier()
        elif parts[1:] == ["sync"]:
            self.shared.barrier()
        else:
            raise Fault("a barrier of a kind that is not known")

    def _pairwise(self, parts: list[str], operands: list[str], operation: Callable[..., Any]) -> None:
        if parts[-1].endswith("x2"):  # two numbers in a register
            each = _TYPES[parts[-1].removesuffix("x2")]
            register = np.dtype(f"uint{16 * each.itemsize}")
            both = [self.value(one, register).copy().view(each) for one in operands[1:]]
            self.put(operands[0], operation(*both).view(register))
            return
        if parts[-2:] == ["f32", "f16"]:  # from sm_100 on: the last operand is fp32, those before it fp16
            f32 = np.dtype(np.float32)
            short = [self.value(one, _TYPES["f16"]).astype(f32) for one in operands[1:-1]]
            self.put(operands[0], operation(*short, self.value(operands[-1], f32)))
            return
        dtype = _TYPES[parts[-1]]
        if "ftz" in parts:
            values = (_flushed(self.value(one, dtype)) for one in operands[1:])
            self.put(operands[0], _flushed(operation(*values)))
            return
        self.put(operands[0], operation(*(self.value(one, dtype) for one in operands[1:])))

    def do_mul(self, parts: list[str], operands: list[str]) -> None:
        if "wide" in parts:
            self.put(operands[0], self._wide(parts, operands[1:3]))
            return
        if parts[-1][0] == "f" and "rn" not in parts:
            raise Fault("a product that may be fused")
        self._pairwise(parts, operands, np.multiply)

    def _wide(self, parts: list[str], operands: list[str]) -> np.ndarray:
        dtype = _TYPES[parts[-1]]
        wide = np.dtype(f"{'uint' if dtype.kind == 'u' else 'int'}{16 * dtype.itemsize}")
        return np.multiply(*(self.value(one, dtype).astype(wide) for one in operands))

    def do_mad(self, parts: list[str], operands: list[str]) -> None:
        if "wide" in parts:
            product = self._wide(parts, operands[1:3])
            self.put(operands[0], product + self.value(operands[3], product.dtype))
        else:
            self._pairwise(parts, operands, lambda a, b, c: a * b + c)

    def do_fma(self, parts: list[str], operands: list[str]) -> None:
        self._pairwise(parts, operands, _fma64 if parts[-1] == "f64" else _fma32)

    def do_div(self, parts: list[str], operands: list[str]) -> None:
        dtype = _TYPES[parts[-1]]
        if dtype.kind in "iu":  # toward zero
            above, below = (self.value(one, dtype) for one in operands[1:])
            whole = np.abs(above) // np.maximum(np.abs(below), 1)
            self.put(operands[0], np.where((above < 0) != (below < 0), -whole, whole).astype(dtype))
            return
        self._pairwise(
            parts, operands, lambda a, b: np.divide(a, b) if "rn" in parts else self._about(np.divide(a, b))
        )

    def do_rsqrt(self, parts: list[str], operands: list[str]) -> None:
        self._pairwise(
            parts, operands, lambda a: self._about((1 / np.sqrt(a.astype(np.float64))).astype(np.float32))
        )

    def _about(self, values: np.ndarray) -> np.ndarray:
        """A last bit off, or not; the same for the same value, as on a GPU: threads may hold copies of it."""
        bits = np.ascontiguousarray(values).view(np.int32)
        mixed = (bits.view(np.uint32) ^ self.program._salt) * np.uint32(0x9E3779B1)
        moved = bits + ((mixed >> np.uint32(16)) % np.uint32(3)).astype(np.int32) - 1
        usual = np.isfinite(values) & (np.abs(values) > 1e-30)
        return np.where(usual, moved, bits).view(np.float32)

    def do_min(self, parts: list[str], operands: list[str]) -> None:
        """The smaller or larger one of two numbers, or, from sm_100 on, of three."""
        whole = "NaN" in parts or parts[-1][0] != "f"
        operation = getattr(np, f"{parts[0]}imum" if whole else f"f{parts[0]}")
        self._pairwise(parts, operands, lambda *values: functools.reduce(operation, values))

    do_max = do_min

    def do_shl(self, parts: list[str], operands: list[str]) -> None:
        dtype, left = _TYPES[parts[-1]], parts[0] == "shl"
        value, by = self.value(operands[1], dtype), self.value(operands[2], np.dtype(np.uint32))
        bits = 8 * dtype.itemsize
        short = np.minimum(by, bits - 1).astype(dtype)
        result = np.left_shift(value, short) if left else np.right_shift(value, short)
        if left or dtype.kind == "u":
            result = np.where(by >= bits, 0, result).astype(dtype)
        self.put(operands[0], result)

    do_shr = do_shl

    def do_shf(self, parts: list[str], operands: list[str]) -> None:
        u32 = np.dtype(np.uint32)
        low, high, by = (self.value(one, u32).astype(np.uint64) for one in operands[1:])
        both, by = low | high << np.uint64(32), by & np.uint64(31)
        assert parts[1:3] == ["l", "wrap"]
        self.put(operands[0], ((both << by) >> np.uint64(32)).astype(np.uint32))

    def do_bfe(self, parts: list[str], operands: list[str]) -> None:
        start, length = (int(one, 0) for one in operands[2:])
        value = self.value(operands[1], _TYPES[parts[-1]])
        left = value.dtype.type(32 - start - length)
        self.put(operands[0], (value << left) >> value.dtype.type(32 - length))

    def do_popc(self, parts: list[str], operands: list[str]) -> None:
        self.put(operands[0], np.bitwise_count(self.value(operands[1], _TYPES[parts[-1]])).astype(np.uint32))

    def do_prmt(self, parts: list[str], operands: list[str]) -> None:
        u32 = np.dtype(np.uint32)
        both = self.value(operands[1], u32).astype(np.uint64)
        both |= self.value(operands[2], u32).astype(np.uint64) << np.uint64(32)
        choice, result = self.value(operands[3], u32), np.zeros(THREADS, dtype=np.uint32)
        for place in range(4):
            nibble = choice >> np.uint32(4 * place) & np.uint32(15)
            byte = (both >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint8)
            sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint8)
            byte = np.where(nibble & 8, sign, byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * place)
        self.put(operands[0], result)

    def do_setp(self, parts: list[str], operands: list[str]) -> None:
        compare = {
            "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "eq": np.equal, "ne": np.not_equal,
        }[parts[1]]  # fmt: skip
        if parts[-1] == "f16x2":  # two predicates, of the lower and the upper half
            halves = [self.value(one, _TYPES["b32"]) for one in operands[1:]]
            for place, name in enumerate(operands[0].split("|")):
                both = [(one >> np.uint32(16 * place)).astype(np.uint16).view(np.float16) for one in halves]
                self.put(name, compare(*both))
            return
        self._pairwise(parts, operands, compare)

    def do_selp(self, parts: list[str], operands: list[str]) -> None:
        dtype = _TYPES[parts[-1]]
        chosen = self.value(operands[3], np.dtype(bool))
        self.put(
            operands[0], np.where(chosen, self.value(operands[1], dtype), self.value(operands[2], dtype))
        )

    def do_mov(self, parts: list[str], operands: list[str]) -> None:
        dtype = _TYPES[parts[-1]]
        to, source = operands
        if to[0] == "{":
            names = to.strip("{} ").replace(" ", "").split(",")
            bits = 8 * dtype.itemsize // len(names)
            value = self.value(source, dtype)
            for place, name in enumerate(names):
                part = (value >> dtype.type(bits * place)).astype(f"uint{bits}")
                self.put(name, part)
        elif source[0] == "{":
            names = source.strip("{} ").replace(" ", "").split(",")
            bits = 8 * dtype.itemsize // len(names)
            small = np.dtype(f"uint{bits}")
            value = np.zeros(THREADS, dtype)
            for place, name in enumerate(names):
                value |= self.value(name, small).astype(dtype) << dtype.type(bits * place)
            self.put(to, value)
        else:
            self.put(to, self.value(source, dtype))

    def do_cvt(self, parts: list[str], operands: list[str]) -> None:
        if parts[1:] == ["rn", "f16x2", "f32"]:  # the upper half first
            upper, lower = (
                self.value(one, _TYPES["f32"]).astype(np.float16).view(np.uint16).astype(np.uint32)
                for one in operands[1:]
            )
            self.put(operands[0], upper << np.uint32(16) | lower)
            return
        to, source = _TYPES[parts[-2]], _TYPES[parts[-1]]
        value = self.value(operands[1], source)
        roundings = set(parts[1:-2]) - {"ftz"}
        if "ftz" in parts:
            value = _flushed(value)
        if roundings == {"rzi"} and to.kind in "iu" and source.kind == "f":  # toward zero; NaN is 0
            limits, whole = np.iinfo(to), np.trunc(np.nan_to_num(value.astype(np.float64), nan=0.0))
            value = np.clip(whole, limits.min, limits.max)
        elif roundings == {"rmi"}:
            value = np.floor(value)
        elif roundings - {"rn"} or (to.kind != "f" and source.kind == "f"):
            raise Fault("a conversion that is not known")
        self.put(operands[0], value.astype(to))

    # --- memory -------------------------------------------------------------------------------------------

    def _vector(self, parts: list[str]) -> tuple[int, np.dtype]:
        count = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        return count, _TYPES[parts[-1]]

    def _names(self, text: str) -> list[str]:
        return text.strip("{} ").replace(" ", "").split(",")

    def do_ld(self, parts: list[str], operands: list[str]) -> None:
        if parts[1] == "param":
            name = operands[1].strip("[] ")
            value = self.parameters[name]
            to = _TYPES[parts[-1]]
            bits = value.view(f"uint{8 * value.dtype.itemsize}") if to.kind == "u" else value
            if value.dtype.itemsize * 8 == 32 and parts[-1] == "s32":
                bits = value.view(np.int32)
            self.put(operands[0], np.broadcast_to(bits, THREADS))
            return
        count, dtype = self._vector(parts)
        names = self._names(operands[0])
        size = count * dtype.itemsize
        raw = np.zeros((THREADS, size), dtype=np.uint8)
        raw[self.mask] = self._load(parts, operands[1], size)
        for place, name in enumerate(names):
            part = np.ascontiguousarray(raw[:, place * dtype.itemsize : (place + 1) * dtype.itemsize])
            self.put(name, part.view(dtype)[:, 0])

    def _load(self, parts: list[str], address: str, size: int) -> np.ndarray:
        threads = np.flatnonzero(self.mask)
        if parts[1] == "global":
            addresses = self.address(address, np.dtype(np.uint64))
            self._count_sectors(addresses, size)
            return self.memory.load(addresses[self.mask], size)
        addresses = self.address(address, np.dtype(np.uint32))
        self._count_cycles(addresses, size)
        return self.shared.load(threads, addresses[self.mask], size)

    def do_st(self, parts: list[str], operands: list[str]) -> None:
        count, dtype = self._vector(parts)
        names = self._names(operands[1])
        raw = np.concatenate(
            [
                np.ascontiguousarray(self.value(name, dtype)).view(np.uint8).reshape(THREADS, -1)
                for name in names
            ],
            axis=1,
        )[self.mask]
        size = count * dtype.itemsize
        if parts[1] == "global":
            addresses = self.address(operands[0], np.dtype(np.uint64))
            self._count_sectors(addresses, size)
            self.memory.store(addresses[self.mask], raw)
        else:
            addresses = self.address(operands[0], np.dtype(np.uint32))
            self._count_cycles(addresses, size)
            self.shared.store(np.flatnonzero(self.mask), addresses[self.mask], raw)

    def do_cp(self, parts: list[str], operands: list[str]) -> None:
        assert parts[1] == "async"
        if "commit_group" in parts:
            self.shared.commit()
        elif "wait_group" in parts:
            self.shared.wait(int(operands[0]))
        else:
            size = int(operands[2], 0)
            to = self.address(operands[0], np.dtype(np.uint32))
            source = self.address(operands[1], np.dtype(np.uint64))
            length = (
                self.value(operands[3], np.dtype(np.uint32)) if len(operands) > 3 else np.full(THREADS, size)
            )
            values = np.zeros((THREADS, size), dtype=np.uint8)
            reading = self.mask & (length > 0)
            if ((length != 0) & (length != size) & self.mask).any():
                raise Fault("cp.async of a part is not known")
            if reading.any():
                values[reading] = self.memory.load(source[reading], size)
                self._count_sectors(source, size, reading)
            self._count_cycles(to, size)
            self.shared.copy(np.flatnonzero(self.mask), to[self.mask], values[self.mask])

    def do_red(self, parts: list[str], operands: list[str]) -> None:
        dtype = _TYPES[parts[-1]]
        addresses = self.address(operands[0], np.dtype(np.uint64))
        values = self.value(operands[1], dtype)
        operation = {"add": np.add, "or": np.bitwise_or, "max": np.maximum}[parts[-2]]
        for thread in np.flatnonzero(self.mask):

            def changed(old: bytes, by: Any = values[thread]) -> bytes:
                return np.asarray(operation(np.frombuffer(old, dtype)[0], by)).astype(dtype).tobytes()

            self.memory.update(int(addresses[thread]), dtype.itemsize, changed)

    def do_atom(self, parts: list[str], operands: list[str]) -> None:
        """An atomic whose result, the old value, nobody reads: it may be anything."""
        self.known.pop(operands[0], None)
        self.do_red(parts, operands[1:])

    def _count_sectors(self, addresses: np.ndarray, size: int, mask: np.ndarray | None = None) -> None:
        mask = self.mask if mask is None else mask
        for warp in range(THREADS // WARP):
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            here = addresses[lanes][mask[lanes]]
            if len(here):
                sectors = np.unique(
                    np.concatenate([here // np.uint64(32), (here + np.uint64(size - 1)) // np.uint64(32)])
                )
                self.program.counts["sectors"] += len(sectors)

    def _count_cycles(self, addresses: np.ndarray, size: int) -> None:
        """A warp takes 128 bytes at a time: the words of the bank that has most."""
        at_once = WARP if size <= 4 else WARP * 4 // size
        for first in range(0, THREADS, at_once):
            lanes = slice(first, first + at_once)
            here = addresses[lanes][self.mask[lanes]].astype(np.int64)
            if len(here):
                words = np.unique((here[:, None] + np.arange(0, size, min(4, size))) // 4)
                self.program.counts["cycles"] += int(np.bincount(words % 32).max())

    # --- warps --------------------------------------------------------------------------------------------

    def do_shfl(self, parts: list[str], operands: list[str]) -> None:
        u32 = np.dtype(np.uint32)
        value, by = self.value(operands[1], u32), self.value(operands[2], u32).astype(np.int64)
        clamp = int(operands[3], 0)
        if operands[4] not in ("-1", "0xffffffff"):
            raise Fault("a shuffle of some lanes is not known")
        lane = np.arange(THREADS) % WARP
        # c: the segment's mask in its upper bits, and what lanes are clamped to.
        segment, most = clamp >> 8 & 31, clamp & 31
        last = (lane & segment) | (most & ~segment)
        first = lane & segment
        if parts[2] == "idx":
            source = first | (by & ~segment)
            inside = source <= last
        elif parts[2] == "bfly":
            source = lane ^ by
            inside = source <= last
        elif parts[2] == "up":
            source = lane - by
            inside = source >= last
        else:
            source = lane + by
            inside = source <= last
        source = np.where(inside, source, lane)
        self.program.counts["shuffles"] += THREADS // WARP
        self.put(operands[0], value[np.arange(THREADS) // WARP * WARP + source])

    def do_redux(self, parts: list[str], operands: list[str]) -> None:
        dtype = _TYPES[parts[-1]]
        rows = self.value(operands[1], dtype).reshape(-1, WARP)
        reduce = {"add": np.sum, "max": np.max, "min": np.min, "or": np.bitwise_or.reduce}[parts[2]]
        result = reduce(rows, axis=1, dtype=dtype) if parts[2] == "add" else reduce(rows, axis=1)
        self.put(operands[0], np.repeat(result, WARP))

    def _matrix_rows(self, address: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(threads, addresses of 8 rows) of each warp's matrices."""
        addresses = self.address(address, np.dtype(np.uint32))
        return [
            (np.arange(8) + warp * WARP + 8 * matrix, addresses[warp * WARP + 8 * matrix :][:8])
            for warp in range(THREADS // WARP)
            for matrix in range(count)
        ]

    def do_ldmatrix(self, parts: list[str], operands: list[str]) -> None:
        names = self._names(operands[0])
        found = np.zeros((len(names), THREADS), dtype=np.uint32)
        for place, (threads, addresses) in enumerate(self._matrix_rows(operands[1], len(names))):
            warp, matrix = divmod(place, len(names))
            # Any thread of the warp may read: as the one that gives the address.
            rows = np.ascontiguousarray(self.shared.load(threads, addresses, 16)).view(np.uint16)
            rows = np.ascontiguousarray(rows.T if "trans" in parts else rows).view(np.uint32)
            found[matrix, warp * WARP : (warp + 1) * WARP] = rows.reshape(-1)
            self.program.counts["cycles"] += _bank_cycles(addresses)
        for name, values in zip(names, found, strict=True):
            self.put(name, values)

    def do_stmatrix(self, parts: list[str], operands: list[str]) -> None:
        names = self._names(operands[1])
        values = np.stack([self.value(name, np.dtype(np.uint32)) for name in names])
        for place, (threads, addresses) in enumerate(self._matrix_rows(operands[0], len(names))):
            warp, matrix = divmod(place, len(names))
            rows = np.ascontiguousarray(values[matrix, warp * WARP : (warp + 1) * WARP]).reshape(8, 4)
            rows = rows.view(np.uint16)
            rows = np.ascontiguousarray(rows.T if "trans" in parts else rows)
            self.shared.store(threads, addresses, rows.view(np.uint8))
            self.program.counts["cycles"] += _bank_cycles(addresses)


def _bank_cycles(addresses: np.ndarray) -> int:
    words = np.unique((addresses.astype(np.int64)[:, None] + np.arange(0, 16, 4)) // 4)
    return int(np.bincount(words % 32).max())


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
}  # fmt: skip
_SYNCHRONIZING = ("bar", "shfl", "redux", "ldmatrix", "stmatrix", "cp")


def _flushed(values: np.ndarray) -> np.ndarray:
    """With .ftz subnormal numbers are zeros, as operands and as results."""
    return np.where(
        np.abs(values) < np.finfo(np.float32).tiny, np.copysign(values.dtype.type(0), values), values
    )


def _fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: the sum in fp64, rounded to odd, has more than twice fp32's bits."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    bits = np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
    return bits.view(np.float64).astype(np.float32)


def _fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    numbers = zip(*(np.broadcast_to(one, THREADS).tolist() for one in (a, b, c)), strict=True)
    return np.array([_FMA(*three) for three in numbers])
