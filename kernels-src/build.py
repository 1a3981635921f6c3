"""Compile what is written in C++ into the package: `.venv/bin/python kernels-src/build.py`, or `make kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
LOUD = ("-std=c++17", "-Wall", "-Wextra", "-Wno-maybe-uninitialized")  # the last is wrong about GCC's own headers

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
    "crc.cpp",
    "polyval.cpp",
)
# Every operation is rounded once and NaN is seen: the loops equal plain torch bit for bit. So never -ffast-math.
KERNEL_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")

SWITCH = "gossamer/plan/emulation/gossamer-switch"


class BuildError(Exception):
    """Why something cannot be compiled."""


def compile_kernels(root: Path) -> Path:
    """The library that gossamer.base.kernels loads."""
    sources = [HERE / name for name in KERNEL_SOURCES if (HERE / name).exists()]
    return _compile(root / "src" / KERNELS, ["-shared", "-pthread", *KERNEL_FLAGS], sources)


def compile_switch(root: Path) -> Path:
    """The program that moves the packets of an emulated network."""
    if not sys.platform.startswith("linux"):
        raise BuildError("it needs Linux")
    return _compile(root / "src" / SWITCH, ["-O2"], [HERE / "switch.cpp"])


def compile_sanitizers(root: Path) -> Path:
    """A program that runs every kernel under the address and undefined-behaviour sanitizers."""
    sources = [HERE / name for name in (*KERNEL_SOURCES, "sanitize.cpp") if (HERE / name).exists()]
    checks = [
        *("-O1", "-g", "-pthread", "-fno-omit-frame-pointer"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ]
    return _compile(root / "build" / "sanitize", [*checks, "-ffp-contract=off"], sources)


def compile_thread_sanitizer(root: Path) -> Path:
    """A program that lets threads share the kernels' work under the thread sanitizer."""
    sources = [HERE / name for name in (*KERNEL_SOURCES, "sanitize_threads.cpp") if (HERE / name).exists()]
    checks = ["-O1", "-g", "-pthread", "-fsanitize=thread", "-ffp-contract=off"]
    return _compile(root / "build" / "sanitize-threads", checks, sources)


def _compile(product: Path, flags: list[str], sources: list[Path]) -> Path:
    compiler = next(filter(None, map(shutil.which, filter(None, COMPILERS))), None)
    if compiler is None:
        raise BuildError("it needs a C++ compiler (g++ or clang++)")
    product.parent.mkdir(parents=True, exist_ok=True)
    draft = product.with_name(f".{product.name}-{os.getpid()}")
    command = [compiler, *LOUD, *flags, "-o", str(draft), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        draft.unlink(missing_ok=True)
        raise BuildError(f"{compiler} failed\n{done.stderr}")
    sys.stderr.write(done.stderr)
    os.replace(draft, product)  # what is in use keeps its own file
    return product


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
