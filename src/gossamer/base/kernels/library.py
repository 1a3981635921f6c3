"""Compiled library: its availability, inputs and calls; the choice between compiled loops, Triton and plain torch."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import cache, cached_property, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

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


# -- public kernels: a compiled loop on processors, Triton's kernel on a GPU, plain torch if neither supports the input

P = ParamSpec("P")
R = TypeVar("R")


def kernel(truth: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a compiled loop the public kernel with the name and docstring of plain torch's `truth`.

    All have the same arguments; unsupported inputs use `truth`.
    """

    def made(native: Callable[P, R]) -> Callable[P, R]:
        @wraps(native)
        def called(*arguments: P.args, **named: P.kwargs) -> R:
            device = gpu(arguments, named)
            if device is None or (found := _gpu_kernel(truth.__name__, device)) is None:
                return native(*arguments, **named)
            return _on(device, found, *arguments, **named)  # type: ignore[no-any-return]

        called.__doc__ = truth.__doc__
        return called

    return made


# -- tensors of a GPU --------------------------------------------------------------------------------------------------

OLDEST = (7, 0)  # compute capability that Triton compiles for

_interpreting = threading.RLock()

INSTALL = "pip install 'gossamer[gpu]'"


def _gpu_kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """Triton's kernel of that name; None if it does not exist or the device has no Triton."""
    return getattr(_module(device), name, None)


def _on(device: torch.device, kernel: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Triton starts kernels on the current device, which need not be the one that the tensors lie on; its interpreter
    serves one thread at a time."""
    with _interpreting if device.type == "cpu" else torch.cuda.device(device):
        return kernel(*arguments, **named)


def gpu(arguments: tuple[object, ...], named: dict[str, Any]) -> torch.device | None:
    """The device of the first tensor among the arguments if Triton may support it, otherwise None."""
    for each in (*arguments, *named.values()):
        if isinstance(each, Tensor):
            served = each.device.type == "cuda" or (wanted_kernels() == "triton" and each.device.type == "cpu")
            return each.device if served else None
    return None


@cache
def _module(device: torch.device) -> ModuleType | None:
    """The kernels for this device, or None and one notice where it has none. Raises KernelsError where they were
    asked for by name."""
    requested = wanted_kernels()
    if requested in ("native", "reference"):
        return None
    if (problem := _problem(device)) is None:
        return import_module("gossamer.base.kernels.triton")
    if requested == "triton":
        raise KernelsError(f"GOSSAMER_KERNELS=triton, but {problem}. Leave GOSSAMER_KERNELS unset.")
    warnings.warn(f"{problem}: encoding on this GPU is plain torch, several times slower.", stacklevel=2)
    return None


def _problem(device: torch.device) -> str | None:
    """Return why Triton does not support this device, with the line to write."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and not interpreted:
        return "tensors on processors are served by Triton's interpreter only (set TRITON_INTERPRET=1 to test with it)"
    if device.type == "cuda" and not interpreted and torch.version.hip is None:
        able = torch.cuda.get_device_capability(device)
        if able < OLDEST:
            return (
                f"Triton compiles for compute capability {OLDEST[0]}.{OLDEST[1]}, and this GPU has {able[0]}.{able[1]}"
            )
    try:
        import_module("triton")
    except ImportError as error:
        return f"Triton is not installed ({error}; {INSTALL})"
    return None
