"""Dispatch: a public kernel is a compiled loop on processors, Triton's on a GPU, plain torch where neither serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from gossamer.base.kernels.gpu import gpu_kernel

P = ParamSpec("P")
R = TypeVar("R")


def kernel(truth: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a compiled loop, which hands what it does not serve to plain torch's `truth`, the public kernel of that name
    and docstring; all three have the same arguments."""

    def made(native: Callable[P, R]) -> Callable[P, R]:
        @wraps(native)
        def called(*arguments: P.args, **named: P.kwargs) -> R:
            found = gpu_kernel(truth.__name__, arguments, named)
            return (native if found is None else found)(*arguments, **named)

        called.__doc__ = truth.__doc__
        return called

    return made
