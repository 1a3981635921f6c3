"""Fake accelerator: a device named "fake" whose tensors lie on the CPU, and which counts what would wait for a GPU.

Tensors on it are not `is_cpu`, autograd runs their hooks in a device thread of its own, as it does for CUDA, and every
operation passes `perform`. So what takes a number out of a tensor, moves one between host and device, or allocates
as much as the data says, is seen in whichever thread it happens. Streams, memory and speed of a GPU are not there.

The device is torch's PrivateUse1, of which a process has one: register it in a process of its own, before any backward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fake"
SCALAR, TO_HOST, TO_DEVICE, DATA_SIZED = "number read", "copied to host", "copied to device", "size from data"
KINDS = (SCALAR, TO_HOST, TO_DEVICE, DATA_SIZED)
BY_NAME = {
    "_local_scalar_dense": SCALAR,
    "equal": SCALAR,
    "nonzero": DATA_SIZED,
    "masked_select": DATA_SIZED,
    "_unique": DATA_SIZED,
    "_unique2": DATA_SIZED,
    "unique_dim": DATA_SIZED,
    "unique_consecutive": DATA_SIZED,
    "unique_dim_consecutive": DATA_SIZED,
    "bincount": DATA_SIZED,
}
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


@dataclass(frozen=True)
class HostCall:
    """One call for which the host would have waited."""

    kind: str
    thread: str  # its name
    place: str  # the innermost line of the library, or of whoever else called


seen: list[HostCall] = []
_library: list[Any] = []  # keeps the registration


class FakeTensor(Tensor):
    """A tensor on the fake device; `raw` holds its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> FakeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return perform(func, *args, **(kwargs or {}))

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {NAME}"


def perform(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on the fake device, or one that makes a tensor there or takes one from there."""
    wanted = kwargs.get("device")
    kind = _kind(func, args, kwargs)
    if kind is not None:
        seen.append(HostCall(kind, threading.current_thread().name, _place()))
    raw_args, raw = tree_map_only(FakeTensor, lambda each: each.raw, (args, kwargs))
    if wanted is not None and torch.device(wanted).type == NAME:
        raw = {**raw, "device": torch.device("cpu")}
    found = func(*raw_args, **raw)
    if (wanted is not None and torch.device(wanted).type != NAME) or kind == TO_HOST:
        return args[0] if func.overloadpacket._qualified_op_name == "aten::copy_" else found
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, FakeTensor, found))


def _kind(func: Any, args: Any, kwargs: Any) -> str | None:
    """How the host would wait for this operation; None where it would not."""
    name = func.overloadpacket.__name__
    fakes = [isinstance(each, FakeTensor) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if name == "_to_copy" and kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == NAME
        return None if there == fakes[0] or kwargs.get("non_blocking") else TO_DEVICE if there else TO_HOST
    if name == "copy_" and len(fakes) == 2 and fakes[0] != fakes[1]:
        return TO_DEVICE if fakes[0] else TO_HOST
    if name in INDEXING and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1])):
        return DATA_SIZED
    if name == "repeat_interleave" and kwargs.get("output_size") is None and any(fakes):
        return DATA_SIZED
    return BY_NAME.get(name) if any(fakes) else None


def _place() -> str:
    """Where the library asked for it: "train/engine/bucket.py:201"."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        head, found, inside = frame.f_code.co_filename.rpartition("gossamer/")
        if (found and "src" in head) or head.endswith("site-packages/"):
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def register() -> torch.device:
    """Make the device known to torch, once in this process."""
    if not _library:
        _setup_privateuseone_for_python_backend(NAME)
        fallback = torch.library.Library("_", "IMPL")
        fallback.fallback(perform, "PrivateUse1")
        _library.append(fallback)
        torch.tensor = _made_here(torch.tensor, waits=True)
        torch.arange = _made_here(torch.arange, waits=False)
    return torch.device(NAME, 0)


def counted(work: Callable[[], object]) -> list[HostCall]:
    """What would have waited meanwhile, in any thread."""
    before = len(seen)
    work()
    return seen[before:]


def _made_here(plain: Callable[..., Tensor], *, waits: bool) -> Callable[..., Tensor]:
    """A factory that makes its tensor without asking Python's dispatcher, or in memory that it lets grow.

    waits: it copies from a list, for which the host waits.
    """

    @wraps(plain)
    def made(*args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if device is None or torch.device(device).type != NAME:
            return plain(*args, **options)
        raw = plain(*args, **{**options, "device": "cpu"})
        return raw.to(device) if waits else FakeTensor(raw)

    return made
