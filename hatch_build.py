"""Build hook: compiles the CPU kernels with the system's compiler, into one library: those of the codecs
(megatron_patch/quantization/native) and of the weight coder (megatron_patch/weights/native).

Without a compiler the package is built all the same, without the library: it then runs the torch reference,
which is slower and gives the same bits.

Environment:
    CXX: the compiler.
    MEGATRON_LOCO_MACHINE: compile for this machine (x86_64, aarch64), by Debian's cross-compiler; a failure
        ends the build (tools/dist.sh).
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("megatron_patch/quantization/native")
OF_WEIGHTS = Path("../../weights/native")  # from there
LIBRARY = "libmegatron_loco.so"
VARIED = (Path("kernels.cpp"), OF_WEIGHTS / "code.cpp")  # compiled once for each instruction set
# Bit-equality with the reference: no contraction into fused multiply-adds, no reordering but of the sums that
# the source marks (#pragma omp simd).
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Nothing is thrown through the C interface, and of libstdc++ only `new` and `delete[]` remain: symbols so old
# that one wheel serves every glibc from 2.17 on.
FLAGS += ["-fopenmp-simd", "-fvisibility=hidden", "-fno-exceptions"]
X86_VARIANTS = {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}


class NativeKernels(BuildHookInterface):
    """Adds the compiled library to the wheel, or leaves it out with one line that says so."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / SOURCES
        machine = os.environ.get("MEGATRON_LOCO_MACHINE")
        if machine:
            library = Path(self.root, "build", machine, LIBRARY)
            compile_library(folder, library, machine)
            build_data["force_include"][str(library)] = str(SOURCES / LIBRARY)
            tag = f"linux_{machine}"
        else:
            library = folder / LIBRARY
            try:
                compile_library(folder, library)
            except (OSError, subprocess.CalledProcessError) as error:
                library.unlink(missing_ok=True)
                reason = getattr(error, "stderr", "") or str(error)
                self.app.display_warning(
                    f"the CPU kernels were not compiled (torch is used instead): {reason[-500:]}"
                )
                return
            build_data["artifacts"].append(str(SOURCES / LIBRARY))
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"


def compile_library(folder: Path, library: Path, machine: str = platform.machine()) -> None:
    """Compile the variants of the kernels and dispatch.cpp into the library; nothing if it is up to date."""
    inputs = [
        path for kind in ("*.cpp", "*.h") for of in (folder, folder / OF_WEIGHTS) for path in of.glob(kind)
    ]
    inputs.append(Path(__file__))
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return
    compiler = compiler_for(machine)
    variants = {"baseline": []}
    x86 = []
    if machine == "x86_64":
        variants |= X86_VARIANTS
        x86 = ["-DX86"]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [(folder / "dispatch.cpp", Path(scratch, "dispatch.o"), x86)]
        for name, flags in variants.items():
            for source in VARIED:
                target = Path(scratch, f"{name}-{source.stem}.o")
                jobs.append((folder / source, target, [*flags, f"-DVARIANT={name}", f"-I{folder}"]))
        for _ in pool.map(lambda job: run(compiler, *FLAGS, *job[2], "-c", job[0], "-o", job[1]), jobs):
            pass
        # Renamed into place: a process that has the old library open keeps it.
        partial = library.with_suffix(".partial")
        run(compiler, "-shared", *(job[1] for job in jobs), "-o", partial)
        partial.replace(library)


def compiler_for(machine: str) -> str:
    """The C++ compiler that makes code for a machine.

    Raises:
        FileNotFoundError: there is none.
    """
    if machine != platform.machine():
        names = [f"{machine}-linux-gnu-g++"]
    elif os.environ.get("CXX"):
        names = [os.environ["CXX"]]
    else:
        names = ["g++", "clang++", "c++"]
    found = next(filter(shutil.which, names), None)
    if found is None:
        raise FileNotFoundError(f"no C++ compiler for {machine} was found ({', '.join(names)})")
    return found


def run(*command: Any) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)


if __name__ == "__main__":  # python hatch_build.py: compile in place
    compile_library(Path(__file__).parent / SOURCES, Path(__file__).parent / SOURCES / LIBRARY)
    print(Path(__file__).parent / SOURCES / LIBRARY, file=sys.stderr)
