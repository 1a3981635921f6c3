"""Dispatch: a public kernel is a compiled loop on processors, Triton's on a GPU, plain torch where neither serves."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gossamer.base.kernels.library import KernelsError, wanted_kernels

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


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
