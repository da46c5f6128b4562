"""Build hook: compiles the CPU kernels (megatron_patch/quantization/native) with the system's compiler.

Without a compiler the package is built all the same, without the library: it then runs the torch reference,
which is slower and gives the same bits.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SOURCES = Path("megatron_patch/quantization/native")
LIBRARY = "libmegatron_loco.so"
VARIED = ("kernels.cpp", "weight_code.cpp")  # compiled once for each instruction set
# Bit-equality with the reference: no contraction into fused multiply-adds, no reordering but of the sums that
# the source marks (#pragma omp simd).
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fopenmp-simd", "-fvisibility=hidden"]
X86_VARIANTS = {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


class NativeKernels(BuildHookInterface):
    """Adds the compiled library to the wheel, or leaves it out with one line that says so."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / SOURCES
        try:
            compile_library(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            (folder / LIBRARY).unlink(missing_ok=True)
            told = getattr(error, "stderr", "") or str(error)
            self.app.display_warning(
                f"the CPU kernels were not compiled (torch is used instead): {told[-500:]}"
            )
            return
        build_data["artifacts"].append(str(SOURCES / LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(platform_tags())}"


def compile_library(folder: Path) -> None:
    """Compile the variants of the kernels and dispatch.cpp into the library; nothing if it is up to date."""
    library = folder / LIBRARY
    inputs = [*folder.glob("*.cpp"), *folder.glob("*.h"), Path(__file__)]
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++, clang++) was found")
    variants = {"baseline": []}
    x86 = []
    if platform.machine() == "x86_64":
        variants |= X86_VARIANTS
        x86 = ["-DX86"]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(folder / "dispatch.cpp", Path(scratch, "dispatch.o"), x86)]
        for name, flags in variants.items():
            for source in VARIED:
                target = Path(scratch, f"{name}-{source}.o")
                jobs.append((folder / source, target, [*flags, f"-DVARIANT={name}"]))
        for _ in pool.map(lambda job: run(compiler, *FLAGS, *job[2], "-c", job[0], "-o", job[1]), jobs):
            pass
        # Renamed into place: a process that has the old library open keeps it.
        partial = library.with_suffix(".partial")
        run(compiler, "-shared", *(job[1] for job in jobs), "-o", partial)
        partial.replace(library)


def run(*command: Any) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)


if __name__ == "__main__":  # python hatch_build.py: compile in place
    compile_library(Path(__file__).parent / SOURCES)
    print(Path(__file__).parent / SOURCES / LIBRARY, file=sys.stderr)
