"""First batch: compares hashes of the ranks' first batches, to detect ranks with the same data."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.base import rng
from gossamer.base.torch_hooks import ForwardHook
from gossamer.events import notice
from gossamer.train.checkpoint import digest

NOT_SEEN, NO_BATCH = 0, -1
MOST_OBJECTS = 10_000  # of a batch that are searched, since one may reference everything in a program


class FirstBatch:
    """A hash of the first batch. Ranks that train on the same data compute the same gradient.

    begins: bound method, called before the first forward pass in training mode, unless torch.compile has captured the
        pass. Referenced weakly: the model has this object's hook, and must not keep a session alive.
    """

    def __init__(self, begins: Callable[[], None] | None = None) -> None:
        self.hash, self._pid = NOT_SEEN, os.getpid()
        self._begins = None if begins is None else weakref.WeakMethod(begins)
        self.hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Hash the first batch that is passed to `model`."""
        self.hook = model.register_forward_pre_hook(ForwardHook(self.see), with_kwargs=True)
        return self.hook

    def see(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook that hashes the first batch only.

        During compilation it does nothing: reading bytes would cause a graph break.
        """
        if torch.compiler.is_compiling():
            return
        if self.hash == NOT_SEEN and model.training and os.getpid() == self._pid:
            inputs = [each for each in map(_unwrapped, tensors_in(*args, *kwargs.values())) if _has_bytes(each)]
            with torch._C._DisableFuncTorch():  # else vmap would wrap the bytes as well
                self.hash = rng.address(digest(inputs)) if inputs else NO_BATCH
                if self._begins is not None and (begins := self._begins()) is not None:
                    begins()
            if self.hook is not None:
                self.hook.remove()

    @staticmethod
    def compare(batches: Sequence[tuple[int, float]]) -> None:
        """Print a notice about equal hashes among all ranks' (hash, weight)."""
        hashes = [batch for batch, weight in batches if weight > 0 and batch not in (NOT_SEEN, NO_BATCH)]
        if len(set(hashes)) < len(hashes):
            notice(
                "several workers passed equal inputs to the model in their first pass. If their losses are of the same "
                "samples, they compute one gradient several times: give each worker its own part of the data, "
                "DataLoader(dataset, sampler=world.shard(dataset), ...). If the inputs are noise, as of a GAN, seed it "
                "by rank before the loop: torch.manual_seed(seed + world.rank). If each loss uses another part of "
                "equal inputs, such as other nodes of one graph, nothing needs to change."
            )


def tensors_in(*batch: object) -> list[Tensor]:
    """All tensors of a batch, including those in mappings, lists, tuples, dataclasses, and attributes of objects."""
    found: list[Tensor] = []
    seen: dict[int, object] = {}  # references, so that no other object can get a known id
    waiting = deque(batch)
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found.append(value)
        else:
            waiting.extend(islice(_parts(value), MOST_OBJECTS))
    return found


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func.vmap` or `grad` wraps, or the tensor itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor has one strided buffer: not sparse, nested, quantized, on meta, or a wrapper of tensors."""
    plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _parts(value: object) -> Iterable[object]:
    """Values stored in an object. Properties and generators are not evaluated."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (nn.Module, type, ModuleType)):
        return ()  # no data, and they reference many objects
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    return chain(getattr(value, "__dict__", {}).values(), (getattr(value, name, None) for name in slots))
