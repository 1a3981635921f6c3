"""Half precision by compiled loops; unsupported and invalid inputs use plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import empty
from gossamer.base.kernels.dispatch import kernel
from gossamer.base.kernels.library import OVERFLOW, Count, Function, Pointer, address, addresses, serves
from gossamer.base.kernels.reference import half

EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5}

_ENCODE = Function("gossamer_half_encode", Pointer, Count, Count, ctypes.c_float, Pointer)
_DECODE = Function("gossamer_half_decode", Pointer, *[Count] * 3, ctypes.c_float, Pointer)


@kernel(half.half_encode)
def half_encode(x: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    if dtype not in EXPONENT_BITS or not serves(x, types=(torch.float32,)):
        return half.half_encode(x, dtype, terms)
    found = empty(len(x), dtype)
    _ENCODE(address(x), len(x), EXPONENT_BITS[dtype], torch.finfo(x.dtype).max / terms, address(found))
    return found


@kernel(half.half_decode)
def half_decode(payloads: Sequence[Tensor], out: Tensor, divisor: int = 1) -> bool:
    dtype = payloads[0].dtype
    alike = all(payload.dtype == dtype and payload.shape == (out.numel(),) for payload in payloads)
    kernel_serves = alike and serves(out, types=(torch.float32,)) and serves(*payloads, types=tuple(EXPONENT_BITS))
    if not kernel_serves:
        return half.half_decode(payloads, out, divisor)
    counts = len(payloads), out.numel(), EXPONENT_BITS[dtype]
    return _DECODE(addresses(payloads), *counts, divisor, address(out)) != OVERFLOW
