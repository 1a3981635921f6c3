"""Status: errors that kernels found, as bits of one number on the device, which the host reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.errors import NotFinite

NOT_FINITE: tl.constexpr = tl.constexpr(1)
MALFORMED: tl.constexpr = tl.constexpr(2)
OUT_OF_RANGE: tl.constexpr = tl.constexpr(4)

INFINITY: tl.constexpr = tl.constexpr(float("inf"))


def fresh(device: torch.device) -> Tensor:
    """(1,) int32: nothing was found yet."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@triton.jit
def report(status, wrong, bit: tl.constexpr):
    """Within a kernel: set `bit` where any element of `wrong` is set."""
    if tl.max(wrong.to(tl.int32)) > 0:
        tl.atomic_or(status, bit)


@triton.jit
def expect_sendable(numbers, status):
    """Within a kernel: report values that are not finite."""
    report(status, ~(tl.abs(numbers) < INFINITY), NOT_FINITE)  # NaN is not below anything


def found(status: Tensor) -> int:
    """The bits that were set. Waits for the kernels before it, so a communication thread calls it, never training."""
    return int(status.item())


def expect_finite(status: Tensor) -> None:
    """Raise NotFinite where a kernel found a number that cannot be sent."""
    if found(status) & NOT_FINITE.value:
        raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")
