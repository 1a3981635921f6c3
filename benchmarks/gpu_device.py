"""Device of a benchmark: what it is called, and how to wait for it before the clock is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import torch

from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.interleave import Timer


def settled(device: torch.device) -> Callable[[], object]:
    """Waits until the device has done all it was given; nothing to wait for on a processor."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def timed(work: Callable[[], object], settle: Callable[[], object]) -> Timer:
    """Seconds of one part, with the device at rest before and after."""

    def timer() -> Sequence[float]:
        settle()
        began = perf_counter()
        work()
        settle()
        return (perf_counter() - began,)

    return timer


def about(device: torch.device) -> str:
    """A line for the page: the device, and the versions that speed follows from."""
    if device.type != "cuda":
        return f"Device: {machine()['processor']}, torch {torch.__version__}. These are no figures of a GPU."
    name, index = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"Device: {name} (compute capability {index[0]}.{index[1]}), torch {torch.__version__}, {built}{_triton()}."


def _triton() -> str:
    try:
        return f", Triton {version('triton')}"
    except PackageNotFoundError:
        return ", no Triton"


def refuse_missing(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch finds no GPU here (torch.cuda.is_available() is False), and figures of another device would say "
            "nothing. Run this on a machine that has one; python benchmarks/gpu.py --device cpu --small shows in a "
            "minute that the program works."
        )
