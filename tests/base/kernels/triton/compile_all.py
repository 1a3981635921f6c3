"""Compile every Triton kernel for GPUs that are not here, and say which machine instructions would round differently.

What the interpreter runs a compiler may refuse, or fuse, or approximate. One process: the interpreter cannot be turned
off once kernels were imported with it. Prints JSON: by target, by kernel, what was found; [] where nothing.

`--once` compiles each kernel for the arguments of its first call only: 29 compilations per target instead of 234.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the worst case: what is launched without EXACT shows
sys.path.insert(0, str(Path(__file__).parent))

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "ampere": GPUTarget("cuda", 80, 32),
    "hopper": GPUTarget("cuda", 90, 32),
    "mi300": GPUTarget("hip", "gfx942", 64),
}
INEXACT = re.compile(r"\b(fma\.rn[.\w]*\.f(?:32|64)|[\w.]*\.approx[\w.]*|div\.full[\w.]*|[\w.]+\.ftz[\w.]*)")


class AbsentGpu:
    """A driver of a GPU that is not there: kernels are compiled for it, and never run."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self.target)  # what was compiled is kept by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled_instead_of_launched(found: dict[str, set[str]], *, once: bool) -> None:
    def instead(kernel: JITFunction, grid: Any) -> Any:
        def compile_(*arguments: Any, **named: Any) -> None:
            if once and kernel.fn.__name__ in found:
                return
            text = kernel.warmup(*arguments, grid=grid, **named).asm.get("ptx", "")
            found.setdefault(kernel.fn.__name__, set()).update(INEXACT.findall(text))

        return compile_

    JITFunction.__getitem__ = instead


def main() -> None:
    cases = [each.stem for each in sorted(Path(__file__).parent.glob("cases_*.py"))]
    once, names = "--once" in sys.argv, [each for each in sys.argv[1:] if each != "--once"]
    answers = {}
    for name in names or TARGETS:
        found: dict[str, set[str]] = {}
        compiled_instead_of_launched(found, once=once)
        driver.set_active(AbsentGpu(TARGETS[name]))
        for case in cases:
            for call in importlib.import_module(case).CASES:
                call()
        answers[name] = {kernel: sorted(wrong) for kernel, wrong in found.items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
