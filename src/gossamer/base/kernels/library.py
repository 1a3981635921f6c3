"""Compiled library: its availability, supported inputs, and calls of its functions."""

from __future__ import annotations

import ctypes
import os
import warnings
from array import array
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from gossamer.base.compiled import LIBRARY, SLOWER, remedy
from gossamer.errors import GossamerError, NotFinite

ABI = 18  # the result of gossamer_abi(), in kernels-src/abi.cpp

NOT_FINITE, MALFORMED, OVERFLOW, NO_MEMORY, MISFIT = -1, -2, -3, -4, -5  # Answer in kernels-src/common.hpp

Pointer = ctypes.c_void_p
Count = ctypes.c_int64

SERVED = (torch.float32, torch.uint8, torch.int8, torch.int32)


class KernelsError(GossamerError, ValueError):
    """The requested kernels are not available."""


def serves(*tensors: Tensor, types: Sequence[torch.dtype] = SERVED) -> bool:
    """Whether compiled loops for these types support these tensors: on the CPU, contiguous."""
    if wanted_kernels() in ("reference", "triton"):
        return False
    for x in tensors:
        if not (x.is_cpu and x.dtype in types and x.layout == torch.strided and x.is_contiguous()):
            return False
    return library() is not None


@cache
def wanted_kernels() -> str | None:
    """Return the value of GOSSAMER_KERNELS, read once: native, reference, triton, or None for the best available."""
    asked = os.environ.get("GOSSAMER_KERNELS")
    if asked not in (None, "", "native", "reference", "triton"):
        raise KernelsError(
            f"GOSSAMER_KERNELS must be native, reference or triton, got {asked!r}: other kernels would have been "
            "measured under that name. Write GOSSAMER_KERNELS=native, or unset it."
        )
    return asked or None


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled loops. Without them, warn once, or raise KernelsError if they were requested by name."""
    found, problem = _load()
    if found is not None:
        return found
    if wanted_kernels() == "native":
        raise KernelsError(f"GOSSAMER_KERNELS=native, but {problem}. {remedy()}.")
    warnings.warn(f"{problem}: {SLOWER}. {remedy()}.", stacklevel=2)
    return None


def are_built() -> bool:
    """Whether compiled loops are available; never warns."""
    return _load()[0] is not None


def missing_kernels() -> str | None:
    """Return why encoders are slow, with the line to write, if the installation has no compiled loops.

    Returns:
        A sentence for the user, which replaces the warning in this process; None if the loops are built, or
        GOSSAMER_KERNELS selects others.
    """
    _, problem = _load()
    if not problem or wanted_kernels() in ("reference", "triton"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library()
    return f"{problem}: {SLOWER}. {remedy()}."


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the compiled loops, or the reason why they are missing."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY.name} was not built when Gossamer was installed"
    try:
        found = ctypes.CDLL(str(LIBRARY))
        version = found.gossamer_abi()
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} cannot be loaded ({error})"
    if version == ABI:
        return found, ""
    return None, f"{LIBRARY.name} was built from other sources (version {version}, not {ABI})"


class Function:
    """A function of the library: its name and argument types. The GIL is released while it runs."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    @cached_property
    def _found(self) -> Any:
        found = getattr(library(), self.name)
        found.argtypes, found.restype = self.arguments, ctypes.c_int64
        return found

    def __call__(self, *arguments: object) -> int:
        """Return a count, or MALFORMED, OVERFLOW or MISFIT; their meaning depends on the function."""
        answer = int(self._found(*arguments))
        if answer == NOT_FINITE:
            raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")
        if answer == NO_MEMORY:
            raise MemoryError(f"{self.name} needs memory for the selected entries, and none is left")
        return answer


def counts_array(counts: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return an argument of type Pointer: int64 numbers."""
    numbers = array("q", counts)
    return (ctypes.c_int64 * len(numbers)).from_buffer(numbers)


def address(tensor: Tensor | None) -> int | None:
    """Return an argument of type Pointer: the address of the tensor's elements. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an argument of type Pointer: the address of each tensor's elements."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
