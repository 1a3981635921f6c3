"""Compare the kernels of the aarch64 wheel with those of this machine, bit by bit: `make test-arm`.

The tests of kernels run here and write their calls. An emulator repeats the calls with the library of the wheel in
dist/. It also runs every kernel, compiled for aarch64, under the address and undefined-behaviour sanitizers. Needs
Debian's packages qemu-user-static and g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28_aarch64"
FOLDER = ROOT / "build" / PLATFORM
KERNELS = "gossamer/base/kernels/libgossamer-kernels.so"
LIBC = Path("/usr/aarch64-linux-gnu")
# The sanitizers run one in SHARE of their random rounds: 16 s of CPU time in the emulator, of 77 s for all. On x86-64
# they execute the same lines of the kernels as all rounds.
SHARE = 20
TESTS = [
    f"tests/base/kernels/test_{name}.py"
    for name in ("quantize_half", "quantize", "quantize_float4", "hadamard", "select", "low_rank")
]


def record(calls: Path) -> None:
    """Run the tests of kernels of this machine, which write their calls."""
    command = (ROOT / ".venv" / "bin" / "pytest", "-q", "-p", "support.kernel_calls", *TESTS)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"KERNEL_CALLS": str(calls)}, check=True)


def sanitized(compiler: str) -> Path:
    """Compile the program of `make sanitize` for aarch64."""
    build = runpy.run_path(str(ROOT / "kernels-src" / "build.py"))
    program: Path = build["compile_sanitizers"](ROOT, build["Toolchain"]((compiler,), (compiler,), FOLDER))
    return program


def main() -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if emulator is None or compiler is None:
        sys.exit("test-arm: install an emulator and a compiler: apt install qemu-user-static g++-aarch64-linux-gnu")
    wheels = list((ROOT / "dist").glob(f"*-{PLATFORM}.whl"))
    if not wheels:
        sys.exit("test-arm: dist/ has no wheel for aarch64. Build it: make wheels")
    with zipfile.ZipFile(wheels[0]) as wheel:
        library = wheel.extract(KERNELS, FOLDER / "wheel")
    program = FOLDER / "replay"
    source = ROOT / "kernels-src" / "replay.cpp"
    subprocess.run((compiler, "-std=c++17", "-O2", str(source), "-o", str(program), "-ldl"), check=True)
    calls = ROOT / "build" / "kernel-calls"
    record(calls)
    emulated = (emulator, "-L", str(LIBC))
    replayed = subprocess.run((*emulated, str(program), library, str(calls)), check=False)
    # An emulated process cannot be traced, which the search for leaks needs.
    environ = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    checked = subprocess.run((*emulated, str(sanitized(compiler)), str(SHARE)), env=environ, check=False)
    print(f"test-arm: sanitizers: {'passed' if checked.returncode == 0 else 'FAILED'}", flush=True)
    sys.exit(replayed.returncode or checked.returncode)


if __name__ == "__main__":
    main()
