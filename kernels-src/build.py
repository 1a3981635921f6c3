"""Compile the C++ kernels into the package: `.venv/bin/python kernels-src/build.py`, or `make kernels`.

A toolchain is a compiler, its options and the folder of its products. The toolchain of this machine writes beside the
Python sources. The toolchain of a release platform (`Toolchain.release`) links against an old libc, so that the product
loads on other machines; it writes to build/PLATFORM.
"""

from __future__ import annotations

import os
import platform as machines
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
LOUD = ("-std=c++17", "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option")  # wrong about GCC

KERNELS = "gossamer/base/kernels/libgossamer-kernels.so"
KERNEL_SOURCES = (
    "abi.cpp",
    "thread_pool.cpp",
    "select.cpp",
    "index_coding.cpp",
    "quantize.cpp",
    "dequantize.cpp",
    "measures.cpp",
    "half.cpp",
    "hadamard.cpp",
    "float4.cpp",
    "low_rank.cpp",
    "orthonormal.cpp",
    "mesh.cpp",
    "mesh_links.cpp",
    "mesh_interface.cpp",
    "bandwidth.cpp",
    "crc.cpp",
    "polyval.cpp",
)
# Every operation is rounded once and NaN is seen: the loops equal plain torch bit for bit. So never -ffast-math.
KERNEL_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")

SWITCH = "gossamer/plan/emulation/gossamer-switch"

# Platforms of published wheels, by the name that Python's packaging gives them, and the target that zig links for.
RELEASE_TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
}
ZIG = (sys.executable, "-m", "ziglang", "c++")  # the package ziglang on PyPI: clang, and the symbols of every libc


class BuildError(Exception):
    """Why something cannot be compiled."""


@dataclass(frozen=True)
class Toolchain:
    """How sources become a product.

    Args:
        compiler: command line of the compiler; empty if there is none.
        linker: command line that links objects.
        folder: where products are written.
        flags: options for each source.
        sources: sources that each product needs in addition.
        libraries: arguments of the linker behind the objects.
        exports: arguments of the linker that keep the symbols of static libraries out of a shared library's interface.
    """

    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    folder: Path
    flags: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()

    @classmethod
    def local(cls, folder: Path) -> Toolchain:
        """The compiler of this machine."""
        found = next(filter(None, map(shutil.which, filter(None, COMPILERS))), None)
        command = () if found is None else (found,)
        return cls(command, command, folder)

    @classmethod
    def release(cls, platform: str, folder: Path) -> Toolchain:
        """Products for a platform of RELEASE_TARGETS: symbols of glibc 2.28, and no dependency on libstdc++.

        zig links with glibc 2.28. It also compiles for other processors than this machine's. For x86-64, GCC compiles:
        clang has no clones of function templates (GOSSAMER_CLONES), and the choice of instructions at run time is
        worth a factor of several.

        Raises:
            BuildError: the platform is unknown, or GCC 12 is missing.
        """
        if platform not in RELEASE_TARGETS:
            raise BuildError(f"there is no wheel for {platform!r}. Choose one of: {', '.join(RELEASE_TARGETS)}")
        zig = (*ZIG, "-target", RELEASE_TARGETS[platform], "-s")
        # Paths of this machine are not part of the product: two machines build the same bytes.
        flags = (f"-ffile-prefix-map={HERE}=.",)
        exports = (f"-Wl,--version-script={HERE / 'exports.map'}", "-Wl,--gc-sections")
        if not platform.endswith("x86_64"):
            return cls(zig, zig, folder, (*flags, "-fno-sanitize=all"), exports=exports)
        compiler = shutil.which(os.environ.get("CXX") or "g++")
        if compiler is None or machines.machine() != "x86_64":
            raise BuildError("a wheel for x86-64 is compiled by g++ 12 or newer on x86-64. Install it: apt install g++")
        archives = [_library_of(compiler, name) for name in ("libstdc++.a", "libgcc.a")]
        link = (*zig, "-nostdlib++")
        return cls((compiler,), link, folder, flags, ("old_libc.cpp",), (*archives, "-lunwind"), exports)


def _library_of(compiler: str, name: str) -> str:
    """Path of a static library of this compiler."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def compile_kernels(root: Path, toolchain: Toolchain | None = None) -> Path:
    """The library that gossamer.base.kernels loads."""
    tools = toolchain or Toolchain.local(root / "src")
    return _compile(KERNELS, (*KERNEL_FLAGS, "-pthread"), KERNEL_SOURCES, tools, ("-shared", *tools.exports))


def compile_switch(root: Path, toolchain: Toolchain | None = None) -> Path:
    """The program that moves the packets of an emulated network."""
    if not sys.platform.startswith("linux"):
        raise BuildError("it needs Linux")
    return _compile(SWITCH, ("-O2", "-pthread"), ("switch.cpp",), toolchain or Toolchain.local(root / "src"))


def compile_sanitizers(root: Path, toolchain: Toolchain | None = None) -> Path:
    """A program that runs every kernel under the address and undefined-behaviour sanitizers."""
    checks = (
        *("-O1", "-g", "-pthread", "-fno-omit-frame-pointer"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    )
    sources = (*KERNEL_SOURCES, "sanitize.cpp")
    return _compile("sanitize", (*checks, "-ffp-contract=off"), sources, toolchain or Toolchain.local(root / "build"))


def compile_thread_sanitizer(root: Path) -> Path:
    """A program that lets threads share the kernels' work under the thread sanitizer."""
    checks = ("-O1", "-g", "-pthread", "-fsanitize=thread", "-ffp-contract=off")
    sources = (*KERNEL_SOURCES, "sanitize_threads.cpp")
    return _compile("sanitize-threads", checks, sources, Toolchain.local(root / "build"))


def _compile(
    name: str, flags: tuple[str, ...], sources: tuple[str, ...], tools: Toolchain, linking: tuple[str, ...] = ()
) -> Path:
    """Compile the sources that exist on all cores, with a line on stderr for each, and link them."""
    if not tools.compiler:
        raise BuildError("it needs a C++ compiler (g++ or clang++)")
    product = tools.folder / name
    product.parent.mkdir(parents=True, exist_ok=True)
    draft = product.with_name(f".{product.name}-{os.getpid()}")
    paths = [HERE / source for source in (*sources, *tools.sources) if (HERE / source).exists()]
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(_cores()) as pool:
        command = (*tools.compiler, *LOUD, *tools.flags, *flags)
        made = {path: Path(objects) / f"{path.stem}.o" for path in paths}
        # The largest first, so that no core waits at the end for one large source.
        jobs = [
            pool.submit(_timed, path.name, (*command, "-c", str(path), "-o", str(made[path])))
            for path in sorted(paths, key=lambda path: -path.stat().st_size)
        ]
        try:
            for count, job in enumerate(as_completed(jobs), 1):
                source, seconds = job.result()
                print(f"{product.name}: {count}/{len(jobs)} {source} {seconds:.1f} s", file=sys.stderr, flush=True)
            _run((*tools.linker, *flags, *linking, *map(str, made.values()), *tools.libraries, "-o", str(draft)))
            os.replace(draft, product)  # what is in use keeps its own file
        finally:
            pool.shutdown(cancel_futures=True)
            draft.unlink(missing_ok=True)
    return product


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _timed(source: str, command: tuple[str, ...]) -> tuple[str, float]:
    """Compile one source; return its name and the seconds that it took."""
    began = time.monotonic()
    _run(command)
    return source, time.monotonic() - began


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed\n{done.stderr}")
    sys.stderr.write(done.stderr)


PRODUCTS = {
    "kernels": compile_kernels,
    "switch": compile_switch,
    "sanitize": compile_sanitizers,
    "sanitize-threads": compile_thread_sanitizer,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ["kernels", "switch"]:
        try:
            print(PRODUCTS[name](HERE.parent))
        except BuildError as error:
            sys.exit(f"{name} is left out: {error}")
