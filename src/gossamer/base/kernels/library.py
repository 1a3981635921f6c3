"""Compiled library: whether it is there, whether it serves, and how its functions are called."""

from __future__ import annotations

import ctypes
import os
import warnings
from array import array
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import GossamerError, NotFinite

LIBRARY = Path(__file__).with_name("libgossamer-kernels.so")
ABI = 17  # what gossamer_abi() answers, in kernels-src/abi.cpp

NOT_FINITE, MALFORMED, OVERFLOW, NO_MEMORY, MISFIT = -1, -2, -3, -4, -5  # Answer in kernels-src/common.hpp

Pointer = ctypes.c_void_p
Count = ctypes.c_int64

SERVED = (torch.float32, torch.uint8, torch.int8, torch.int32)

SLOWER = "encoding takes 10 to 130 times as long, with the same results"
REBUILD = "Install a C++ compiler (g++ or clang++) and Gossamer again: pip install -e . in its sources"


class KernelsError(GossamerError, ValueError):
    """The kernels that were asked for are not there."""


def serves(*tensors: Tensor, types: Sequence[torch.dtype] = SERVED) -> bool:
    """Whether compiled loops for these types may run over these tensors: on the CPU, contiguous."""
    if wanted_kernels() in ("reference", "triton"):
        return False
    plain = all(
        tensor.device.type == "cpu"
        and tensor.dtype in types
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        for tensor in tensors
    )
    return plain and library() is not None


@cache
def wanted_kernels() -> str | None:
    """What GOSSAMER_KERNELS asks for: native, reference, triton, or None for the best there is. It is read once."""
    asked = os.environ.get("GOSSAMER_KERNELS")
    if asked not in (None, "", "native", "reference", "triton"):
        raise KernelsError(
            f"GOSSAMER_KERNELS={asked}: no such kernels, and other ones would have been measured under that name. "
            "Write GOSSAMER_KERNELS=native, reference or triton, or leave it unset."
        )
    return asked or None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; where there are none, says so once, or raises where they were asked for by name."""
    found, problem = _load()
    if found is not None:
        return found
    if wanted_kernels() == "native":
        raise KernelsError(f"GOSSAMER_KERNELS=native, but {problem}. {REBUILD}.")
    warnings.warn(f"{problem}: {SLOWER}. {REBUILD}.", stacklevel=2)
    return None


def are_built() -> bool:
    """Whether there are compiled loops; warns of nothing."""
    return _load()[0] is not None


def missing_kernels() -> str | None:
    """Why encoders are slow, with the line to write, where the installation left the compiled loops out.

    Returns:
        A sentence for the user, who gets no further warning about it from this process; None where the loops are
        built, or GOSSAMER_KERNELS asks for others.
    """
    _, problem = _load()
    if not problem or wanted_kernels() in ("reference", "triton"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library()
    return f"{problem}: {SLOWER}. {REBUILD}."


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The compiled loops, or why there are none."""
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
    """A function of the library: its name and what its arguments are. Python's lock is released while it runs."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    @cached_property
    def _found(self) -> Any:
        found = getattr(library(), self.name)
        found.argtypes, found.restype = self.arguments, ctypes.c_int64
        return found

    def __call__(self, *arguments: object) -> int:
        """A count, or MALFORMED, OVERFLOW or MISFIT, whose meaning depends on the function."""
        answer = int(self._found(*arguments))
        if answer == NOT_FINITE:
            raise NotFinite("a number is not finite, or too large to be added to what is still owed")
        if answer == NO_MEMORY:
            raise MemoryError(f"{self.name} needs memory for what it selects, and there is none left")
        return answer


def counts_array(counts: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An argument of type Pointer: int64 numbers."""
    numbers = array("q", counts)
    return (ctypes.c_int64 * len(numbers)).from_buffer(numbers)


def address(tensor: Tensor | None) -> int | None:
    """An argument of type Pointer: where the tensor's elements begin. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """An argument of type Pointer: where each tensor's elements begin."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
